"""`bench end-to-end` at toy size on the CPU: the real command, its reports, and how it judges losses."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.image
import pytest
import torch

from prime_kernels import cli
from prime_kernels.bench import end_to_end, end_to_end_run
from prime_kernels.bench.end_to_end_case import (
    VARIANTS,
    EndToEndCase,
    build_model,
    count_parameters,
    make_batches,
    prepare,
    step_loss,
)
from prime_kernels.bench.end_to_end_report import as_record, as_text, write_reports
from prime_kernels.bench.end_to_end_run import (
    FIRST_LOSS_LIMIT,
    LOSS_LIMIT,
    EndToEndResult,
    VariantResult,
    compare_losses,
    run_variant,
    time_limit,
)
from prime_kernels.bench.rounds import Spread
from prime_kernels.shared_buffers import _shared_buffers

pytest.importorskip("transformers", minversion="5", reason="needs Transformers 5")

CPU = torch.device("cpu")
SMALL = EndToEndCase(
    layers=1, hidden=256, intermediate=128, experts=8, topk=2, batch=2, sequence=64, steps=4, warmup=1
)
SMALL_WORDS = [
    "--device", "cpu", "--layers", "1", "--hidden", "256", "--intermediate", "128", "--experts", "8",
    "--topk", "2", "--batch", "2", "--sequence", "64", "--steps", "4", "--warmup", "1",
]  # fmt: skip
OTHER_WORDS = ["--variants", "library", "kept-z", "--limit-seconds", "9.5", "--learning-rate", "1e-3"]
EAGER = [name for name, variant in VARIANTS.items() if not variant.compiled]


def made_up(step_ms: float, losses: list[float]) -> VariantResult:
    spread = Spread(step_ms, step_ms - 1, step_ms + 1, 3)
    parts = dict.fromkeys(("forward", "backward", "optimizer"), Spread(step_ms / 3, 1.0, 9.0, 3))
    sizes = {"state_bytes": 3 * 2**30, "peak_bytes": 7 * 2**30}
    return VariantResult(
        losses, spread, parts, 900.0, 1.5, parameters={"total": 9 * 10**8, "active": 10**8}, **sizes
    )


def made_up_result() -> EndToEndResult:
    """The library takes 40 ms and 30 compiled, ours 20 and 15."""
    result = EndToEndResult(EndToEndCase(), "a text", "sm90")
    for number, name in enumerate(VARIANTS):
        losses = [5.5, 4.5 + number * 1e-3, 3.5]
        compiled, ours = VARIANTS[name].compiled, VARIANTS[name].ours
        result.variants[name] = made_up((40.0 - 10 * compiled) / (1 + ours), losses)
    return result


# --- Arguments ---


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--hidden 300", "is 300; the kernels need a multiple of 64 and at least 256, the next is 320"),
        ("--intermediate 0", "--intermediate is 0; the kernels need a multiple of 64, the next is 64"),
        ("--topk 9", "--topk is 9; needs at most 8 and at most --experts 128"),
        ("--experts 4", "--topk is 8; needs at most 8 and at most --experts 4"),
        ("--steps 5 --warmup 5", "--warmup is 5; needs 0 to 4"),
        ("--layers 0", "--layers is 0; needs at least 1"),
        ("--sequence 1", "--sequence is 1; needs at least 2"),
        ("--learning-rate 0", "--learning-rate is 0.0; needs a positive number"),
        ("--limit-seconds 0", "--limit-seconds is 0.0; needs a positive number"),
        ("--variants library library", "--variants names one of them twice"),
        ("--variants eager", "invalid choice: 'eager'"),
    ],
)
def test_arguments_that_cannot_be(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "end-to-end", *words.split()])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], SMALL_WORDS, OTHER_WORDS])
def test_the_recorded_command_repeats_the_run(words: list[str]) -> None:
    arguments, case = end_to_end.parse(words)
    assert end_to_end.parse(end_to_end.command_of(arguments, case).split()[3:]) == (arguments, case)


# --- The model and the text ---


def test_every_variant_trains_the_same_model_on_the_same_text() -> None:
    (name, batches), (_, again) = make_batches(SMALL, CPU), make_batches(SMALL, CPU)
    assert name.startswith("the documentation topics of CPython")
    assert torch.equal(batches, again)
    assert batches.shape == (4, 2, 64)
    assert not torch.equal(batches, make_batches(replace(SMALL, seed=1), CPU)[1])
    first, second = build_model(SMALL, CPU), build_model(SMALL, CPU)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.dtype == torch.bfloat16
    assert step_loss(first, batches[0]).item() == step_loss(second, batches[0]).item()


def test_the_default_model_has_about_a_billion_parameters() -> None:
    case = EndToEndCase()
    counts = count_parameters(build_model(case, torch.device("meta")), case)
    assert 0.5e9 < counts["total"] < 1e9
    experts_of_a_token = case.layers * case.topk * 3 * case.hidden * case.intermediate
    assert counts["active"] == counts["total"] - (case.experts // case.topk - 1) * experts_of_a_token


@pytest.mark.parametrize("name", VARIANTS)
def test_who_computes_the_experts(name: str) -> None:
    model, variant = build_model(SMALL, CPU), VARIANTS[name]
    buffers = prepare(model, SMALL, variant)
    assert len(buffers) == variant.ours
    layer = model.model.layers[0]
    assert hasattr(layer.mlp.experts, "_mega_moe_experts") == variant.ours
    if variant.ours:
        assert layer.mlp.experts._mega_moe_experts.keep == variant.keep
    else:
        assert layer.mlp.experts.config._experts_implementation == "grouped_mm"
    assert (layer._compiled_call_impl is not None) == variant.compiled


# --- Running ---


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL_WORDS, "--variants", *EAGER, "--out", str(tmp_path), "--commit", "abc"]
    assert cli.main(["bench", "end-to-end", *words]) == 0
    record = json.loads((tmp_path / "end-to-end.json").read_text())
    assert list(record["variants"]) == EAGER
    assert record["backend"] == "reference"
    assert record["commit"] == "abc"
    assert record["transformers"].startswith("5.")
    assert record["command"].startswith("python -m prime_kernels bench end-to-end --layers 1")
    losses = {name: variant["losses"] for name, variant in record["variants"].items()}
    assert all(len(values) == 4 for values in losses.values())
    assert losses["recompute"] == losses["kept-z"]
    assert losses["recompute"] != losses["library"]
    assert losses["library"][0] == pytest.approx(5.5, abs=0.4)  # log 256, less what random weights know
    for difference in record["loss_differences"].values():
        assert difference["agrees"]
        assert 0 < difference["largest"] < LOSS_LIMIT / 10
    for variant in record["variants"].values():
        assert variant["step"]["count"] == 3
        parts = sum(variant["parts"][part]["median"] for part in ("forward", "backward", "optimizer"))
        assert parts == pytest.approx(variant["step"]["median"], rel=0.3)
        assert variant["tokens_per_second"] == pytest.approx(128e3 / variant["step"]["median"])
    assert not _shared_buffers
    output = capsys.readouterr().out
    assert "prime_kernels, z recomputed" in output
    assert f"wrote {tmp_path / 'end-to-end.png'}" in output


def test_a_compiled_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the compiler's own tracer alone, which is quick: that inductor works is not what is asked here."""
    compile_layer, compiled = torch.nn.Module.compile, []

    def traced(module: torch.nn.Module, **kwargs: Any) -> None:
        compiled.append(module)
        compile_layer(module, **kwargs, backend="aot_eager", fullgraph=True)

    monkeypatch.setattr(torch.nn.Module, "compile", traced)
    _, batches = make_batches(SMALL, CPU)
    eager, again = (run_variant(SMALL, name, batches, 60) for name in ("kept-z", "kept-z-compile"))
    assert len(compiled) == SMALL.layers
    assert compare_losses(again.losses, eager.losses).agrees


