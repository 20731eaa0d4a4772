"""`bench ep` without GPUs: loads, torch's layer over gloo ranks, the measurement with a made-up clock."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import matplotlib.image
import pytest
import torch
import torch.distributed as dist
from gloo_world import GlooWorld

from prime_kernels import cli, runtime
from prime_kernels.bench import ep, ep_run, ep_world
from prime_kernels.bench.ep_case import EpSize, EpTensors, ep_sizes, make_ep_tensors
from prime_kernels.bench.ep_report import as_text, write_reports
from prime_kernels.bench.ep_run import ALONE, CONTENDERS, OVER_RANKS, EpResult, Groups, slowest
from prime_kernels.bench.ep_summary import as_record, exposed, load_records, speed_up, tflops, write_record
from prime_kernels.bench.ep_torch import AllToAllMoE
from prime_kernels.bench.layer_case import LayerSize
from prime_kernels.bench.layer_run import compare
from prime_kernels.bench.rounds import Spread
from prime_kernels.reference import moe_backward, moe_forward

CPU = torch.device("cpu")
# As far from float64 as plain bf16 arithmetic may be; the benchmark's own limit is 2e-2.
BF16_TOLERANCE = 1e-2
NO_COMPILER = {"torch compile": "rank 0: RuntimeError: no compiler"}


def small(ranks: int, tokens: int = 32) -> EpSize:
    return EpSize(LayerSize("small", hidden=64, intermediate=128, experts=4, topk=2, tokens=tokens), ranks)


@pytest.fixture(scope="module")
def two() -> Iterator[GlooWorld]:
    with GlooWorld(2) as world:
        yield world


# --- Loads ---


def test_loads() -> None:
    sizes = ep_sizes(["qwen3-30b-a3b", "qwen3-235b-a22b"], [4096, 16384], 8)
    assert [size.name for size in sizes] == [
        "qwen3-30b-a3b, T 4096",
        "qwen3-30b-a3b, T 16384",
        "qwen3-235b-a22b, T 4096",
        "qwen3-235b-a22b, T 16384",
    ]
    last = sizes[-1]
    assert (last.alone.experts, last.experts, last.alone.rows) == (16, 128, 131072)
    # 7 of 8 rows leave the rank: x and the result of each, 8 KiB a row; in the backward also dy.
    assert last.sent_bytes("forward") == 2 * 114688 * 8192
    assert last.sent_bytes("backward") == 3 * 114688 * 8192
    assert ep_sizes(["qwen3-30b-a3b"], [4096], 1)[0].sent_bytes("forward") == 0


@pytest.mark.parametrize(
    ("models", "ranks", "message"),
    [
        (["qwen3-30b-a3b"], 3, "128 experts, which 3 ranks cannot share equally"),
        (["mixtral-8x7b"], 8, r"1 experts on each of 8 ranks and routes a token to 2.*at most 4 ranks"),
        (["nothing"], 2, "unknown model 'nothing'"),
    ],
)
def test_loads_that_cannot_be(models: list[str], ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ep_sizes(models, [4096], ranks)


def test_even_routing_gives_every_expert_the_same_from_every_rank() -> None:
    """So that one rank alone has exactly the load that it has among its peers."""
    size = small(ranks=4)
    torch.manual_seed(0)
    tensors = make_ep_tensors(size, "even", CPU)
    assert tensors.over_ranks.topk_idx.flatten().bincount(minlength=16).tolist() == [4] * 16
    assert tensors.alone.topk_idx.flatten().bincount(minlength=4).tolist() == [16] * 4
    assert tensors.over_ranks.x is tensors.alone.x
    assert tensors.over_ranks.gate_up.shape == (4, 256, 64)


# --- Torch's layer over ranks ---


def _all_to_all(rank: int, size: int, routing: str, compiled: bool) -> dict[str, float]:
    """Differences of one rank's outputs from the reference of the whole problem, in float64."""
    torch.manual_seed(rank)
    load = small(size)
    tensors = make_ep_tensors(load, "random", CPU).over_ranks
    if routing == "to the last rank":
        last = torch.randint(load.experts - 2, load.experts, tensors.topk_idx.shape)
        tensors = replace(tensors, topk_idx=last)
    leaves = [
        leaf.requires_grad_() for leaf in (tensors.x, tensors.topk_weights, tensors.gate_up, tensors.down)
    ]
    x, weights, gate_up, down = leaves
    assert dist.group.WORLD is not None
    layer = AllToAllMoE(dist.group.WORLD, compiled)
    y = layer(x, tensors.topk_idx, weights, gate_up, down)
    gradients = torch.autograd.grad(y, leaves, tensors.dy)

    def everyone(tensor: torch.Tensor) -> torch.Tensor:
        parts: list[torch.Tensor] = [torch.empty(0)] * size
        dist.all_gather_object(parts, tensor.detach())
        return torch.cat(parts)

    names = ("x", "topk_idx", "topk_weights", "gate_up", "down", "dy")
    whole = {name: everyone(getattr(tensors, name)) for name in names}
    wide = {name: value if name == "topk_idx" else value.double() for name, value in whole.items()}
    dy = wide.pop("dy")
    expected = moe_backward(dy, *wide.values())
    tokens, experts = slice(rank * 32, (rank + 1) * 32), slice(rank * 4, (rank + 1) * 4)
    got = {"y": y.detach(), **dict(zip(("dx", "dtopk", "dW13", "dW2"), gradients, strict=True))}
    want = {
        "y": moe_forward(*wide.values())[tokens],
        "dx": expected.dx[tokens],
        "dtopk": expected.dtopk[tokens],
        "dW13": expected.dgate_up[experts],
        "dW2": expected.ddown[experts],
    }
    for name in [name for name, value in want.items() if not value.any()]:
        assert not got.pop(name).any()
        want.pop(name)
    return compare(got, want)


