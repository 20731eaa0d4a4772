"""What `bench layer` needs beside a GPU: load, statistics, reports, torch's layer; with made-up times."""

from __future__ import annotations

import importlib.util
import json
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import matplotlib.image
import pytest
import torch

from prime_kernels import cli
from prime_kernels.bench import layer
from prime_kernels.bench.gemm import BACKWARD, FORWARD
from prime_kernels.bench.layer_bars import PASSES, pass_pairs
from prime_kernels.bench.layer_case import LayerSize, choose_experts, layer_size, make_tensors
from prime_kernels.bench.layer_contenders import kernel_sources
from prime_kernels.bench.layer_report import (
    as_record,
    layer_text,
    slower_than_rival,
    summary_text,
    write_reports,
)
from prime_kernels.bench.layer_run import LayerResult, compare
from prime_kernels.bench.rounds import Contender, Spread, host_times, interleave
from prime_kernels.bench.torch_moe import torch_moe
from prime_kernels.models import MODELS
from prime_kernels.reference import moe_backward, moe_forward

REPO = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
SMALL = LayerSize("small", hidden=64, intermediate=32, experts=8, topk=3, tokens=40)


FORWARD_PASS, FORWARD_KEEP, BACKWARD_PASS, BACKWARD_KEEP = PASSES


def made_up_result(tokens: int = 16384, **changes: object) -> LayerResult:
    """GEMMs of 1 ms each: their sums are 2 and 4 ms."""
    times = dict.fromkeys((*FORWARD, *BACKWARD), 1.0)
    times |= {"route plan": 0.02, "staging x": 0.03, "staging dy": 0.04}
    times |= {"kernel graph forward": 2.38, "kernel launch forward": 2.5}
    times |= {"kernel graph forward, z kept": 2.6, "kernel launch forward, z kept": 2.7}
    times |= {"kernel graph backward, z recomputed": 6.6, "kernel launch backward, z recomputed": 6.7}
    times |= {"kernel graph backward, z kept": 4.3, "kernel launch backward, z kept": 4.4}
    times |= {"torch eager forward": 8.0, "torch eager backward": 20.0}
    result = LayerResult(
        size=layer_size("qwen3-30b-a3b", tokens, 16),
        dw_dtype="fp32",
        spreads={name: Spread(ms, ms - 0.01, ms + 0.2, 10) for name, ms in times.items()},
        ceilings={"torch bf16 8192^3 TFLOP/s": 760.0, "device copy TB/s": 4.2},
        host_us={name: 123.0 for name in times if "launch" in name or "eager" in name},
        peak_bytes={"kernels, z kept": 2**30, "torch eager": 2**31},
        memory={"symmetric": 2**20, "z, of each layer": 2**21},
        differences={"y (z kept)": 4e-3, "dx (z kept)": 5e-3},
        seconds={"rounds": 1.5},
        failures={"torch compile": "RuntimeError: no compiler"},
    )
    return replace(result, **changes)  # type: ignore[arg-type]


def with_compile(result: LayerResult, forward: float, backward: float) -> LayerResult:
    """The same with a compiled peer of these times."""
    spreads = {
        f"torch compile {direction}": Spread(ms, ms, ms, 10)
        for direction, ms in (("forward", forward), ("backward", backward))
    }
    return replace(result, spreads=result.spreads | spreads, failures={})


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
        ("--tokens 64 0", "--tokens is 0; needs at least 1"),
        ("--tokens 64 63 --routing even", "16 experts can share equally, 63 tokens make 504"),
        ("--rounds 0", "--rounds is 0; needs at least 1"),
        ("--backward z", "invalid choice: 'z'"),
        ("--experts-per-rank 7", "--experts-per-rank is 7; qwen3-30b-a3b routes a token to 8 of 128 experts"),
        ("--experts-per-rank 129", "needs 8 to 128"),
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


@pytest.mark.parametrize(("hidden", "inter"), [(192, 768), (2900, 768), (2880, 96)])
def test_a_model_whose_sizes_the_kernels_do_not_take(
    hidden: int, inter: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "other", replace(MODELS["qwen3-30b-a3b"], hidden=hidden, intermediate=inter))
    needs = "the kernels need H a multiple of 64 and at least 256, I a multiple of 64"
    with pytest.raises(ValueError, match=f"H {hidden} and I {inter}; {needs}"):
        layer_size("other", 64, 16)
    assert layer_size("gpt-oss-20b", 64, 16).hidden == 2880


