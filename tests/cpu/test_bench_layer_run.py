"""`bench layer` from its command line to its files on the CPU, with the reference in place of the kernels."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_bench_trace import LINES, device_tensors
from torch import Tensor

from prime_kernels import cli, models, sm90
from prime_kernels.bench import layer, layer_contenders, layer_run, trace
from prime_kernels.bench.layer_bars import PASSES
from prime_kernels.bench.rounds import host_times, interleave
from prime_kernels.reference import BF16_ROUNDING, moe_backward, moe_forward

CPU = torch.device("cpu")
TINY = models.ModelShape("tiny", hidden=256, intermediate=128, num_experts=8, top_k=2)
Z_VALUE = 3.0


class _NoKernel:
    def launch(self, *arguments: Any, **options: Any) -> None:
        """The fake launches do all."""


class _Ticks:
    """An event whose clock moves on by one millisecond with each record."""

    now = 0.0

    def __init__(self, **options: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        _Ticks.now += 1.0
        self.at = _Ticks.now

    def elapsed_time(self, end: _Ticks, /) -> float:
        return end.at - self.at


def _forward(
    rank: Any, y: Tensor, l1: Tensor, l2: Tensor, clamp: float | None, stats: Tensor | None,
    z: Tensor | None, rounds: int,
) -> None:  # fmt: skip
    y.copy_(moe_forward(rank.x, rank.topk_idx, rank.topk_weights, l1, l2, rounding=BF16_ROUNDING))
    if z is not None:
        z.fill_(Z_VALUE)


def _backward(
    rank: Any, dx: Tensor, dw1: Tensor, dw2: Tensor, dtopk: Tensor, l1: Tensor, l2: Tensor,
    clamp: float | None, accumulate: bool, z: Tensor | None,
) -> None:  # fmt: skip
    # What a forward kept, or wrong results.
    assert z is None or bool((z == Z_VALUE).all())
    grads = moe_backward(rank.dy, rank.x, rank.topk_idx, rank.topk_weights, l1, l2, rounding=BF16_ROUNDING)
    for out, value in ((dx, grads.dx), (dw1, grads.dgate_up), (dw2, grads.ddown), (dtopk, grads.dtopk)):
        out.copy_(value)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, as far as the benchmark looks at it, whose kernels are the reference."""
    properties = type("Properties", (), {"multi_processor_count": 8, "name": "none"})()
    monkeypatch.setitem(models.MODELS, "tiny", TINY)
    monkeypatch.setattr(sm90, "load_kernel", lambda source, device: _NoKernel())
    monkeypatch.setattr(sm90, "FaultBox", functools.partial(sm90.FaultBox, pinned=False))
    monkeypatch.setattr(sm90.forward_kernel, "launch", _forward)
    monkeypatch.setattr(sm90.backward_kernel, "launch", _backward)
    monkeypatch.setattr(layer, "compile_all", lambda sources: None)
    monkeypatch.setattr(layer, "measure_ceilings", lambda device: {"x TFLOP/s": 700.0, "copy TB/s": 4.0})
    monkeypatch.setattr(layer_contenders, "Captured", lambda call: call)
    monkeypatch.setattr(
        layer_run,
        "interleave",
        functools.partial(interleave, new_event=_Ticks, synchronize=lambda: None),
    )
    monkeypatch.setattr(layer_run, "host_times", functools.partial(host_times, synchronize=lambda: None))
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 350)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    monkeypatch.setattr(layer, "current_gpu", lambda: CPU)


def run(tmp_path: Path, words: str) -> tuple[int, dict[str, Any]]:
    """Exit code and record of `bench layer`."""
    base = ["bench", "layer", "--model", "tiny", "--experts-per-rank", "8", "--rounds", "2"]
    code = cli.main([*base, *words.split(), "--out", str(tmp_path), "--commit", "abc"])
    return code, json.loads((tmp_path / "layer.json").read_text())


