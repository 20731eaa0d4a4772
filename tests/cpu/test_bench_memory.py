"""Memory against the number of ranks: the figures are those of what is allocated, and the docs show them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from prime_kernels import cli
from prime_kernels.bench.memory import buffer_bytes, buffer_table, memory_table, pool_bytes, rank_memory
from prime_kernels.exchange import ExchangeShape, PoolMemory, Pools, pool_layout

PAGE = Path(__file__).resolve().parents[2] / "docs" / "memory.md"


def test_bytes_are_those_of_real_pools() -> None:
    shape = ExchangeShape(tokens=64, topk=2, hidden=256, intermediate=128, experts=8, ranks=2)
    blocks = shape.pool_blocks(1.0)
    assert blocks == 1 + 4
    pools = Pools(shape, blocks, PoolMemory(pool_layout(shape, blocks), torch.device("cpu")))
    pools.add_backward()
    assert pool_bytes(shape, blocks, True) == pools.num_bytes
    # x, dy (H each), w*a (I) and dz (2I) in bf16; the small parts and alignment are below a tenth.
    rows = blocks * 128 * (2 * 256 + 3 * 128) * 2
    assert rows < pools.num_bytes < 1.1 * rows
    assert pool_bytes(shape, blocks, False) < pools.num_bytes - blocks * 128 * (256 + 2 * 128) * 2


def test_the_listed_buffers_are_all_there_is() -> None:
    shape = ExchangeShape(tokens=64, topk=2, hidden=256, intermediate=128, experts=8, ranks=2)
    parts = buffer_bytes(shape, 5)
    sums = {
        kind: sum(size for name, size in parts.items() if name.startswith(kind))
        for kind in ("symmetric: ", "pools", "pools, backward: ", "kept z")
    }
    assert sums["symmetric: "] == shape.symmetric_layout()[1]
    assert sums["pools"] == pool_bytes(shape, 5, True)
    assert sums["pools, backward: "] == pool_layout(shape, 5).backward_bytes
    assert parts["symmetric: slots"] == 64 * 2 * 256 * 2
    assert parts["pools: x"] == parts["pools, backward: dy"] == 5 * 128 * 256 * 2
    assert sums["kept z"] == 5 * 128 * 2 * 128 * 2


def test_worst_case_routing_grows_with_the_ranks_and_equal_loads_do_not() -> None:
    one, eight = rank_memory("qwen3-30b-a3b", 1, 16384), rank_memory("qwen3-30b-a3b", 8, 16384)
    assert (one.experts, eight.experts) == (128, 16)
    assert 7 < eight.worst / one.worst < 8
    assert eight.balanced < one.balanced
    assert eight.weights * 8 == one.weights == 3 * 128 * 2048 * 768 * 2
    assert eight.gradients == 2 * eight.weights
    assert eight.forward_worst < eight.worst / 2
    assert eight.z_balanced == (1024 + 2 * 16) * 128 * 2 * 768 * 2
    assert 7 < eight.z_worst / eight.z_balanced < 8
    # x, dy and the returned rows.
    assert eight.symmetric == pytest.approx(16384 * 2048 * 2 * (2 + 8), rel=0.01)


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "memory", "--model", "deepseek-v3", "--tokens", "4096", "--ep", "8", "64"]) == 0
    out = capsys.readouterr().out
    assert "### deepseek-v3: H 7168, I 2048, 256 experts, top-8, 4096 tokens per rank" in out
    assert memory_table("deepseek-v3", (8, 64), 4096) in out
    assert buffer_table("deepseek-v3", 8, 4096) in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model x", "unknown model 'x'"),
        ("--ep 3", "which 3 ranks cannot share equally"),
        ("--parts 5", "which 5 ranks cannot share equally"),
        ("--tokens 0", "--tokens is 0"),
    ],
)
def test_arguments_that_cannot_be(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "memory", *words.split()])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """After a change of the pools, paste what `python -m prime_kernels bench memory` prints into it."""
    cli.main(["bench", "memory"])
    assert capsys.readouterr().out.strip() in PAGE.read_text()