def test_the_recorded_command_repeats_the_run() -> None:
    words = "--model deepseek-v3 --tokens 4096 1024 4096 --experts-per-rank 32 --dw bf16 --routing even"
    words += " --peers eager --backward keep --rounds 3 --trace --out x"
    arguments, sizes = layer.parse(words.split())
    assert [size.tokens for size in sizes] == [4096, 1024]
    again, same_sizes = layer.parse([*layer.command_of(arguments).split()[3:], "--out", "x"])
    assert (again, same_sizes) == (arguments, sizes)


def test_both_backwards_are_measured_unless_one_is_named() -> None:
    assert layer.parse([])[0].backward == ["recompute", "keep"]
    assert pass_pairs(["keep", "recompute"]) == [(FORWARD_PASS, BACKWARD_PASS), (FORWARD_KEEP, BACKWARD_KEEP)]
    assert pass_pairs(["keep"]) == [(FORWARD_KEEP, BACKWARD_KEEP)]


def test_kernels_to_compile() -> None:
    size = layer_size("qwen3-30b-a3b", 1024, 16)
    names = [source.name for source in kernel_sources(size, ["keep"], 132, trace=False)]
    assert names.count("forward_sm90_bf16") == names.count("backward_sm90_bf16") == 1
    assert sum(name.endswith("_bf16_gemm") for name in names) == 8
    both = kernel_sources(size, ["recompute", "keep"], 132, trace=True)
    mine = {source.entry for source in both if source.name == "forward_sm90_bf16"}
    assert len(mine) == 4


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


def test_a_contender_settles_before_it_is_timed() -> None:
    calls: list[str] = []

    def call(name: str) -> None:
        calls.append(name)
        FakeEvent.now += 100.0 if calls.count(name) % 3 else 1.0

    contenders = [
        Contender((("f", lambda: call("f")), ("b", lambda: call("b")))),
        Contender((("g", lambda: call("g")),)),
    ]
    spreads = interleave(contenders, 2, 0, FakeEvent, lambda: None, settle=2)
    assert "".join(calls) == "fbfbfb" + "ggg" + "ggg" + "fbfbfb"
    assert spreads["f"] == spreads["g"] == Spread(1.0, 1.0, 1.0, 2)


def test_spreads() -> None:
    assert Spread.of([3.0, 1.0, 2.0, 10.0]) == Spread(2.5, 1.0, 10.0, 4)
    with pytest.raises(ValueError, match="at least one sample"):
        Spread.of([])
    twice = Contender((("same", lambda: None),))
    with pytest.raises(ValueError, match="names of their own"):
        interleave([twice, twice], 1, 0, FakeEvent, lambda: None)


def test_host_times_of_a_forward_and_its_backward() -> None:
    order: list[str] = []

    def call(name: str, seconds: float) -> None:
        order.append(name)
        time.sleep(seconds)

    pair = Contender((("f", lambda: call("f", 0.002)), ("b", lambda: call("b", 0.006))))
    times = host_times(pair, 2, 3, lambda: order.append("wait"))
    assert order == [*["wait", *["f", "b"] * 3] * 2, "wait"]
    assert 2000 <= times["f"] < times["b"]
    assert times["b"] >= 6000


# --- Reports ---


def test_ratios_and_tflops() -> None:
    result = made_up_result()
    assert (result.gemm_sum("forward"), result.gemm_sum("backward")) == (2.0, 4.0)
    assert result.ratio(FORWARD_PASS) == pytest.approx(1.19)
    assert result.ratio(BACKWARD_KEEP, "kernel launch") == pytest.approx(1.1)
    assert result.ratio_to("torch eager", BACKWARD_PASS) == pytest.approx(0.33)
    assert result.ratio_to("torch compile", BACKWARD_PASS) is None
    assert result.tflops(3.0, "forward") == pytest.approx(6 * 131072 * 2048 * 768 / 3e-3 / 1e12)
    assert result.tflops(8.0, "backward") == pytest.approx(12 * 131072 * 2048 * 768 / 8e-3 / 1e12)


