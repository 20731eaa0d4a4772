"""Times every tile configuration of the grouped GEMMs: where the choices of ``gemm_heuristics`` come from.

``python -m prime_kernels.bench.gemm_sweep`` prints one line per product and configuration, fastest first.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ..gemm_heuristics import (
    BF16_BYTES,
    CLUSTER,
    FP32_BYTES,
    GemmConfig,
    GemmKind,
    choose_config,
    make_config,
    multicast_legal,
)
from ..gemm_kernel import GemmProblem, kernel_source, make_plan
from ..jit import compile_kernel
from ..jit.source import KernelSource
from ..runtime import get_num_sms
from .gemm import (
    DEFAULT_LOADS,
    FLOPS_PER_MULTIPLY_ADD,
    PACKAGE,
    LayerLoad,
    layer_load,
    relative_error,
)
from .record import describe_run, write_json
from .timing import median_ms

# (block_m, block_n, block_k)
M_GROUPED_TILES = ((128, 256, 64), (128, 192, 64), (128, 128, 64), (128, 64, 64))
K_GROUPED_TILES = (
    (128, 256, 64),
    (128, 256, 32),
    (128, 192, 64),
    (128, 192, 32),
    (256, 128, 64),
    (256, 128, 32),
    (128, 128, 64),
    (128, 128, 32),
    (128, 64, 32),
)
MULTICASTS = ("b", "a", "none")
# Between two configurations only the order of fp32 additions could differ.
MAX_DIFFERENCE = 1e-5


def products(load: LayerLoad) -> list[tuple[str, GemmKind, int, int, int]]:
    """(name, kind, m, n, k) of a layer's six products; m is 0 for the m-grouped ones, k for the others."""
    h, i = load.hidden, load.intermediate
    return [
        ("L1", GemmKind.M_NT, 0, 2 * i, h),
        ("L2", GemmKind.M_NT, 0, h, i),
        ("dA", GemmKind.M_NN, 0, i, h),
        ("dX", GemmKind.M_NN, 0, h, 2 * i),
        ("dW13", GemmKind.K_TN, 2 * i, h, 0),
        ("dW2", GemmKind.K_TN, h, i, 0),
    ]


def candidates(kind: GemmKind, m: int, n: int, num_sms: int) -> list[GemmConfig]:
    """Every configuration that is legal for a product."""
    k_grouped = kind is GemmKind.K_TN
    configs = []
    for block_m, block_n, block_k in K_GROUPED_TILES if k_grouped else M_GROUPED_TILES:
        for multicast in MULTICASTS:
            if multicast == "none" and block_n < max(tile[1] for tile in M_GROUPED_TILES):
                continue
            if multicast != "none" and not multicast_legal(kind, m, n, block_m, block_n, num_sms, False):
                continue
            if k_grouped and m % block_m:
                continue
            output_bytes = FP32_BYTES if k_grouped else BF16_BYTES
            configs.append(make_config(block_m, block_n, output_bytes, multicast, block_k))
    return configs


def problem_of(kind: GemmKind, m: int, n: int, k: int, load: LayerLoad, num_sms: int) -> GemmProblem:
    """The GEMM of one layer's load, as the kernel generator takes it; k-grouped ones add to fp32."""
    return GemmProblem(kind, m, n, k, load.experts, False, kind is GemmKind.K_TN, num_sms)


def label(config: GemmConfig) -> str:
    """A configuration in one line: tile, stages, operand that is multicast."""
    shared = "none" if config.multicast < CLUSTER else "A" if config.multicast_on_a else "B"
    return f"{config.block_m}x{config.block_n}x{config.block_k} stages {config.num_stages} multicast {shared}"