@pytest.mark.parametrize("routing", ["drawn", "to the last rank"])
def test_torchs_layer_over_ranks_is_right(two: GlooWorld, routing: str) -> None:
    """Also when a rank receives nothing, and sends everything."""
    first, last = two.run(_all_to_all, routing, False)
    assert set(last) == {"y", "dx", "dtopk", "dW13", "dW2"}
    # Weight gradients of a rank without rows are exactly zero.
    assert set(last) - set(first) == (set() if routing == "drawn" else {"dW13", "dW2"})
    assert max([*first.values(), *last.values()]) < BF16_TOLERANCE


def _compiles(rank: int, size: int) -> list[int]:
    """Graphs that each part became; the backend is one that only counts."""
    graphs: list[int] = []

    def count(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(len(list(module.graph.nodes)))
        return module

    compiler, torch.compile = (
        torch.compile,
        lambda function, **options: compiler(function, backend=count, **options),
    )
    try:
        _all_to_all(rank, size, "drawn", True)
    finally:
        torch.compile = compiler
    return graphs


def test_each_part_between_the_collectives_is_one_graph(two: GlooWorld) -> None:
    for graphs in two.run(_compiles):
        assert len(graphs) == 3


# --- The measurement ---


class CountedCalls:
    """An event that reads a clock of its own: one millisecond for each event made before."""

    made = 0

    def __init__(self) -> None:
        self.at = 0.0

    def record(self) -> None:
        CountedCalls.made += 1
        self.at = CountedCalls.made

    def elapsed_time(self, end: CountedCalls, /) -> float:
        return end.at - self.at


def _measure(rank: int, size: int, routing: str, broken: str) -> EpResult:
    runtime.set_device("cpu")
    alone, _ = dist.new_subgroups(group_size=1)
    assert dist.group.WORLD is not None
    torch.manual_seed(rank)
    load = small(size)
    clock = ep_run.Clock(3, 1, CountedCalls, lambda: None)
    chosen = [name for name in CONTENDERS if name != "torch compile"]
    groups = Groups(dist.group.WORLD, alone)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.compiler, "reset", lambda: None)
        if broken == "kernels":
            right = ep_run.mega_moe
            patch.setattr(ep_run, "mega_moe", lambda *args, **options: right(*args, **options) * 1.1)
        if broken == "compile on one rank":
            chosen = ["mega_moe", "torch compile"]
            right = ep_run.AllToAllMoE
            fails = rank == size - 1
            patch.setattr(ep_run, "compare", lambda got, expected: {})
            patch.setattr(torch, "compile", lambda function, **options: function)
            patch.setattr(
                ep_run,
                "AllToAllMoE",
                lambda group, compiled: partial(_compiled, fails) if compiled else right(group),
            )
        return ep_run.measure(load, routing, make_ep_tensors(load, routing, CPU), chosen, groups, clock)