def test_bars_are_those_of_the_design() -> None:
    bars = {item.name: item.bars for item in PASSES}
    assert bars.pop("forward, z kept") is None
    assert {name: (bar.lands, bar.done, bar.goal) for name, bar in bars.items() if bar} == {
        "forward": (1.35, 1.2, 1.1),
        "backward, z recomputed": (1.7, 1.55, 1.45),
        "backward, z kept": (1.35, 1.2, 1.1),
    }


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [(1.0, "goal"), (1.1, "goal"), (1.11, "done"), (1.2, "done"), (1.21, "lands"), (1.36, "not landed")],
)
def test_a_bar_is_reached_by_what_does_not_exceed_it(ratio: float, verdict: str) -> None:
    assert FORWARD_PASS.bars is not None
    assert FORWARD_PASS.bars.verdict(ratio) == verdict
    assert FORWARD_PASS.bars.verdict(float("nan")) == "not landed"


def test_where_torch_compile_is_faster_is_said() -> None:
    fast, slow = made_up_result(1024), made_up_result()
    results = [with_compile(fast, 2.4, 6.0), with_compile(slow, 3.0, 9.0)]
    assert slower_than_rival(results) == [
        "forward, z kept at 1024 tokens (1.08)",
        "backward, z recomputed at 1024 tokens (1.10)",
    ]
    assert "Slower than torch compile: forward, z kept at 1024 tokens (1.08), " in summary_text(results)
    assert "Slower than torch compile: nowhere." in summary_text(results[1:])
    assert "Slower than" not in summary_text([results[0], slow])
    assert as_record([results[0], slow], {})["slower_than_torch_compile"] is None


def test_text_says_what_was_measured_and_what_was_not() -> None:
    lines = layer_text(made_up_result()).splitlines()
    [forward] = [line.split() for line in lines if line.startswith("forward  ") and "CUDA graph" in line]
    assert forward[-6:] == ["2.380", "2.370", "-", "2.580", "520", "1.19"]
    kept = [line.split() for line in lines if line.startswith("backward, z kept")]
    [launched] = [words for words in kept if "launched" in words]
    assert launched[-2:] == ["1.10", "123"]
    [gemms] = [line.split() for line in lines if line.startswith("backward  ") and "DeepGEMM" in line]
    assert gemms[-3:] == ["4.000", "618", "1.00"]
    assert "Not measured: torch compile: RuntimeError: no compiler" in lines
    assert "Alone, in us: route plan 20, staging x 30, staging dy 40." in " ".join(lines)
    assert not any("grouped_mm, compile" in line for line in lines)


def test_summary_has_a_row_for_each_pass_and_number_of_tokens() -> None:
    results = [with_compile(made_up_result(1024), 2.4, 6.0), made_up_result()]
    rows = [" ".join(line.split()) for line in summary_text(results).splitlines()]
    assert "1024 forward 2.380 2.500 2.000 1.19 done 0.30 0.99 32" in rows
    assert "16384 forward, z kept 2.600 2.700 2.000 1.30 - 0.33 - 476" in rows
    assert "16384 backward, z recomputed 6.600 6.700 4.000 1.65 lands 0.33 - 375" in rows
    assert "16384 backward, z kept 4.300 4.400 4.000 1.07 goal 0.21 - 575" in rows
    assert "peak of kernels, z kept 1024.0 1024.0" in rows
    assert "z, of each layer 2.0 2.0" in rows


