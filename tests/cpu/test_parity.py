"""The parity run fails on what is wrong: errors are planted in outputs and in what makes them."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from prime_kernels import bf16, runtime
from prime_kernels.bench import parity
from prime_kernels.bench.cases import PRECISIONS, ROUTINGS, SHAPES, VARIANTS, Case, Routing, rank_inputs
from prime_kernels.bench.judge import CaseVerdict, RankOutputs, expected_outputs, judge_case, poison_
from prime_kernels.bench.ranks import GUARD_ELEMENTS, RankSettings, run_in_processes, run_rank

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets process-wide settings; take them back afterwards."""
    monkeypatch.setattr(runtime, "_backend", None)
    monkeypatch.setattr(runtime, "_device", None)
    monkeypatch.delenv(runtime.BACKEND_ENV, raising=False)


def case(
    routing: str = "mixed", variant: str = "plain", precision: str = "bf16", shape: str = "small"
) -> Case:
    return Case(PRECISIONS[precision], SHAPES[shape], ROUTINGS[routing], 1, VARIANTS[variant])


def judged(one: Case, plant: Callable[[dict[str, Tensor]], object]) -> CaseVerdict:
    """The verdict on right outputs that ``plant`` has changed in place."""
    outputs = run_rank(one, 0, None, CPU)
    plant({name: tensor for name, tensor in outputs.tensors.items() if tensor is not None})
    return judge_case(one, [outputs], CPU)


IDLE = SHAPES["small"].num_experts - 1  # has no row with the routing empty-experts


def token_without_expert(one: Case) -> int:
    idx = rank_inputs(one, 0, CPU).topk_idx
    return int((idx < 0).all(1).nonzero()[0])


def masked_slot(one: Case) -> tuple[int, int]:
    token, slot = rank_inputs(one, 0, CPU).topk_idx.lt(0).nonzero()[0].tolist()
    return token, slot


def set_at(output: str, index: Any, value: float) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors[output].__setitem__(index, value)


def scale(output: str, index: Any, factor: float) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors[output][index].mul_(factor)


MASKED = case("masked")
EMPTY = case("empty-experts")
SMALLEST = 2.0**-120

PLANTED = [
    pytest.param(MASKED, scale("y", ..., 1.01), "y: error 1.", id="y-all"),
    pytest.param(MASKED, scale("dx", ..., 0.98), "dx: error 2.", id="dx-all"),
    pytest.param(MASKED, scale("dtopk", ..., -1.0), "dtopk: error 2.0", id="dtopk-sign"),
    pytest.param(MASKED, lambda t: t["y"].copy_(t["y"].roll(1, 0)), "y: error", id="y-rows-moved"),
    pytest.param(MASKED, scale("y", 5, 1.03), "y: row 5: error 3.", id="y-one-row"),
    pytest.param(MASKED, scale("dw1", 3, 1.02), "dw1: expert 3: error 2.", id="dw1-one-expert"),
    pytest.param(MASKED, scale("dw2", 6, 0.0), "dw2: expert 6: error 1.0", id="dw2-one-expert-lost"),
    pytest.param(
        MASKED, lambda t: t["dw2"][0].copy_(t["dw2"][1]), "dw2: expert 0: error 1.", id="dw2-experts-swapped"
    ),
    pytest.param(
        case("balanced"), scale("dtopk", (66, 1), -1.0), "dtopk: token 66 slot 1: error", id="dtopk-one-slot"
    ),
    pytest.param(
        MASKED,
        lambda t: poison_(t["dx"][7, 3:4]),
        "dx: 1 of 17152 elements were never written",
        id="dx-poison",
    ),
    pytest.param(MASKED, lambda t: poison_(t["dw1"]), "elements were never written", id="dw1-untouched"),
    pytest.param(
        MASKED,
        set_at("dw2", (1, 2, 3), float("nan")),
        "dw2: 1 of 262144 elements are Inf or NaN",
        id="dw2-nan",
    ),
    pytest.param(
        MASKED, set_at("y", (0, 0), float("-inf")), "y: 1 of 17152 elements are Inf or NaN", id="y-inf"
    ),
    pytest.param(
        EMPTY, set_at("dw1", (IDLE, 0, 0), SMALLEST), f"the first is expert {IDLE}", id="dw1-idle-expert"
    ),
    pytest.param(
        EMPTY, set_at("dw2", (IDLE, 0, 0), float("nan")), "must be exactly 0", id="dw2-idle-expert-nan"
    ),
    pytest.param(
        MASKED,
        set_at("y", (token_without_expert(MASKED), 9), SMALLEST),
        "must be exactly 0",
        id="y-no-expert",
    ),
    pytest.param(
        MASKED,
        set_at("dx", (token_without_expert(MASKED), 9), SMALLEST),
        "must be exactly 0",
        id="dx-no-expert",
    ),
    pytest.param(
        MASKED,
        set_at("dtopk", masked_slot(MASKED), SMALLEST),
        "dtopk: 1 parts that must be exactly 0",
        id="dtopk-masked",
    ),
]


