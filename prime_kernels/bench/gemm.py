"""The yardstick: DeepGEMM's BF16 grouped GEMMs at the shapes of an MoE layer, timed on this GPU.

``python -m prime_kernels bench gemm`` times the six products of one layer's forward and backward

    L1    z = x W13^T    (m-grouped NT: N = 2I, K = H)     dA    da = dy W2      (m-grouped NN: N = I, K = H)
    L2    y = a W2^T     (m-grouped NT: N = H, K = I)      dX    dx = dz W13     (m-grouped NN: N = H, K = 2I)
    dW13  dW += dz^T x   (k-grouped TN: M = 2I, N = H)     dW2   dW += dy^T a    (k-grouped TN: M = H, N = I)

on random data with equally many rows for every expert, and compares each with float32 products.
FLOPs are counted as 2 per multiply-add and real row: 2 * rows * N * K.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ..gemm import (
    k_grouped_bf16_gemm_tn_contiguous,
    m_grouped_bf16_gemm_nn_contiguous,
    m_grouped_bf16_gemm_nt_contiguous,
)
from ..gemm_heuristics import GROUP_ALIGNMENT
from ..models import model_shape
from .record import describe_run, write_json
from .timing import REPEATS, WARMUPS, host_us, median_ms

PACKAGE = (__package__ or "").partition(".")[0]
FLOPS_PER_MULTIPLY_ADD = 2
# The load the project's figures are given for: 131072 rows a rank at top-8.
TOKENS_PER_RANK = 16384
# MODEL:EP, the ranks that share the model's experts.
DEFAULT_LOADS = ("qwen3-30b-a3b:8", "qwen3-235b-a22b:8", "qwen3-30b-a3b:1")
FORWARD, BACKWARD = ("L1", "L2"), ("dA", "dX", "dW13", "dW2")
CEILING_SIZE = 8192
COPY_BYTES = 4 * 2**30
# Relative Frobenius norm against float32 products; rounding an output to bf16 alone gives 1.7e-3.
MAX_ERROR = {torch.bfloat16: 3e-3, torch.float32: 1e-4}


@dataclass(frozen=True)
class LayerLoad:
    """One rank's share of a layer: ``rows`` rows over ``experts`` local experts."""

    model: str
    hidden: int
    intermediate: int
    experts: int
    rows: int


@dataclass(frozen=True)
class GemmCase:
    """One product: what it is, its FLOPs, how to run it, its output, and the output of group 0 in float32."""

    name: str
    kind: str
    n: int
    k: int
    flops: int
    run: Callable[[], None]
    output: torch.Tensor
    expected_group0: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class GemmResult:
    """One measured product. ``relative_error`` is over the first group."""

    name: str
    kind: str
    n: int
    k: int
    ms: float
    tflops: float
    relative_error: float


def layer_load(name: str, tokens: int = TOKENS_PER_RANK) -> LayerLoad:
    """What one rank gets when every rank routes ``tokens`` tokens evenly.

    Args:
        name: ``MODEL:EP``, a model of :mod:`..models` and the ranks that share its experts.

    Raises:
        ValueError: unknown name, no tokens, or rows that don't split into whole 128-row blocks per expert.
    """
    model, _, ep = name.partition(":")
    if not ep.isdecimal():
        raise ValueError(f"load {name!r} must be MODEL:EP, for example {DEFAULT_LOADS[0]}")
    if tokens < 1:
        raise ValueError(f"--tokens is {tokens}; needs at least 1")
    shape = model_shape(model)
    experts = shape.experts_per_rank(int(ep))
    rows = tokens * shape.top_k
    if rows % (experts * GROUP_ALIGNMENT):
        raise ValueError(
            f"{rows} rows do not split into multiples of {GROUP_ALIGNMENT} rows for {experts} experts; "
            f"choose another number of tokens than {tokens}"
        )
    return LayerLoad(model, shape.hidden, shape.intermediate, experts, rows)


