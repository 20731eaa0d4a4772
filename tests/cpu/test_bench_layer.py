"""What `bench layer` needs beside a GPU: load, statistics, reports, torch's layer; with made-up times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import pytest
import torch

from prime_kernels import cli
from prime_kernels.bench import layer
from prime_kernels.bench.gemm import BACKWARD, FORWARD
from prime_kernels.bench.layer_case import LayerSize, choose_experts, layer_size, make_tensors
from prime_kernels.bench.layer_report import as_record, as_text, write_reports
from prime_kernels.bench.layer_run import LayerResult, compare
from prime_kernels.bench.rounds import Contender, Spread, interleave
from prime_kernels.bench.torch_moe import torch_moe
from prime_kernels.reference import moe_backward, moe_forward

CPU = torch.device("cpu")
SMALL = LayerSize("small", hidden=64, intermediate=32, experts=8, topk=3, tokens=40)


def made_up_result(**changes: object) -> LayerResult:
    """GEMMs of 1 ms each; the kernels take 1.5 and 2 times their sum, torch eager 4 and 5."""
    spreads = {name: Spread(1.0, 0.9, 1.1, 10) for name in (*FORWARD, *BACKWARD)}
    spreads["route plan"] = Spread(0.02, 0.02, 0.02, 10)
    for who, forward, backward in (
        ("kernel graph", 3.0, 8.0),
        ("kernel launch", 3.1, 8.1),
        ("torch eager", 8.0, 20.0),
    ):
        spreads[f"{who} forward"] = Spread(forward, forward - 0.1, forward + 0.2, 10)
        spreads[f"{who} backward"] = Spread(backward, backward - 0.1, backward + 0.2, 10)
    result = LayerResult(
        size=layer_size("qwen3-30b-a3b", 16384, 16),
        dw_dtype="fp32",
        spreads=spreads,
        ceilings={"torch bf16 8192^3 TFLOP/s": 760.0, "device copy TB/s": 4.2},
        host_us={"forward": 120.0, "backward": 150.0},
        peak_bytes={"kernel": 2**30, "torch eager": 2**31},
        memory={"symmetric": 2**20, "pool x": 2**21},
        differences={"y": 4e-3, "dx": 5e-3},
        failures={"torch compile": "RuntimeError: no compiler"},
    )
    return replace(result, **changes)  # type: ignore[arg-type]


# --- Load ---


def test_a_ranks_load() -> None:
    size = layer_size("qwen3-30b-a3b", 16384, 16)
    assert (size.rows, size.gemm_load().rows) == (131072, 131072)
    assert size.forward_flops == 6 * 131072 * 2048 * 768
    assert size.backward_flops == 2 * size.forward_flops
    assert size.recompute_flops == 4 * 131072 * 2048 * 768
    weights = 3 * 16 * 2048 * 768
    assert size.compulsory_bytes(4) == {
        "forward": weights * 2 + 2 * 16384 * 2048 * 2,
        "backward": weights * 6 + 3 * 16384 * 2048 * 2,
    }


def test_gemms_get_whole_blocks() -> None:
    """8192 rows over 128 experts are half a block each."""
    assert layer_size("qwen3-30b-a3b", 1024, 128).gemm_load().rows == 128 * 128


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model nothing", "invalid choice: 'nothing'"),
        ("--tokens 0", "--tokens is 0; needs at least 1"),
        ("--experts-per-rank 7", "--experts-per-rank is 7; qwen3-30b-a3b routes a token to 8 of 128 experts"),
        ("--experts-per-rank 129", "needs 8 to 128"),
        ("--model gpt-oss-20b", "H 2880 and I 2880; the kernels need H a multiple of 256"),
        ("--precision fp8", "invalid choice: 'fp8'"),
        ("--trace", "--trace needs --out"),
        ("--peers sonic", "invalid choice: 'sonic'"),
    ],
)
def test_arguments_that_cannot_be(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "layer", *words.split()])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_without_a_gpu_the_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="torch sees none"):
        cli.main(["bench", "layer"])


def test_the_recorded_command_repeats_the_run() -> None:
    words = "--model deepseek-v3 --tokens 4096 --experts-per-rank 32 --dw bf16 --routing even --peers eager"
    arguments, size = layer.parse([*words.split(), "--trace", "--out", "x"])
    again, same_size = layer.parse([*layer.command_of(arguments).split()[3:], "--out", "x"])
    assert (again, same_size) == (arguments, size)


@pytest.mark.parametrize("routing", ["random", "even"])
def test_a_tokens_experts_differ(routing: str) -> None:
    torch.manual_seed(1)
    experts = choose_experts(SMALL, routing, CPU)
    assert experts.shape == (40, 3)
    assert all(len(set(row)) == 3 for row in experts.tolist())
    loads = experts.flatten().bincount(minlength=8)
    assert loads.sum() == 120
    assert (len(set(loads.tolist())) == 1) == (routing == "even")


def test_uneven_rows_cannot_be_shared_evenly() -> None:
    with pytest.raises(ValueError, match="8 experts can share equally, 41 tokens make 123"):
        choose_experts(replace(SMALL, tokens=41), "even", CPU)


# --- Torch's layer ---


def test_torchs_layer_is_the_same_mathematics() -> None:
    torch.manual_seed(0)
    t = make_tensors(SMALL, "random", CPU)
    # An expert without rows.
    t = replace(t, topk_idx=torch.where(t.topk_idx == 5, 4, t.topk_idx))
    leaves = [leaf.requires_grad_() for leaf in (t.x, t.topk_weights, t.gate_up, t.down)]
    y = torch_moe(t.x, t.topk_idx, t.topk_weights, t.gate_up, t.down)
    dx, dtopk, dgate_up, ddown = torch.autograd.grad(y, leaves, t.dy)
    x, weights, gate_up, down = (leaf.detach().double() for leaf in leaves)
    expected = moe_backward(t.dy.double(), x, t.topk_idx, weights, gate_up, down)
    differences = compare(
        {"y": y.detach(), "dx": dx, "dtopk": dtopk, "dW13": dgate_up, "dW2": ddown},
        {
            "y": moe_forward(x, t.topk_idx, weights, gate_up, down),
            "dx": expected.dx,
            "dtopk": expected.dtopk,
            "dW13": expected.dgate_up,
            "dW2": expected.ddown,
        },
    )
    assert max(differences.values()) < 1e-2
    assert not dgate_up[5].any()


@pytest.mark.parametrize("spoiled", [1.03, float("nan")])
def test_a_wrong_result_is_no_benchmark(spoiled: float) -> None:
    right = torch.ones(8)
    assert compare({"y": right, "dx": right}, {"y": right * 1.001, "dx": right})["dx"] == 0
    with pytest.raises(
        RuntimeError, match=r"outputs differ from torch eager by \{'dx': .*the limit is 2e-02"
    ):
        compare({"y": right, "dx": right * spoiled}, {"y": right, "dx": right})


# --- Rounds ---


class FakeEvent:
    """Reads a clock that the timed calls turn."""

    now = 0.0

    def __init__(self) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = FakeEvent.now

    def elapsed_time(self, end: FakeEvent, /) -> float:
        return end.at - self.at


def test_rounds_alternate_and_warmups_do_not_count() -> None:
    calls: list[str] = []

    def call(name: str) -> None:
        calls.append(name)
        # The third call on takes `len(name)`; the first two, warm-ups, a thousand.
        FakeEvent.now += 1000 if calls.count(name) <= 2 else len(name) + 0.1 * calls.count(name)

    contenders = [
        Contender((("f", lambda: call("f")), ("back", lambda: call("back")))),
        Contender((("gemm!", lambda: call("gemm!")),)),
    ]
    synchronized: list[int] = []
    spreads = interleave(contenders, 3, 2, FakeEvent, lambda: synchronized.append(len(calls)))
    assert calls[:6] == ["f", "back", "gemm!", "gemm!", "f", "back"]
    assert synchronized == [15]
    assert spreads["f"].median == pytest.approx(1.4)
    assert (spreads["back"].low, spreads["back"].high) == (pytest.approx(4.3), pytest.approx(4.5))
    assert {spread.count for spread in spreads.values()} == {3}


def test_spreads() -> None:
    assert Spread.of([3.0, 1.0, 2.0, 10.0]) == Spread(2.5, 1.0, 10.0, 4)
    with pytest.raises(ValueError, match="at least one sample"):
        Spread.of([])
    twice = Contender((("same", lambda: None),))
    with pytest.raises(ValueError, match="names of their own"):
        interleave([twice, twice], 1, 0, FakeEvent, lambda: None)


# --- Reports ---


def test_ratios_and_tflops() -> None:
    result = made_up_result()
    assert (result.gemm_sum("forward"), result.gemm_sum("backward")) == (2.0, 4.0)
    assert result.ratio("kernel graph", "forward") == 1.5
    assert result.ratio("torch eager", "backward") == 5.0
    assert result.tflops(3.0, "forward") == pytest.approx(6 * 131072 * 2048 * 768 / 3e-3 / 1e12)
    assert result.tflops(8.0, "backward") == pytest.approx(12 * 131072 * 2048 * 768 / 8e-3 / 1e12)


def test_text_says_what_was_measured_and_what_was_not() -> None:
    lines = as_text(made_up_result()).splitlines()
    [forward] = [line.split() for line in lines if line.startswith("forward") and "CUDA graph" in line]
    assert forward[-6:] == ["3.000", "2.900", "-", "3.200", "412", "1.50"]
    [gemms] = [line.split() for line in lines if line.startswith("backward") and "DeepGEMM" in line]
    assert gemms[-3:] == ["4.000", "618", "1.00"]
    assert "Not measured: torch compile: RuntimeError: no compiler" in lines
    assert not any(line.startswith("forward") and "compile" in line for line in lines)


def test_reports(tmp_path: Path) -> None:
    environment = {"date": "2026-12-01", "hardware": "a GPU", "commit": ""}
    paths = write_reports(tmp_path / "new", made_up_result(failures={}), environment)
    assert [path.name for path in paths] == ["layer.json", "layer.md", "layer.png"]
    record = json.loads(paths[0].read_text())
    assert record["hardware"] == "a GPU"
    assert record["forward"]["ratio_to_gemm_sum"] == {
        "kernel graph": 1.5,
        "kernel launch": 1.55,
        "torch eager": 4.0,
    }
    assert record["spreads"]["L1"] == {"median": 1.0, "low": 0.9, "high": 1.1, "count": 10}
    assert record["size"]["tokens"] == 16384
    markdown = paths[1].read_text()
    assert "| forward     | prime_kernels, CUDA graph" in markdown
    assert "layer.png" in markdown
    assert "a GPU" in markdown
    assert "commit" not in markdown.partition("| run")[2]
    picture = matplotlib.image.imread(paths[2])
    assert picture.shape[0] > 500
    assert picture.std() > 0.05


def test_numbers_that_json_cannot_hold_are_refused(tmp_path: Path) -> None:
    result = made_up_result(host_us={"forward": float("nan")})
    assert as_record(result, {})["host_us"]["forward"] != 0
    with pytest.raises(ValueError, match="JSON compliant"):
        write_reports(tmp_path, result, {})