def test_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, record = run(tmp_path, "--tokens 64 96")
    assert code == 0
    assert record["commit"] == "abc"
    assert [entry["size"]["tokens"] for entry in record["layers"]] == [64, 96]
    for entry in record["layers"]:
        assert list(entry["passes"]) == [item.name for item in PASSES]
        # Every call takes a tick, and the sums have two and four.
        assert [item["ratio_to_gemm_sum"] for item in entry["passes"].values()] == [0.5, 0.5, 0.25, 0.25]
        assert {spread["count"] for spread in entry["spreads"].values()} == {2}
        assert entry["memory"]["z, of each layer"] == entry["memory"]["pool dz"]
        assert entry["peak_bytes"] == {
            "kernels, z recomputed": 500, "kernels, z kept": 500, "torch eager": 250, "torch compile": 250
        }  # fmt: skip
        assert set(entry["host_us"]) == {
            *(f"kernel launch {item.name}" for item in PASSES),
            *(f"torch {peer} {way}" for peer in ("eager", "compile") for way in ("forward", "backward")),
        }
        assert 0 < entry["differences"]["dW13 (z kept)"] < 2e-2
        assert entry["seconds"]["torch compile"] > 0
    out = capsys.readouterr().out
    assert out.index("64 tokens, 128 rows") < out.index("96 tokens, 192 rows") < out.index("bar")
    assert (tmp_path / "layer.png").stat().st_size > 10_000


def test_one_backward_and_no_peer(tmp_path: Path) -> None:
    code, record = run(tmp_path, "--tokens 64 --backward keep --peers")
    assert code == 0
    [entry] = record["layers"]
    assert list(entry["passes"]) == ["forward, z kept", "backward, z kept"]
    assert not any("torch" in name for name in entry["spreads"])


def test_a_peer_that_fails_is_told_and_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise RuntimeError("no compiler here\nand more")

    monkeypatch.setattr(torch, "compile", lambda function, **options: refuse)
    code, record = run(tmp_path, "--tokens 64")
    assert code == 1
    assert record["layers"][0]["failures"] == {"torch compile": "RuntimeError: no compiler here"}
    assert record["layers"][0]["passes"]["forward"]["ratio_to_torch_compile"] is None
    assert record["layers"][0]["passes"]["forward"]["ratio_to_torch_eager"] == 1.0


def test_a_backward_that_writes_nothing_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outputs of the pass before must not stand in for it."""

    def lazy(*arguments: Any) -> None:
        if arguments[-1] is None:
            _backward(*arguments)

    monkeypatch.setattr(sm90.backward_kernel, "launch", lazy)
    with pytest.raises(RuntimeError, match=r"outputs differ from torch eager by .*'dx': 'nan'"):
        run(tmp_path, "--tokens 64 --peers")


def test_what_was_measured_before_a_failure_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = layer.make_tensors

    def fail_at_96(size: Any, *arguments: Any) -> Any:
        if size.tokens == 96:
            raise torch.OutOfMemoryError("none left")
        return make(size, *arguments)

    monkeypatch.setattr(layer, "make_tensors", fail_at_96)
    with pytest.raises(torch.OutOfMemoryError):
        run(tmp_path, "--tokens 64 96 --peers")
    record = json.loads((tmp_path / "layer.json").read_text())
    assert [entry["size"]["tokens"] for entry in record["layers"]] == [64]


def test_traces_of_every_pass_at_the_most_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[int, tuple[str, ...]]] = []

    def record(rank: Any, call: Callable[[], None], phases: tuple[str, ...]) -> trace.Timeline:
        call()
        assert rank.trace_counts.numel() > 0
        seen.append((rank.shape.tokens, phases))
        return trace.decode(*device_tensors(LINES), phases)

    monkeypatch.setattr(trace, "record", record)
    code, _ = run(tmp_path, "--tokens 96 64 --peers --trace")
    assert code == 0
    assert seen == [(96, trace.FORWARD_PHASES), (96, trace.BACKWARD_PHASES)] * 2
    for item in PASSES:
        assert (tmp_path / f"trace-{item.slug}.png").stat().st_size > 10_000
        assert (tmp_path / f"trace-{item.slug}.json.gz").exists()
    assert "backward, z kept:" in capsys.readouterr().out
    assert {item.slug for item in PASSES} == {
        "forward", "forward-z-kept", "backward-z-recomputed", "backward-z-kept"
    }  # fmt: skip