def test_reports(tmp_path: Path) -> None:
    tokens = [1024, 2048, 4096, 8192, 16384]
    environment = {"date": "2026-12-01", "hardware": "a GPU", "commit": ""}
    results = [with_compile(made_up_result(count), 3.0, 9.0) for count in tokens]
    paths = write_reports(tmp_path / "new", results, environment)
    assert [path.name for path in paths] == ["layer.json", "layer.md", "layer.png"]
    record = json.loads(paths[0].read_text())
    assert record["hardware"] == "a GPU"
    assert [entry["size"]["tokens"] for entry in record["layers"]] == tokens
    assert record["slower_than_torch_compile"] == []
    last = record["layers"][-1]
    assert last["spreads"]["L1"] == {"median": 1.0, "low": 0.99, "high": 1.2, "count": 10}
    assert list(last["passes"]) == [item.name for item in PASSES]
    backward = last["passes"]["backward, z recomputed"]
    assert (backward["ms"], backward["launched_ms"], backward["gemm_sum_ms"]) == (6.6, 6.7, 4.0)
    assert (backward["verdict"], backward["bars"]["done"]) == ("lands", 1.55)
    assert backward["ratio_to_torch_compile"] == pytest.approx(6.6 / 9)
    markdown = paths[1].read_text()
    assert "| 16384    | backward, z kept       | 4.300 " in markdown
    assert markdown.count("\n## ") == len(tokens) + 1
    assert "layer.png" in markdown
    assert "a GPU" in markdown
    assert "commit" not in markdown.partition("## Run")[2]
    picture = matplotlib.image.imread(paths[2])
    assert picture.shape[0] > 500
    assert picture.std() > 0.05


def test_one_backward_alone_can_be_reported(tmp_path: Path) -> None:
    spreads = {name: s for name, s in made_up_result().spreads.items() if "z kept" not in name}
    result = made_up_result(spreads={name: s for name, s in spreads.items() if "torch" not in name})
    assert (result.passes, result.peers) == ([FORWARD_PASS, BACKWARD_PASS], [])
    record = json.loads(write_reports(tmp_path, [result], {})[0].read_text())
    assert list(record["layers"][0]["passes"]) == ["forward", "backward, z recomputed"]
    assert record["layers"][0]["passes"]["forward"]["ratio_to_torch_eager"] is None


def test_numbers_that_json_cannot_hold_are_refused(tmp_path: Path) -> None:
    result = made_up_result(host_us={"kernel launch forward": float("nan")})
    assert as_record([result], {})["layers"][0]["size"]["topk"] == 8
    with pytest.raises(ValueError, match="JSON compliant"):
        write_reports(tmp_path, [result], {})


def load_tables(root: Path) -> ModuleType:
    """ci/tables.py, as if the repository were at ``root``."""
    spec = importlib.util.spec_from_file_location("tables", REPO / "ci" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    vars(tables).update(ROOT=root, RESULTS=root / "ci" / "results")
    return tables


def test_tables_of_the_docs(tmp_path: Path) -> None:
    tables = load_tables(tmp_path)
    assert tables.TABLES["layer"]() == tables.TABLES["layer-summary"]() == tables.NOT_MEASURED
    results = tmp_path / "ci" / "results"
    environment = {"hardware": "a GPU", "torch": "2.11", "commit": "abcdef0123", "command": "python -m x"}
    old = made_up_result(16384, failures={})
    new = [with_compile(made_up_result(1024), 2.4, 6.0), with_compile(made_up_result(), 3.0, 9.0)]
    large = made_up_result(size=layer_size("qwen3-235b-a22b", 4096, 16))
    for name, date, measured in (
        ("qwen3-30b-a3b", "2026-12-02", new),
        ("qwen3-30b-a3b-again", "2026-12-01", [old]),
        ("qwen3-235b-a22b", "2026-12-01", [large]),
    ):
        record = as_record(measured, {**environment, "date": f"{date}T12:00:00"})
        results.mkdir(parents=True, exist_ok=True)
        (results / f"h200-layer-{name}-{date}.json").write_text(json.dumps(record))
    text = tables.TABLES["layer"]()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
    name = "qwen3-30b-a3b (H 2048, I 768), 16 local experts"
    assert len(rows) == 2 + 3 * 4
    assert rows[2] == [name, "1024", "forward", "2.380", "2.500", "2.000", "1.19", "done", "0.30", "0.99"]
    assert rows[-1][1:] == [
        "4096",
        "backward, z kept",
        "4.300",
        "4.400",
        "4.000",
        "1.07",
        "goal",
        "0.21",
        "-",
    ]
    assert "Slower than torch compile: forward, z kept at 1024 tokens (1.08), backward" in text
    assert text.count("Slower than") == 1
    assert "again" not in text
    assert "{to_root}ci/results/h200-layer-qwen3-235b-a22b-2026-12-01.json" in text
    summary = tables.TABLES["layer-summary"]()
    assert "| 1024 " not in summary
    assert summary.count("| 16384 ") == summary.count("| 4096 ") == 4