def _compiled(fails: bool, x: torch.Tensor, topk_idx: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """A layer without collectives, which does not compile on one rank."""
    if fails:
        raise RuntimeError("no compiler\nmore about it")
    return x + torch.stack([weight.sum() for weight in weights]).sum()


@pytest.mark.parametrize("routing", ["even", "random"])
def test_measurement(two: GlooWorld, routing: str) -> None:
    first, second = two.run(_measure, routing, "")
    assert first == second
    assert list(first.times) == ["mega_moe", "mega_moe keep z", "torch eager"]
    for places in first.times.values():
        assert list(places) == [OVER_RANKS, ALONE]
        for directions in places.values():
            assert {name: (spread.median, spread.count) for name, spread in directions.items()} == {
                "forward": (1.0, 3),
                "backward": (1.0, 3),
            }
    assert set(first.differences) == {"y", "dx", "dtopk", "dW13", "dW2"}
    assert 0 < max(first.differences.values()) < BF16_TOLERANCE
    assert first.failures == {}


def test_wrong_results_are_no_benchmark() -> None:
    with GlooWorld(1) as world, pytest.raises(AssertionError, match="outputs differ from torch eager"):
        world.run(_measure, "even", "kernels")


def test_a_contender_that_fails_on_one_rank_is_left_out_on_all(two: GlooWorld) -> None:
    for result in two.run(_measure, "even", "compile on one rank"):
        assert list(result.times) == ["mega_moe"]
        assert result.failures == {"torch compile": "rank 1: RuntimeError: no compiler"}


def test_the_slowest_rank_counts() -> None:
    fast, slow = Spread(1.0, 0.5, 9.0, 3), Spread(2.0, 1.9, 2.1, 3)
    ranks = [{"a": fast, "b": slow}, {"a": slow, "b": fast}, {"a": fast, "b": fast}]
    assert slowest(ranks) == {"a": slow, "b": slow}


# --- What follows from the times ---


def made_up(ranks: int, tokens: int = 4096, **changes: object) -> EpResult:
    """The kernels take 3 and 8 ms over the ranks and 2 and 7 alone; torch eager 9 and 16, and 4 and 10."""

    def at(milliseconds: float) -> Spread:
        return Spread(milliseconds, milliseconds - 0.1, milliseconds + 0.1, 10)

    times = {
        who: {
            OVER_RANKS: {"forward": at(forward), "backward": at(backward)},
            ALONE: {"forward": at(alone_forward), "backward": at(alone_backward)},
        }
        for who, forward, backward, alone_forward, alone_backward in (
            ("mega_moe", 3.0, 8.0, 2.0, 7.0),
            ("torch eager", 9.0, 16.0, 4.0, 10.0),
        )
    }
    [size] = ep_sizes(["qwen3-30b-a3b"], [tokens], ranks)
    result = EpResult(
        size, "even", times, {"y": 4e-3}, {"torch compile": "rank 0: RuntimeError: no compiler"}
    )
    return replace(result, **changes)  # type: ignore[arg-type]


def test_exposed_communication() -> None:
    result = made_up(8)
    forward = exposed(result, "mega_moe", "forward")
    assert (forward.ms, forward.share) == (1.0, pytest.approx(1 / 3))
    assert exposed(result, "torch eager", "backward").ms == 6.0
    assert speed_up(result, "mega_moe", "torch eager", "forward") == 3.0
    assert speed_up(result, "mega_moe", "torch compile", "forward") is None
    # 4096 tokens of 8 rows each, 6 H I FLOPs a row, in 3 ms.
    assert tflops(result, 3.0, "forward") == pytest.approx(6 * 4096 * 8 * 2048 * 768 / 3e-3 / 1e12)


def test_a_faster_group_has_negative_exposed_communication() -> None:
    """Noise is shown, not cut off at zero."""
    result = made_up(2)
    places = result.times["mega_moe"]
    faster = {**places, ALONE: {**places[ALONE], "forward": Spread(3.5, 3.4, 3.6, 10)}}
    result = replace(result, times={"mega_moe": faster})
    assert exposed(result, "mega_moe", "forward").ms == -0.5


def record_of(ranks: int) -> dict[str, object]:
    results = [made_up(ranks), made_up(ranks, tokens=8192)]
    return as_record(results, ranks, ep.method_of(10), {"date": f"day {ranks}", "hardware": "GPUs"})


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    for ranks in (8, 2):
        assert write_record(tmp_path / "new", record_of(ranks)).name == f"ep{ranks}.json"
    (tmp_path / "new" / "other.json").write_text("{}")
    records = load_records(tmp_path / "new")
    assert [record["ranks"] for record, _ in records] == [2, 8]
    assert records[1][1] == [made_up(8), made_up(8, tokens=8192)]
    derived = json.loads((tmp_path / "new" / "ep8.json").read_text())["results"][0]["derived"]
    assert derived["mega_moe"]["forward"]["exposed_ms"] == 1.0


def test_text_says_what_was_measured_and_what_was_not() -> None:
    lines = as_text([made_up(8)]).splitlines()
    [forward] = [line.split() for line in lines if " forward " in line and " mega_moe " in line]
    assert forward[-7:] == ["3.000", "2.000", "1.000", "33", "%", "103", "3.00"]
    assert any("not measured: torch compile: rank 0: RuntimeError: no compiler" in line for line in lines)
    assert any("each rank sends forward 0.22 GiB, backward 0.33 GiB" in line for line in lines)


def test_reports_show_growth_over_all_records(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no results of bench ep"):
        write_reports(tmp_path)
    for ranks in (2, 4, 8):
        write_record(tmp_path, record_of(ranks))
    markdown, picture = write_reports(tmp_path)
    text = markdown.read_text()
    assert all(f"| qwen3-30b-a3b, T 8192 | {ranks}" in text for ranks in (2, 4, 8))
    assert "| date" in text
    assert "day 4" in text
    pixels = matplotlib.image.imread(picture)
    assert pixels.shape[0] > 500
    assert pixels.std() > 0.05


# --- The command and its machine ---


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--models nothing", "unknown model 'nothing'"),
        ("--tokens 0", "--tokens is 0; needs at least 1"),
        (
            "--tokens 4095 --models qwen3-30b-a3b",
            "even routing needs rows that 128 experts can share equally",
        ),
        ("--repeats 0", "--repeats is 0; needs at least 1"),
        ("--contenders deepep", "invalid choice: 'deepep'"),
        ("--routing zipf", "invalid choice: 'zipf'"),
    ],
)
def test_arguments_that_cannot_be(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "ep", *words.split()])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_sizes_of_a_smoke_run_and_of_the_whole() -> None:
    arguments, sizes = ep.parse(["--smoke"], 1)
    assert [(size.name, size.ranks) for size in sizes] == [("qwen3-30b-a3b, T 1024", 1)]
    assert arguments.repeats == 3
    _, sizes = ep.parse([], 8)
    assert len(sizes) == 6
    assert ep.parse(["--tokens", "4095", "--routing", "random"], 2)[1][0].alone.tokens == 4095


