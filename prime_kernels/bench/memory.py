"""Memory of the kernels on one rank against the number of ranks, from the same formulas that allocate it.

``python -m prime_kernels bench memory`` needs no GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from ..exchange import ExchangeShape, pool_layout
from ..models import model_shape
from .gemm import TOKENS_PER_RANK

PACKAGE = (__package__ or "").partition(".")[0]
DEFAULT_MODELS = ("qwen3-30b-a3b", "qwen3-235b-a22b")
DEFAULT_EP = (1, 2, 4, 8, 16, 32)
GIB = 2**30
EQUAL_LOADS = 1.0  # the pool capacity factor that holds T K rows
WEIGHT_MATRICES = 3  # gate, up and down of an expert
BF16_BYTES, FP32_BYTES = 2, 4


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank.

    symmetric: mapped by every peer; one for all layers. balanced, worst: pools (forward and backward) that
    hold equal loads, and any routing. forward_worst: the latter for a rank that never runs a backward.
    weights: bf16, of one layer. gradients: fp32, of one layer.
    """

    ep: int
    experts: int
    symmetric: int
    balanced: int
    worst: int
    forward_worst: int
    weights: int
    gradients: int


def pool_bytes(shape: ExchangeShape, blocks: int, backward: bool) -> int:
    """Bytes of the pools with ``blocks`` row blocks; nothing is allocated."""
    layout = pool_layout(shape, blocks)
    return layout.both_bytes + (layout.backward_bytes if backward else 0)


def rank_memory(model: str, ep: int, tokens: int) -> RankMemory:
    """Memory of one of ``ep`` ranks with up to ``tokens`` tokens each.

    Raises:
        ValueError: unknown model, or ranks that cannot share its experts equally.
    """
    sizes = model_shape(model)
    experts = sizes.experts_per_rank(ep)
    shape = ExchangeShape(tokens, sizes.top_k, sizes.hidden, sizes.intermediate, sizes.num_experts, ep)
    worst_blocks = shape.pool_blocks(None)
    elements = WEIGHT_MATRICES * experts * sizes.hidden * sizes.intermediate
    return RankMemory(
        ep=ep,
        experts=experts,
        symmetric=shape.symmetric_layout()[1],
        balanced=pool_bytes(shape, shape.pool_blocks(EQUAL_LOADS), True),
        worst=pool_bytes(shape, worst_blocks, True),
        forward_worst=pool_bytes(shape, worst_blocks, False),
        weights=elements * BF16_BYTES,
        gradients=elements * FP32_BYTES,
    )


def memory_table(model: str, eps: Sequence[int], tokens: int) -> str:
    """A Markdown table in GiB, one line per number of ranks."""
    from tabulate import tabulate

    rows = []
    for ep in eps:
        memory = rank_memory(model, ep, tokens)
        sizes = (
            memory.symmetric, memory.balanced, memory.worst, memory.forward_worst,
            memory.weights, memory.gradients,
        )  # fmt: skip
        rows.append([str(ep), str(memory.experts), *(f"{size / GIB:.2f}" for size in sizes)])
    headers = [
        "EP", "experts per rank", "symmetric", "pools, equal loads", "pools, any routing",
        "pools, any routing, forward only", "bf16 weights of a layer", "fp32 gradients of a layer",
    ]  # fmt: skip
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True, stralign="right")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog=f"{PACKAGE} bench memory", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--model", nargs="+", default=list(DEFAULT_MODELS), help="models (default: both Qwen3)"
    )
    parser.add_argument(
        "--tokens", type=int, default=TOKENS_PER_RANK, help="tokens per rank (default %(default)s)"
    )
    parser.add_argument("--ep", nargs="+", type=int, default=list(DEFAULT_EP), help="numbers of ranks")
    arguments = parser.parse_args(argv)
    if arguments.tokens < 1:
        parser.error(f"--tokens is {arguments.tokens}; needs at least 1")
    try:
        tables = [(model, memory_table(model, arguments.ep, arguments.tokens)) for model in arguments.model]
    except ValueError as error:
        parser.error(str(error))
    for model, table in tables:
        sizes = model_shape(model)
        print(
            f"### {sizes.name}: H {sizes.hidden}, I {sizes.intermediate}, {sizes.num_experts} experts, "
            f"top-{sizes.top_k}, {arguments.tokens} tokens per rank, GiB\n\n{table}\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