@pytest.mark.parametrize(("one", "plant", "expected"), PLANTED)
def test_planted_error_fails(one: Case, plant: Callable[[dict[str, Tensor]], object], expected: str) -> None:
    verdict = judged(one, plant)
    assert not verdict.passed
    assert any(expected in failure for failure in verdict.failures), verdict.failures


@pytest.mark.parametrize("one", [MASKED, EMPTY], ids=lambda one: one.name)
def test_untouched_outputs_pass(one: Case) -> None:
    verdict = judged(one, lambda tensors: None)
    assert verdict.passed, verdict.failures
    assert {output.output for output in verdict.outputs} == {"y", "dx", "dtopk", "dw1", "dw2"}


def test_few_rows_loosen_only_their_own_expert() -> None:
    one = case("one-expert", shape="wide-topk")
    verdict = judged(one, scale("dw1", one.shape.num_experts - 1, 1.006))
    assert any("dw1" in failure for failure in verdict.failures), verdict.failures


def test_output_of_another_size_is_refused() -> None:
    outputs = run_rank(MASKED, 0, None, CPU)
    assert outputs.tensors["y"] is not None
    outputs.tensors["y"] = outputs.tensors["y"][1:]
    with pytest.raises(ValueError, match="y: shape"):
        judge_case(MASKED, [outputs], CPU)


# --- Errors in the functions under test, seen by the whole command ---------------------------------------

FORWARD, BACKWARD = bf16.bf16_mega_moe, bf16.bf16_mega_moe_backward


def forward_scales_one_row(y: Tensor, *rest: Any, **options: Any) -> None:
    FORWARD(y, *rest, **options)
    y[11] *= 1.05


def forward_writes_past_its_output(y: Tensor, *rest: Any, **options: Any) -> None:
    FORWARD(y, *rest, **options)
    y.as_strided((1,), (1,), y.storage_offset() + y.numel()).fill_(0)


def forward_writes_before_its_output(y: Tensor, *rest: Any, **options: Any) -> None:
    FORWARD(y, *rest, **options)
    y.as_strided((1,), (1,), y.storage_offset() - GUARD_ELEMENTS).fill_(0)


CALLS = itertools.count()


def forward_is_not_reproducible(y: Tensor, *rest: Any, **options: Any) -> None:
    FORWARD(y, *rest, **options)
    y[0, 0] = next(CALLS)


def forward_uses_padding(y: Tensor, l1: Tensor, l2: Tensor, buffer: Any, *rest: Any, **options: Any) -> None:
    FORWARD(y, l1, l2, buffer, *rest, **options)
    y += 0 * buffer.x[len(y)]


def backward_leaves_dx(dx: Tensor, *rest: Any, **options: Any) -> None:
    BACKWARD(torch.empty_like(dx), *rest, **options)


