"""Several ranks on one GPU, each with a stream and its share of the SMs: flags, pulls and pushes are real."""

from __future__ import annotations

import time

import pytest
import torch
from sm90_cases import BF16, DEVICE, Case, make_case, same_bits
from virtual_world import SHORT_TIMEOUT_SECONDS, Outputs, World, judge, world_of

from prime_kernels.sm90 import Sm90Rank

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("sm90_kernels")]

DELAY_CYCLES = 20_000_000  # about 10 ms


@pytest.mark.parametrize("keep_z", [False, True])
@pytest.mark.parametrize(
    ("counts", "experts", "topk", "kind", "clamp"),
    [
        ([300], 6, 3, "even", None),
        ([256, 256], 4, 2, "even", None),
        ([256, 45], 6, 4, "masked", 1.0),
        ([300, 0, 1, 129], 8, 4, "masked", 0.7),
        ([128, 127, 129, 0], 12, 12, "even", None),
        ([256, 0, 1, 129, 7, 128, 127, 3], 16, 4, "random", None),
        ([256, 0, 1, 45, 127, 128, 129, 256], 24, 8, "masked", None),
        ([64] * 8, 8, 1, "skewed", None),
    ],
)
def test_parity(
    counts: list[int], experts: int, topk: int, kind: str, clamp: float | None, keep_z: bool
) -> None:
    case = make_case(sum(counts), experts, topk, 512, 256, kind, clamp=clamp)
    world = world_of(counts, experts, topk, 512, 256)
    judge(world.step(case, counts, keep_z=keep_z), case)


@pytest.mark.parametrize("keep_z", [False, True])
@pytest.mark.parametrize("counts", [[300, 0, 1, 129], [256, 45]])
def test_edges_of_matrices(counts: list[int], keep_z: bool) -> None:
    """No tile divides H or I: nothing is read or written beyond them, by TMA, dispatch or combine."""
    case = make_case(sum(counts), 8, 4, 320, 192, "masked", clamp=1.0)
    judge(world_of(counts, 8, 4, 320, 192).step(case, counts, keep_z=keep_z, dw_dtype=BF16), case)


@pytest.mark.parametrize("rounds", [2, 4])
def test_rounds(rounds: int) -> None:
    counts = [300, 0, 1, 129]
    case = make_case(sum(counts), 8, 4, 512, 256, "masked", clamp=1.0)
    blocks = 8 * rounds + sum(counts) * 4 // 128
    world = world_of(counts, 8, 4, 512, 256, pool_blocks=blocks)
    for rank in world.ranks:
        rank.forward_rounds = rounds
    judge(world.step(case, counts), case)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_token_to_one_expert(ranks: int) -> None:
    """The other ranks receive nothing, and still reach every flag."""
    counts = [100 + rank for rank in range(ranks)]
    case = make_case(sum(counts), 2 * ranks, 2, 512, 256, "one")
    out = world_of(counts, 2 * ranks, 2, 512, 256).step(case, counts, dw_dtype=BF16)
    judge(out, case)
    assert bool((out.dw1[:-1] == 0).all())
    assert bool((out.dw2[:-1] == 0).all())


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_no_tokens_anywhere(ranks: int) -> None:
    case = make_case(0, 2 * ranks, 2, 512, 256)
    out = world_of([0] * ranks, 2 * ranks, 2, 512, 256).step(case, [0] * ranks)
    assert bool((out.dw1 == 0).all())
    assert bool((out.dw2 == 0).all())