def test_the_recorded_command_repeats_the_run() -> None:
    words = ["--models", "qwen3-30b-a3b", "--tokens", "512", "--contenders", "torch eager", "mega_moe"]
    arguments, sizes = ep.parse([*words, "--repeats", "2"], 4)
    command = ep.command_of(arguments)
    assert command.startswith("prime_kernels bench ep --models qwen3-30b-a3b --tokens 512")
    assert ep.parse(shlex.split(command)[3:], 4) == (arguments, sizes)


def test_ranks_that_do_not_fit_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(RuntimeError, match=r"16 ranks, 8 of them.*a group wider than one NVLink domain"):
        ep_world.check_machine(8)
    monkeypatch.setenv("WORLD_SIZE", "8")
    ep_world.check_machine(8)
    with pytest.raises(RuntimeError, match="8 ranks need as many GPUs and this machine has 4"):
        ep_world.check_machine(4)


def test_one_process_is_a_group_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ep_world.TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    with ep_world.process_groups(CPU) as groups:
        assert dist.get_world_size(groups.everyone) == dist.get_world_size(groups.alone) == 1
    assert not dist.is_initialized()


def test_the_ranks_way_from_loads_to_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compile, measure, print, write; what needs a GPU is made up."""
    monkeypatch.delenv("RANK", raising=False)
    compiled: list[str] = []
    monkeypatch.setattr(ep, "compile_kernel", lambda source: compiled.append(source.name))
    measured: list[str] = []

    def measure(size: EpSize, routing: str, tensors: EpTensors, *rest: object) -> EpResult:
        assert tensors.over_ranks.topk_idx.max() < size.experts
        measured.append(size.name)
        return made_up(1, tokens=size.alone.tokens)

    monkeypatch.setattr(ep, "measure", measure)
    arguments, sizes = ep.parse(["--models", "qwen3-30b-a3b", "--tokens", "16", "--out", str(tmp_path)], 1)
    sizes = [replace(size, alone=replace(size.alone, hidden=64, intermediate=64)) for size in sizes]
    with ep_world.process_groups(CPU) as groups:
        ep.compile_kernels(arguments.models, 1)
        results = ep.run(sizes, arguments, groups, CPU, ep_run.Clock(1, 1, CountedCalls, lambda: None))
    ep.write(arguments, results, 1, CPU)
    assert measured == ["qwen3-30b-a3b, T 16"]
    assert {"route_plan_count", "forward_sm90_bf16", "backward_sm90_bf16"} <= set(compiled)
    out = capsys.readouterr().out
    assert "not measured: torch compile" in out
    assert out.count("wrote ") == 3
    record = json.loads((tmp_path / "ep1.json").read_text())
    assert record["hardware"].startswith("1 x CPU")
    assert record["command"].startswith("python -m prime_kernels bench ep --models qwen3-30b-a3b --tokens 16")
    ep.write(arguments, [made_up(8)], 8, CPU)
    record = json.loads((tmp_path / "ep8.json").read_text())
    assert record["command"].startswith("torchrun --standalone --nproc-per-node 8 -m prime_kernels bench ep")