def backward_swaps_gate_and_up(dx: Tensor, dw1: Tensor, *rest: Any, **options: Any) -> None:
    BACKWARD(dx, dw1, *rest, **options)
    dw1.copy_(dw1.roll(dw1.shape[1] // 2, 1))


def backward_overwrites_instead_of_adding(*outputs: Any, accumulate: bool, **options: Any) -> None:
    BACKWARD(*outputs, accumulate=False, **options)


def backward_raises(*outputs: Any, **options: Any) -> None:
    raise RuntimeError("planted: rank 0 waits for nobody")


PLANTED_FUNCTIONS = [
    (forward_scales_one_row, "plain", "y: row 11: error"),
    (forward_writes_past_its_output, "plain", "y: 1 elements outside the output were written"),
    (forward_writes_before_its_output, "plain", "y: 1 elements outside the output were written"),
    (forward_is_not_reproducible, "plain", "y: step 2 differs from step 1"),
    (forward_uses_padding, "plain", "elements are Inf or NaN"),
    (backward_leaves_dx, "plain", "elements were never written"),
    (backward_swaps_gate_and_up, "plain", "dw1: error 1."),
    (backward_overwrites_instead_of_adding, "accumulate", "dw1: error"),
    (backward_raises, "plain", "planted: rank 0 waits for nobody"),
]


@pytest.mark.parametrize(("function", "variant", "expected"), PLANTED_FUNCTIONS)
def test_wrong_function_gives_exit_code_1(
    function: Callable[..., None],
    variant: str,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    name = "bf16_mega_moe_backward" if function.__name__.startswith("backward") else "bf16_mega_moe"
    monkeypatch.setattr(bf16, name, function)
    argv = [
        "--shapes",
        "small",
        "--routings",
        "mixed",
        "--variants",
        variant,
        "--ranks",
        "1",
        "--out",
        str(tmp_path),
    ]
    assert parity.main(argv) == parity.EXIT_FAILED
    report = json.loads((tmp_path / "parity.json").read_text())
    assert not report["passed"]
    assert any(expected in failure for failure in report["cases"][0]["failures"]), report["cases"][0][
        "failures"
    ]
    suite = ElementTree.parse(tmp_path / "parity.xml").getroot()
    assert suite.get("failures") == "1"
    failure = suite.find("testsuite/testcase/failure")
    assert failure is not None
    assert expected in (failure.text or "")
    markdown = (tmp_path / "parity.md").read_text()
    assert "**FAIL**" in markdown
    assert "parity: 0 passed, 1 failed" in markdown


WITHOUT_EXTRAS = """
import runpy, sys
for extra in ("tabulate", "matplotlib", "tqdm", "numpy", "pytest"):
    sys.modules[extra] = None
sys.argv = ["prime_kernels", "parity", "--smoke", "--device", "cpu"]
runpy.run_module("prime_kernels", run_name="__main__")
"""


@pytest.mark.parametrize(("gpus", "ranks"), [(1, {1}), (2, {1, 2})])
def test_smoke_on_gpus_takes_no_more_ranks_than_there_are(
    gpus: int, ranks: set[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert parity.main(["--smoke", "--device", "cuda", "--list"]) == 0
    names = capsys.readouterr().out.split()
    assert {int(number) for name in names for number in re.findall(r"-r(\d+)-", name)} == ranks


def test_smoke_needs_the_core_dependencies_only() -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert f"parity: {len(parity.smoke_matrix())} passed, 0 failed" in result.stdout


def test_reports_of_a_passing_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "--shapes",
        "small",
        "--routings",
        "mixed,zero-ranks",
        "--variants",
        "plain,shared,frozen-w1",
        "--ranks",
        "1",
    ]
    assert parity.main([*argv, "--out", str(tmp_path), "--commit", "abc"]) == parity.EXIT_OK
    report = json.loads((tmp_path / "parity.json").read_text())
    assert report["passed"]
    assert report["environment"]["commit"] == "abc"
    assert report["environment"]["command"].endswith(f"parity {' '.join(argv)} --out {tmp_path} --commit abc")
    names = {one["name"]: one for one in report["cases"]}
    assert len(names) == 6
    outputs = [output["output"] for output in names["bf16-small-mixed-r1-frozen-w1"]["outputs"]]
    assert outputs == ["y", "dx", "dtopk", "dw2"]
    assert names["bf16-small-zero-ranks-r1-plain"]["tokens_per_rank"] == [0]
    assert [e.get("name") for e in ElementTree.parse(tmp_path / "parity.xml").iter("testcase")] == list(names)
    table = [line for line in (tmp_path / "parity.md").read_text().splitlines() if line.startswith("| bf16")]
    assert len(table) == len(names)
    assert all(line.rstrip(" |").endswith("pass") for line in table)
    assert "parity: 6 passed, 0 failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--shapes", "tiny"], "--shapes: unknown tiny; choose from small"),
        (["--routings", "zip"], "--routings: unknown zip"),
        (["--precision", "int3"], "--precision: unknown int3"),
        (["--ranks", "1,x"], "--ranks: got '1,x'"),
        (["--ranks", "0"], "--ranks: got 0, needs at least 1"),
        (["--ranks", "7"], "no case is left"),
        (["--out", __file__], "can't be made a folder"),
        (["--timeout", "0"], "--timeout: got 0"),
        (["--backend", "sm90", "--device", "cpu"], 'backend "sm90" needs an SM90 GPU'),
    ],
)
def test_what_cannot_run_gives_exit_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parity.main(argv) == parity.EXIT_USAGE
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_not_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    assert parity.main(["--device", "cuda"]) == parity.EXIT_USAGE
    assert "torch finds no GPU" in capsys.readouterr().err


