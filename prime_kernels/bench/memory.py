"""Memory of the kernels on one rank against the number of ranks, from the same formulas that allocate it.

``python -m prime_kernels bench memory`` needs no GPU.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..exchange import BLOCK_M, ExchangeShape, Regions, aligned, pool_layout
from ..models import model_shape
from .gemm import TOKENS_PER_RANK

PACKAGE = (__package__ or "").partition(".")[0]
DEFAULT_MODELS = ("qwen3-30b-a3b", "qwen3-235b-a22b")
DEFAULT_EP = (1, 2, 4, 8, 16, 32)
PARTS_EP = 8  # whose buffers are listed one by one
GIB, MIB = 2**30, 2**20
EQUAL_LOADS = 1.0  # the pool capacity factor that holds T K rows
WEIGHT_MATRICES = 3  # gate, up and down of an expert
BF16_BYTES, FP32_BYTES = 2, 4


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank.

    symmetric: mapped by every peer; one for all layers. balanced, worst: pools (forward and backward) that
    hold equal loads, and any routing. forward_worst: the latter for a rank that never runs a backward.
    z_balanced, z_worst: what the forward of a layer keeps, for either pools.
    weights: bf16, of one layer. gradients: fp32, of one layer.
    """

    ep: int
    experts: int
    symmetric: int
    balanced: int
    worst: int
    forward_worst: int
    z_balanced: int
    z_worst: int
    weights: int
    gradients: int


def pool_bytes(shape: ExchangeShape, blocks: int, backward: bool) -> int:
    """Bytes of the pools with ``blocks`` row blocks; nothing is allocated."""
    layout = pool_layout(shape, blocks)
    return layout.both_bytes + (layout.backward_bytes if backward else 0)


def z_bytes(shape: ExchangeShape, blocks: int) -> int:
    """Bytes of gate and up of every pool row, bf16."""
    return blocks * BLOCK_M * 2 * shape.intermediate * BF16_BYTES


def rank_shape(model: str, ep: int, tokens: int) -> ExchangeShape:
    """The shape of one of ``ep`` ranks.

    Raises:
        ValueError: unknown model, or ranks that cannot share its experts equally.
    """
    sizes = model_shape(model)
    sizes.experts_per_rank(ep)
    return ExchangeShape(tokens, sizes.top_k, sizes.hidden, sizes.intermediate, sizes.num_experts, ep)


def rank_memory(model: str, ep: int, tokens: int) -> RankMemory:
    """Memory of one of ``ep`` ranks with up to ``tokens`` tokens each.

    Raises:
        ValueError: unknown model, or ranks that cannot share its experts equally.
    """
    shape = rank_shape(model, ep, tokens)
    balanced_blocks, worst_blocks = shape.pool_blocks(EQUAL_LOADS), shape.pool_blocks(None)
    elements = WEIGHT_MATRICES * shape.local_experts * shape.hidden * shape.intermediate
    return RankMemory(
        ep=ep,
        experts=shape.local_experts,
        symmetric=shape.symmetric_layout()[1],
        balanced=pool_bytes(shape, balanced_blocks, True),
        worst=pool_bytes(shape, worst_blocks, True),
        forward_worst=pool_bytes(shape, worst_blocks, False),
        z_balanced=z_bytes(shape, balanced_blocks),
        z_worst=z_bytes(shape, worst_blocks),
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
            memory.z_balanced, memory.z_worst, memory.weights, memory.gradients,
        )  # fmt: skip
        rows.append([str(ep), str(memory.experts), *(f"{size / GIB:.2f}" for size in sizes)])
    headers = [
        "EP", "experts per rank", "symmetric", "pools, equal loads", "pools, any routing",
        "pools, any routing, forward only", "kept z, equal loads", "kept z, any routing",
        "bf16 weights", "fp32 gradients",
    ]  # fmt: skip
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True, stralign="right")


def _symmetric_parts(shape: ExchangeShape) -> dict[str, int]:
    """Bytes of each region of the symmetric memory, which follow each other."""
    offsets, end = shape.symmetric_layout()
    starts = sorted((getattr(offsets, field[0]), field[0]) for field in offsets._fields_)
    ends = [start for start, _ in starts[1:]] + [end]
    return {name: stop - start for (start, name), stop in zip(starts, ends, strict=True)}


def _pool_parts(regions: Regions) -> Iterator[tuple[str, int]]:
    for name, (extents, dtype) in regions.items():
        yield name, aligned(math.prod(extents) * dtype.itemsize)


def buffer_bytes(shape: ExchangeShape, blocks: int) -> Mapping[str, int]:
    """Bytes of every buffer of a rank whose pools have ``blocks`` row blocks, by a name that says where."""
    layout = pool_layout(shape, blocks)
    return {
        **{f"symmetric: {name}": size for name, size in _symmetric_parts(shape).items()},
        **{f"pools: {name}": size for name, size in _pool_parts(layout.both)},
        **{f"pools, backward: {name}": size for name, size in _pool_parts(layout.backward)},
        "kept z": z_bytes(shape, blocks),
    }


def buffer_table(model: str, ep: int, tokens: int) -> str:
    """A Markdown table in MiB, one line per buffer. Raises as :func:`rank_shape`."""
    from tabulate import tabulate

    shape = rank_shape(model, ep, tokens)
    balanced = buffer_bytes(shape, shape.pool_blocks(EQUAL_LOADS))
    worst = buffer_bytes(shape, shape.pool_blocks(None))
    rows = [[name, *(f"{part[name] / MIB:.3f}" for part in (balanced, worst))] for name in balanced]
    align = ("left", "right", "right")
    headers = ["buffer", "equal loads", "any routing"]
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True, colalign=align)


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
    parser.add_argument(
        "--parts", type=int, default=PARTS_EP, help="ranks for the list of buffers (default %(default)s)"
    )
    arguments = parser.parse_args(argv)
    if arguments.tokens < 1:
        parser.error(f"--tokens is {arguments.tokens}; needs at least 1")
    try:
        tables = [
            (
                model,
                memory_table(model, arguments.ep, arguments.tokens),
                buffer_table(model, arguments.parts, arguments.tokens),
            )
            for model in arguments.model
        ]
    except ValueError as error:
        parser.error(str(error))
    for model, table, buffers in tables:
        sizes = model_shape(model)
        print(
            f"### {sizes.name}: H {sizes.hidden}, I {sizes.intermediate}, {sizes.num_experts} experts, "
            f"top-{sizes.top_k}, {arguments.tokens} tokens per rank, GiB\n\n{table}\n\n"
            f"Its buffers with {arguments.parts} ranks, MiB:\n\n{buffers}\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