def gemm_cases(load: LayerLoad, device: torch.device) -> Iterator[GemmCase]:
    """The six products of a layer, each with its own operands (freed when the next one is asked for)."""
    h, i, g = load.hidden, load.intermediate, load.experts
    layout = torch.arange(g, dtype=torch.int32, device=device).repeat_interleave(load.rows // g)
    for name, n, k in (("L1", 2 * i, h), ("L2", h, i)):
        yield _m_grouped_case(name, True, n, k, load, layout)
    for name, n, k in (("dA", i, h), ("dX", h, 2 * i)):
        yield _m_grouped_case(name, False, n, k, load, layout)
    for name, m, n in (("dW13", 2 * i, h), ("dW2", h, i)):
        yield _k_grouped_case(name, m, n, load, device)


def _m_grouped_case(name: str, nt: bool, n: int, k: int, load: LayerLoad, layout: torch.Tensor) -> GemmCase:
    a = torch.randn(load.rows, k, dtype=torch.bfloat16, device=layout.device)
    b = _scaled_weights((load.experts, n, k) if nt else (load.experts, k, n), k, layout.device)
    d = torch.full((load.rows, n), float("nan"), dtype=torch.bfloat16, device=layout.device)
    gemm = m_grouped_bf16_gemm_nt_contiguous if nt else m_grouped_bf16_gemm_nn_contiguous
    rows = load.rows // load.experts

    def expected() -> torch.Tensor:
        weight = b[0].float()
        return a[:rows].float() @ (weight.T if nt else weight)

    return GemmCase(
        name=name,
        kind=f"m-grouped {'NT' if nt else 'NN'}",
        n=n,
        k=k,
        flops=FLOPS_PER_MULTIPLY_ADD * load.rows * n * k,
        run=lambda: gemm(a, b, d, layout),
        output=d[:rows],
        expected_group0=expected,
    )


def _k_grouped_case(name: str, m: int, n: int, load: LayerLoad, device: torch.device) -> GemmCase:
    rows = load.rows // load.experts
    a = torch.randn(load.rows, m, dtype=torch.bfloat16, device=device)
    b = torch.randn(load.rows, n, dtype=torch.bfloat16, device=device)
    d = torch.zeros(load.experts, m, n, device=device)
    ks = [rows] * load.experts
    layout = torch.tensor(ks, dtype=torch.int32, device=device)
    # Accumulating calls add up; the sum after `calls` of them is `calls` times the product.
    calls = 0

    def run() -> None:
        nonlocal calls
        calls += 1
        k_grouped_bf16_gemm_tn_contiguous(a, b, d, ks, layout, c=d)

    return GemmCase(
        name=name,
        kind="k-grouped TN, fp32 +=",
        n=n,
        k=rows,
        flops=FLOPS_PER_MULTIPLY_ADD * load.rows * m * n,
        run=run,
        output=d[0],
        expected_group0=lambda: a[:rows].float().T @ b[:rows].float() * calls,
    )


def _scaled_weights(shape: tuple[int, ...], k: int, device: torch.device) -> torch.Tensor:
    """Normal weights that keep outputs O(1)."""
    return (torch.randn(shape, device=device) * k**-0.5).to(torch.bfloat16)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||actual - expected|| / ||expected|| in Frobenius norm; NaN anywhere gives NaN."""
    return float((actual.float() - expected).norm() / expected.norm())


def check_case(case: GemmCase) -> float:
    """Relative error of the output of the runs so far.

    Raises:
        RuntimeError: when the output is wrong; a fast wrong product is no yardstick.
    """
    error = relative_error(case.output, case.expected_group0())
    limit = MAX_ERROR[case.output.dtype]
    if not error <= limit:
        raise RuntimeError(f"{case.name}: relative error {error:.2e} exceeds {limit:.0e}")
    return error


def measure(case: GemmCase) -> GemmResult:
    """Time one product and compare it with float32; raises as :func:`check_case`."""
    ms = median_ms(case.run)
    return GemmResult(case.name, case.kind, case.n, case.k, ms, case.flops / ms / 1e9, check_case(case))


def measure_layer(load: LayerLoad, device: torch.device) -> list[GemmResult]:
    """The six products of one layer. ``sum_ms`` adds them up."""
    return [measure(case) for case in gemm_cases(load, device)]


def sum_ms(results: Sequence[GemmResult], names: Sequence[str]) -> float:
    """Milliseconds of the products in ``names``, one after the other."""
    return sum(result.ms for result in results if result.name in names)


def measure_ceilings(device: torch.device) -> dict[str, float]:
    """What this GPU does in the same run: torch's bf16 product, and a device copy (read and written)."""
    a = torch.randn(CEILING_SIZE, CEILING_SIZE, dtype=torch.bfloat16, device=device)
    b = torch.randn_like(a)
    c = torch.empty_like(a)
    product = median_ms(lambda: torch.mm(a, b, out=c))
    source = torch.empty(COPY_BYTES // 4, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    copy = median_ms(lambda: target.copy_(source))
    return {
        f"torch bf16 {CEILING_SIZE}^3 TFLOP/s": FLOPS_PER_MULTIPLY_ADD * CEILING_SIZE**3 / product / 1e9,
        "device copy TB/s": 2 * COPY_BYTES / copy / 1e9,
    }


def measure_host_time(device: torch.device) -> dict[str, float]:
    """Microseconds of host time a call takes, argument checks and all, on a problem too small to matter."""
    load = LayerLoad("small", 256, 128, 1, GROUP_ALIGNMENT)
    return {case.name: host_us(case.run) for case in gemm_cases(load, device) if case.name in ("L1", "dW13")}


def format_table(load: LayerLoad, results: Sequence[GemmResult]) -> str:
    """A table of one layer's products and the sums of forward and backward."""
    from tabulate import tabulate

    rows: list[list[object]] = [
        [r.name, r.kind, r.n, r.k, f"{r.ms:.3f}", f"{r.tflops:.0f}", f"{r.relative_error:.1e}"]
        for r in results
    ]
    for label, names in (("forward", FORWARD), ("backward", BACKWARD)):
        rows.append([label, "sum", "", "", f"{sum_ms(results, names):.3f}", "", ""])
    title = (
        f"{load.model}: H {load.hidden}, I {load.intermediate}, {load.experts} experts, {load.rows} rows "
        "(2 FLOP per multiply-add)"
    )
    headers = ["GEMM", "kind", "N", "K", "ms", "TFLOP/s", "error"]
    return title + "\n" + tabulate(rows, headers=headers, disable_numparse=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog=f"{PACKAGE} bench gemm", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--load", nargs="+", default=list(DEFAULT_LOADS), metavar="MODEL:EP", help="layers to measure"
    )
    parser.add_argument("--tokens", type=int, default=TOKENS_PER_RANK, help="tokens per rank (default 16384)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--commit", default="", help="commit to record where there is no checkout")
    arguments = parser.parse_args(argv)
    try:
        loads = [layer_load(name, arguments.tokens) for name in arguments.load]
    except ValueError as error:
        parser.error(str(error))
    if not torch.cuda.is_available():
        raise SystemExit("bench gemm measures a GPU and torch sees none")
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    ceilings = measure_ceilings(device)
    for what, value in ceilings.items():
        print(f"{what}: {value:.1f}")
    host = measure_host_time(device)
    print("host time of one call: " + ", ".join(f"{name} {value:.1f} us" for name, value in host.items()))
    layers = []
    for load in loads:
        results = measure_layer(load, device)
        print("\n" + format_table(load, results), flush=True)
        layers.append(
            {
                **asdict(load),
                "gemms": [asdict(result) for result in results],
                "forward_ms": sum_ms(results, FORWARD),
                "backward_ms": sum_ms(results, BACKWARD),
            }
        )
    if arguments.json is not None:
        command = f"{PACKAGE} bench gemm --load {' '.join(arguments.load)} --tokens {arguments.tokens}"
        record = {
            **describe_run(command, device, arguments.commit),
            "flop_convention": "2 * rows * N * K",
            "method": f"median of {REPEATS} after {WARMUPS} warm-ups, CUDA events, random data, equal groups",
            "ceilings": ceilings,
            "host_us_per_call": host,
            "layers": layers,
        }
        write_json(arguments.json, record)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