# --- Ranks in processes ----------------------------------------------------------------------------------


def raise_on_rank_1(one: Case, rank: int, tokens: int, generator: torch.Generator) -> Tensor:
    if rank == 1:
        raise RuntimeError("planted: rank 1 cannot route")
    return ROUTINGS["balanced"].experts(one, rank, tokens, generator)


def end_rank_1(one: Case, rank: int, tokens: int, generator: torch.Generator) -> Tensor:
    if rank == 1:
        os._exit(3)
    return ROUTINGS["balanced"].experts(one, rank, tokens, generator)


def hold_rank_1(one: Case, rank: int, tokens: int, generator: torch.Generator) -> Tensor:
    if rank == 1:
        time.sleep(600)
    return ROUTINGS["balanced"].experts(one, rank, tokens, generator)


def test_a_failing_rank_ends_its_case_and_no_other() -> None:
    good = ROUTINGS["balanced"]
    functions = [good.experts, raise_on_rank_1, good.experts, end_rank_1, good.experts, hold_rank_1]
    cases = [
        Case(PRECISIONS["bf16"], SHAPES["small"], Routing(f.__name__, f, good.tokens), 2, VARIANTS["plain"])
        for f in functions
    ]
    start = time.monotonic()
    runs = list(run_in_processes(cases, RankSettings("auto", "cpu", 8.0)))
    assert time.monotonic() - start < 120
    assert [bool(run.error) for run in runs] == [False, True, False, True, False, True]
    assert "rank 1: " in runs[1].error
    assert "planted: rank 1 cannot route" in runs[1].error
    assert "rank 1 ended with exit code 3" in runs[3].error
    assert "8 s" in runs[5].error
    for run in runs[::2]:
        verdict = judge_case(run.case, run.outputs, CPU)
        assert verdict.passed, verdict.failures