def compile_all(sources: Sequence[KernelSource]) -> None:
    """Fill the kernel cache, one compiler process per core."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        for cubin in pool.map(compile_kernel, sources):
            if cubin.resources.spills:
                raise RuntimeError(f"{cubin.symbol} spills registers")


def operands(
    kind: GemmKind, m: int, n: int, k: int, load: LayerLoad, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, int, int]]:
    """Random a, b, an empty d, the grouped layout, and (m, n, k) as the kernel counts them."""
    rows, groups = load.rows, load.experts
    bf16: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    if kind is GemmKind.K_TN:
        layout = torch.full((groups,), rows // groups, dtype=torch.int32, device=device)
        d = torch.zeros(groups, m, n, device=device)
        return torch.randn(rows, m, **bf16), torch.randn(rows, n, **bf16), d, layout, (m, n, rows)
    layout = torch.arange(groups, dtype=torch.int32, device=device).repeat_interleave(rows // groups)
    b = torch.randn((groups, n, k) if kind is GemmKind.M_NT else (groups, k, n), **bf16)
    return torch.randn(rows, k, **bf16), b, torch.empty(rows, n, **bf16), layout, (rows, n, k)


def sweep_product(
    product: tuple[str, GemmKind, int, int, int], load: LayerLoad, device: torch.device, num_sms: int
) -> list[dict[str, Any]]:
    """Time each configuration of one product; all must give the same output."""
    name, kind, m, n, k = product
    a, b, d, layout, shape = operands(kind, m, n, k, load, device)
    problem = problem_of(kind, m, n, k, load, num_sms)
    chosen = choose_config(kind, m, n, load.experts, num_sms, False)
    plans = [
        (config, make_plan(problem, config, d.get_device())) for config in candidates(kind, m, n, num_sms)
    ]
    expected = None
    for config, plan in plans:
        d.fill_(0 if kind is GemmKind.K_TN else float("nan"))
        plan.launch(a, b, d, layout, shape)
        if expected is None:
            expected = d.float()
        difference = relative_error(d, expected)
        if not difference <= MAX_DIFFERENCE:
            raise RuntimeError(f"{name} {label(config)}: output differs by {difference:.2e}")
    # There and back again: clocks and temperature drift, and the spread of the two passes says how much.
    passes: dict[GemmConfig, list[float]] = {config: [] for config, _ in plans}
    for config, plan in (*plans, *reversed(plans)):
        passes[config].append(median_ms(functools.partial(plan.launch, a, b, d, layout, shape)))
    flops = FLOPS_PER_MULTIPLY_ADD * load.rows * n * (m if kind is GemmKind.K_TN else k)
    lines = [
        {
            "model": load.model,
            "experts": load.experts,
            "gemm": name,
            "config": label(config),
            "ms": min(times),
            "ms_of_each_pass": times,
            "tflops": flops / min(times) / 1e9,
            "chosen": config == chosen,
        }
        for config, times in passes.items()
    ]
    return sorted(lines, key=lambda line: line["ms"])


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--load", nargs="+", default=list(DEFAULT_LOADS), metavar="MODEL:EP")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args(argv)
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    num_sms = get_num_sms()
    loads = [layer_load(name) for name in arguments.load]
    compile_all(
        [
            kernel_source(problem_of(kind, m, n, k, load, num_sms), config)
            for load in loads
            for _, kind, m, n, k in products(load)
            for config in candidates(kind, m, n, num_sms)
        ]
    )
    lines = [
        line
        for load in loads
        for product in products(load)
        for line in sweep_product(product, load, device, num_sms)
    ]
    for line in lines:
        mark = "*" if line["chosen"] else " "
        print(
            f"{line['model']} x{line['experts']:<3} {line['gemm']:5} {mark} {line['config']:42} "
            f"{line['ms']:7.3f} ms {line['tflops']:5.0f} TFLOP/s"
        )
    if arguments.json is not None:
        command = f"{PACKAGE}.bench.gemm_sweep --load {' '.join(arguments.load)}"
        record = {**describe_run(command, device, arguments.commit), "lines": lines}
        write_json(arguments.json, record)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