def test_a_variant_that_fails_is_reported_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One runs out of memory, one takes too long, one disagrees."""
    original = end_to_end_run.step_loss

    def prepared(model: Any, case: EndToEndCase, variant: Any) -> list[Any]:
        if variant == VARIANTS["recompute"]:
            raise torch.OutOfMemoryError("no memory\nfor this")
        if variant == VARIANTS["library-compile"]:
            signal.raise_signal(signal.SIGALRM)  # as after the time limit
        model.wrong = variant == VARIANTS["kept-z"]
        return []

    def loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
        return original(model, ids) * (1 + 2 * FIRST_LOSS_LIMIT * model.wrong)

    monkeypatch.setattr(end_to_end_run, "prepare", prepared)
    monkeypatch.setattr(end_to_end_run, "step_loss", loss)
    words = [*SMALL_WORDS, "--variants", *EAGER, "library-compile", "--limit-seconds", "90"]
    assert cli.main(["bench", "end-to-end", *words, "--out", str(tmp_path)]) == 1
    record = json.loads((tmp_path / "end-to-end.json").read_text())
    assert list(record["variants"]) == ["library", "kept-z"]
    assert record["failures"] == {
        "recompute": "OutOfMemoryError: no memory",
        "library-compile": "TimeoutError: library-compile took more than 90 s",
    }
    assert not record["loss_differences"]["kept-z"]["agrees"]
    output = capsys.readouterr().out
    assert "Not measured: recompute: OutOfMemoryError: no memory" in output
    assert "**NO**" in output


def test_a_loss_that_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    original = end_to_end_run.step_loss
    monkeypatch.setattr(end_to_end_run, "step_loss", lambda *args: original(*args) * float("nan"))
    with pytest.raises(RuntimeError, match="a loss of library is not finite"):
        run_variant(SMALL, "library", make_batches(SMALL, CPU)[1], 60)


def test_faults_of_the_kernels_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault() -> None:
        raise RuntimeError("too few pool rows")

    monkeypatch.setattr(end_to_end_run, "prepare", lambda *args: [SimpleNamespace(check=fault)])
    with pytest.raises(RuntimeError, match="too few pool rows"):
        run_variant(SMALL, "recompute", make_batches(SMALL, CPU)[1], 60)


def test_the_time_limit_ends_with_its_block() -> None:
    with pytest.raises(TimeoutError, match=r"it took more than 0\.05 s"), time_limit(0.05, "it"):
        time.sleep(5)
    with time_limit(0.05, "it"):
        pass
    time.sleep(0.1)


# --- Judging and reporting ---


def test_losses_are_compared_step_by_step() -> None:
    difference = compare_losses([5.0, 4.0, 3.03], [5.0, 4.1, 3.0])
    assert difference.first == 0
    assert difference.largest == pytest.approx(0.1 / 4.1)
    assert difference.agrees
    assert not compare_losses([5.0, 4.0], [5.0, 4.0 / (1 + 1.1 * LOSS_LIMIT)]).agrees
    assert not compare_losses([5.0 * (1 + 1.1 * FIRST_LOSS_LIMIT), 4.0], [5.0, 4.0]).agrees


def test_reports(tmp_path: Path) -> None:
    result = made_up_result()
    environment = {"date": "2026-12-01", "hardware": "a card", "commit": "abc", "cuda": ""}
    for path in write_reports(tmp_path, result, environment):
        assert path.stat().st_size > 0
    assert matplotlib.image.imread(tmp_path / "end-to-end.png").shape[0] > 400
    record = json.loads((tmp_path / "end-to-end.json").read_text())
    assert record == as_record(result, environment)
    assert record["variants"]["recompute"]["tokens_per_second"] == 16384 / 20e-3
    assert record["loss_differences"]["kept-z"]["largest"] == pytest.approx(2e-3 / 4.5)
    rows = [line.split("  ") for line in as_text(result).splitlines()]
    row, _ = [row for row in rows if row[0] == "prime_kernels, z kept, layers compiled"]  # time and agreement
    assert [word.strip() for word in row if word.strip()][1:3] == ["15.0", "14.0 - 16.0"]
    markdown = (tmp_path / "end-to-end.md").read_text()
    assert markdown.startswith("# Qwen3-MoE of 0.90 B parameters: 6 layers, H 1024, I 384, 128 experts, ")
    cells = [[cell.strip() for cell in line.split("|")] for line in markdown.splitlines()]
    (row,) = [row for row in cells if len(row) > 6 and row[1] == "prime_kernels, z kept, layers compiled"]
    assert row[7:12] == ["1,092,267", "2.67", "7.0", "3.0", "3.500"]


def test_reports_of_nothing_measured(tmp_path: Path) -> None:
    result = EndToEndResult(EndToEndCase(), "a text", "sm90", failures={"library": "RuntimeError: no memory"})
    assert len(write_reports(tmp_path, result, {"date": "2026-12-01"})) == 3
    assert not result.agrees()
    assert "Not measured: library: RuntimeError: no memory" in as_text(result)