def test_a_fault_of_one_rank_names_it() -> None:
    one = Case(PRECISIONS["f64"], SHAPES["small"], ROUTINGS["balanced"], 2, VARIANTS["plain"])
    expected = expected_outputs(one, [rank_inputs(one, rank, CPU) for rank in range(2)], CPU)
    halves = {name: tensor.chunk(2) for name, tensor in expected.items()}
    ranks = [RankOutputs(rank, {name: half[rank] for name, half in halves.items()}) for rank in range(2)]
    assert judge_case(one, ranks, CPU).passed
    ranks[1].faults.append("dx: planted")
    assert judge_case(one, ranks, CPU).failures == ("rank 1: dx: planted",)


# --- The matrix ------------------------------------------------------------------------------------------


def test_default_matrix_has_every_axis() -> None:
    matrix = parity.default_matrix((1, 2, 4, 8), "cpu", ["bf16"])
    assert {one.ranks for one in matrix} == {1, 2, 4, 8}
    assert {one.shape.name for one in matrix} == set(parity.CPU_SHAPES)
    assert {one.routing.name for one in matrix} == set(ROUTINGS)
    assert {one.variant.name for one in matrix} == set(VARIANTS)
    assert len({one.name for one in matrix}) == len(matrix)
    on_gpu = parity.default_matrix((1,), "cuda", ["bf16"])
    assert {one.shape.name for one in on_gpu} == set(SHAPES)
    edges = [one for one in on_gpu if one.shape.name == "edges"]
    assert {one.variant.name for one in edges} == set(VARIANTS)
    assert edges[0].shape.hidden % 128
    assert edges[0].shape.intermediate % 128


def test_limits_are_those_of_the_project() -> None:
    limits = PRECISIONS["bf16"].limits
    assert max(limits.y, limits.dx, limits.dw, limits.dtopk) <= 5e-3


@pytest.mark.parametrize("shape", parity.CPU_SHAPES)
def test_outputs_are_of_order_one(shape: str) -> None:
    one = case("balanced", shape=shape)
    expected = expected_outputs(one, [rank_inputs(one, 0, CPU)], CPU)
    for name in ("y", "dx", "dtopk"):
        assert 0.3 < float(expected[name].std()) < 30, name
    assert 0.8 < float(expected["y"].std()) < 1.25
    for name in ("dw1", "dw2"):
        assert 0.3 < float(expected[name].std()) < 30, name


def routed(name: str, ranks: int = 2) -> list[Tensor]:
    one = Case(PRECISIONS["bf16"], SHAPES["odd"], ROUTINGS[name], ranks, VARIANTS["plain"])
    return [rank_inputs(one, rank, CPU).topk_idx for rank in range(ranks)]


def test_routings_are_what_their_names_say() -> None:
    experts, top_k, tokens = SHAPES["odd"].num_experts, SHAPES["odd"].top_k, SHAPES["odd"].tokens
    counts = {name: torch.bincount(torch.cat(routed(name))[torch.cat(routed(name)) >= 0], minlength=experts)
              for name in ROUTINGS}  # fmt: skip
    assert int(counts["balanced"].max() - counts["balanced"].min()) <= 2
    assert int(counts["zipf"][0]) > 4 * int(counts["zipf"][-1])
    assert counts["one-expert"].tolist() == [0] * (experts - 1) + [2 * tokens]
    assert int(counts["empty-experts"][experts // 2 :].sum()) == 0
    masked = torch.cat(routed("masked"))
    assert bool((masked < 0).all(1).any())
    assert bool(((masked < 0).sum(1) == 1).any())
    pairs = torch.cat(routed("duplicates"))
    assert torch.equal(pairs[:, 0], pairs[:, 1])
    assert [len(idx) for idx in routed("zero-ranks", 4)] == [0, tokens, 0, tokens]
    unequal = [len(idx) for idx in routed("unequal", 8)]
    assert {0, 1, tokens, tokens - 1} < set(unequal)
    for name in ROUTINGS:
        for idx in routed(name):
            assert idx.shape[1] == top_k
            assert bool(((idx >= -1) & (idx < experts)).all())