def test_accumulates_into_weight_gradients() -> None:
    counts = [130, 77, 0, 128]
    case = make_case(sum(counts), 8, 4, 768, 384, "random")
    initial = (torch.randn(case.gate_up.shape, device=DEVICE), torch.randn(case.down.shape, device=DEVICE))
    judge(world_of(counts, 8, 4, 768, 384).step(case, counts, initial=initial), case, initial)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_same_bits_whoever_is_late(ranks: int) -> None:
    """Repeated steps over one set of buffers, and a rank that comes late, change no bit of any output."""
    counts = [160 - 17 * rank for rank in range(ranks)]
    case = make_case(sum(counts), 2 * ranks, 4, 512, 256, "random")
    world = world_of(counts, 2 * ranks, 4, 512, 256)
    first = world.step(case, counts)
    judge(first, case)
    for delays in ({}, {0: DELAY_CYCLES}, {ranks - 1: DELAY_CYCLES}):
        again = world.step(case, counts, delays=delays)
        assert all(same_bits(a, b) for a, b in zip(first.all(), again.all(), strict=True)), delays


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_rank_that_never_launches_is_named(direction: str) -> None:
    counts, absent = [64, 64, 64, 64], 2
    case = make_case(sum(counts), 8, 2, 512, 256)
    world = world_of(counts, 8, 2, 512, 256, timeout_seconds=SHORT_TIMEOUT_SECONDS)
    world.stage(case, counts)
    out = world.poisoned_outputs(case, counts)
    torch.cuda.synchronize()

    def run(index: int, rank: Sm90Rank) -> None:
        getattr(world, direction)(index, case, out)

    started = time.monotonic()
    world.launch(run, absent=[absent])
    torch.cuda.synchronize()
    assert time.monotonic() - started < 10 * SHORT_TIMEOUT_SECONDS
    for index, rank in enumerate(world.ranks):
        if index == absent:
            rank.check()
            continue
        message = f"rank {index}, step 1: peer {absent} did not come within 1 s"
        with pytest.raises(RuntimeError, match=message):
            rank.check()
        rank.check()  # once
    # The context lives: other buffers work as if nothing had happened.
    judge(world_of(counts, 8, 2, 512, 256).step(case, counts), case)


def staged_with_small_pools(counts: list[int]) -> tuple[Case, World, Outputs]:
    """Two ranks that are about to run out of pool rows: all tokens go to the second."""
    case = make_case(sum(counts), 4, 2, 512, 256, "one")
    world = world_of(counts, 4, 2, 512, 256, timeout_seconds=SHORT_TIMEOUT_SECONDS, pool_blocks=8)
    world.stage(case, counts)
    out = world.poisoned_outputs(case, counts)
    torch.cuda.synchronize()
    return case, world, out


def test_pools_that_are_too_small_are_reported_with_the_rows_needed() -> None:
    """Rank 1 alone receives too much; its peers learn that it gave up."""
    counts = [512, 512]
    case, world, out = staged_with_small_pools(counts)
    world.launch(lambda index, rank: world.forward(index, case, out))
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="rank 0, step 1: the peer gave up: peer 1"):
        world.ranks[0].check()
    with pytest.raises(RuntimeError, match=r"needs 2048 pool rows and 1024 are allocated.*capacity_factor"):
        world.ranks[1].check()
    judge(world_of(counts, 4, 2, 512, 256, pool_blocks=32).step(case, counts), case)


def test_a_full_pool_never_hangs_the_backward() -> None:
    """Both CTAs of a cluster stop, whichever sees the fault first: or one waits for the other without end."""
    case, world, out = staged_with_small_pools([512, 512])
    for _ in range(100):
        world.launch(lambda index, rank: world.backward(index, case, out))
        torch.cuda.synchronize()
        for rank in world.ranks:
            with pytest.raises(RuntimeError, match=r"gave up|pool rows"):
                rank.check()


def test_an_expert_index_out_of_range_is_reported() -> None:
    counts = [16, 16]
    case = make_case(sum(counts), 4, 2, 512, 256)
    case.topk_idx[20, 1] = 4
    world = world_of(counts, 4, 2, 512, 256)
    world.stage(case, counts)
    torch.cuda.synchronize()
    world.launch(lambda index, rank: rank.route_plan(16))
    torch.cuda.synchronize()
    world.ranks[0].check()
    with pytest.raises(ValueError, match=r"rank 1, step [01]: topk_idx entry 9 holds expert 4"):
        world.ranks[1].check()
