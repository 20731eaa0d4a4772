"""Several ranks on one GPU, each with a stream and its share of the SMs: flags, pulls and pushes are real."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from sm90_cases import BF16, DEVICE, Case, check, compile_all, make_case, poisoned, same_bits
from torch import Tensor

from prime_kernels.exchange import FLAGS_BYTES, ExchangeShape
from prime_kernels.sm90 import Sm90Rank, make_virtual_ranks

pytestmark = pytest.mark.gpu

TIMEOUT_SECONDS = 10.0
SHORT_TIMEOUT_SECONDS = 1.0
DELAY_CYCLES = 20_000_000  # about 10 ms
POISON = 255  # a byte of NaN in bf16 and fp32, and -1 as an integer


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    compile_all()


@dataclass
class Outputs:
    """Of all ranks: y, dx and dtopk one for each rank, the weight gradients those of all experts."""

    y: list[Tensor]
    dx: list[Tensor]
    dtopk: list[Tensor]
    dw1: Tensor
    dw2: Tensor

    def all(self) -> list[Tensor]:
        return [*self.y, *self.dx, *self.dtopk, self.dw1, self.dw2]


class World:
    """R virtual ranks that together run one case, of which rank r brings ``counts[r]`` tokens."""

    def __init__(
        self, shape: ExchangeShape, timeout_seconds: float = TIMEOUT_SECONDS, **options: object
    ) -> None:
        sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
        self.shape = shape
        self.ranks = make_virtual_ranks(shape, DEVICE, sms, timeout_seconds=timeout_seconds, **options)
        self.streams = [torch.cuda.Stream(DEVICE) for _ in self.ranks]
        for clamped in (False, True):
            self.ranks[0].forward_kernel(clamped)
            self.ranks[0].backward_kernel(clamped)

    def experts(self, rank: int) -> slice:
        local = self.shape.local_experts
        return slice(rank * local, (rank + 1) * local)

    def poison(self) -> None:
        """What earlier calls could have left anywhere, except for the flags."""
        for rank in self.ranks:
            rank.storage[FLAGS_BYTES:].fill_(POISON)
            pools = rank.pools
            for pool in (pools.x, pools.dy, pools.dz, pools.activations, pools.weights, pools.dtopk_parts):
                pool.view(torch.uint8).fill_(POISON)
            rank.topk_idx.fill_(0)

    def stage(self, case: Case, counts: Sequence[int]) -> None:
        self.poison()
        start = 0
        for rank, count in zip(self.ranks, counts, strict=True):
            rows = slice(start, start + count)
            rank.x[:count], rank.dy[:count] = case.x[rows], case.dy[rows]
            rank.topk_idx[:count], rank.topk_weights[:count] = case.topk_idx[rows], case.topk_weights[rows]
            start += count

    def launch(self, run: Callable[[int, Sm90Rank], None], absent: Sequence[int] = ()) -> None:
        for index, (rank, stream) in enumerate(zip(self.ranks, self.streams, strict=True)):
            if index not in absent:
                with torch.cuda.stream(stream):
                    run(index, rank)

    def step(
        self, case: Case, counts: Sequence[int], *, dw_dtype: torch.dtype = torch.float32,
        initial: tuple[Tensor, Tensor] | None = None, delays: dict[int, int] | None = None,
        keep_z: bool = False,
    ) -> Outputs:  # fmt: skip
        """Forward, then backward on every rank, with nothing between them."""
        hidden, topk = self.shape.hidden, self.shape.topk
        out = Outputs(
            y=[poisoned((count, hidden), BF16) for count in counts],
            dx=[poisoned((count, hidden), BF16) for count in counts],
            dtopk=[poisoned((count, topk), torch.float32) for count in counts],
            dw1=poisoned(case.gate_up.shape, dw_dtype) if initial is None else initial[0].clone(),
            dw2=poisoned(case.down.shape, dw_dtype) if initial is None else initial[1].clone(),
        )
        self.stage(case, counts)
        kept = [rank.empty_z().fill_(math.nan) if keep_z else None for rank in self.ranks]
        torch.cuda.synchronize()

        def forward(index: int, rank: Sm90Rank) -> None:
            if delays and index in delays:
                torch.cuda._sleep(delays[index])
            experts = self.experts(index)
            rank.forward(
                out.y[index], case.gate_up[experts], case.down[experts], case.clamp, z=kept[index]
            )

        def backward(index: int, rank: Sm90Rank) -> None:
            experts = self.experts(index)
            rank.backward(
                out.dx[index], out.dw1[experts], out.dw2[experts], out.dtopk[index], case.gate_up[experts],
                case.down[experts], case.clamp, initial is not None, kept[index],
            )  # fmt: skip

        self.launch(forward)
        self.launch(backward)
        torch.cuda.synchronize()
        for rank in self.ranks:
            rank.check()
        return out


def judge(out: Outputs, case: Case, initial: tuple[Tensor, Tensor] | None = None) -> None:
    grads = case.grads
    check("y", torch.cat(out.y), case.y)
    check("dx", torch.cat(out.dx), grads.dx)
    dtopk = torch.cat(out.dtopk)
    check("dtopk", dtopk, grads.dtopk)
    assert bool((dtopk[case.topk_idx < 0] == 0).all())
    dw1, dw2 = grads.dgate_up, grads.ddown
    if initial is not None:
        dw1, dw2 = dw1 + initial[0], dw2 + initial[1]
    check("dw1", out.dw1, dw1, matrices=True)
    check("dw2", out.dw2, dw2, matrices=True)


def world_of(
    counts: Sequence[int], experts: int, topk: int, hidden: int, inter: int, **options: object
) -> World:
    return World(ExchangeShape(max(1, *counts), topk, hidden, inter, experts, len(counts)), **options)


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
        ([64] * 8, 8, 1, "skewed", None),
    ],
)
def test_parity(
    counts: list[int], experts: int, topk: int, kind: str, clamp: float | None, keep_z: bool
) -> None:
    case = make_case(sum(counts), experts, topk, 512, 256, kind, clamp=clamp)
    world = world_of(counts, experts, topk, 512, 256)
    judge(world.step(case, counts, keep_z=keep_z), case)


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


def test_many_steps_back_to_back() -> None:
    """Forward after forward with jitter and no wait on the host between: epochs and flags stay in step."""
    counts = [96, 0, 33, 128]
    case = make_case(sum(counts), 8, 4, 512, 256, "random")
    world = world_of(counts, 8, 4, 512, 256)
    want = world.step(case, counts).y
    jitter = random.Random(0)
    world.stage(case, counts)
    ys = [poisoned(y.shape, BF16) for y in want]
    torch.cuda.synchronize()

    def forward(index: int, rank: Sm90Rank) -> None:
        if jitter.random() < 0.3:
            torch.cuda._sleep(jitter.randrange(200_000))
        experts = world.experts(index)
        rank.forward(ys[index], case.gate_up[experts], case.down[experts])

    for _ in range(200):
        world.launch(forward)
    torch.cuda.synchronize()
    for rank in world.ranks:
        rank.check()
    assert all(same_bits(a, b) for a, b in zip(ys, want, strict=True))


@pytest.mark.parametrize("seed", range(12))
def test_random_shapes_and_routing(seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.choice([1, 2, 4, 8])
    hidden, inter = draw.choice([(512, 256), (768, 384)])
    experts = ranks * draw.randint(1, 5)
    topk = draw.randint(1, min(experts, 9))
    counts = [draw.choice([0, 1, 45, 127, 128, 129, draw.randint(2, 300)]) for _ in range(ranks)]
    kind = draw.choice(["even", "random", "masked", "skewed", "one"])
    clamp = draw.choice([None, 0.5])
    dtype = draw.choice([torch.float32, BF16])
    case = make_case(sum(counts), experts, topk, hidden, inter, kind, clamp=clamp, seed=seed)
    out = world_of(counts, experts, topk, hidden, inter).step(case, counts, dw_dtype=dtype)
    judge(out, case)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_rank_that_never_launches_is_named(direction: str) -> None:
    counts, absent = [64, 64, 64, 64], 2
    case = make_case(sum(counts), 8, 2, 512, 256)
    world = world_of(counts, 8, 2, 512, 256, timeout_seconds=SHORT_TIMEOUT_SECONDS)
    world.stage(case, counts)
    rows = poisoned((64, 512), BF16)
    dw1, dw2 = torch.empty_like(case.gate_up), torch.empty_like(case.down)
    dtopk = poisoned((64, 2), torch.float32)
    torch.cuda.synchronize()

    def run(index: int, rank: Sm90Rank) -> None:
        experts = world.experts(index)
        weights = (case.gate_up[experts], case.down[experts])
        if direction == "forward":
            rank.forward(rows, *weights)
        else:
            rank.backward(rows, dw1[experts], dw2[experts], dtopk, *weights)

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


def test_pools_that_are_too_small_are_reported_with_the_rows_needed() -> None:
    """Rank 1 alone receives too much; its peers learn that it gave up."""
    counts = [512, 512]
    case = make_case(sum(counts), 4, 2, 512, 256, "one")
    world = world_of(counts, 4, 2, 512, 256, timeout_seconds=SHORT_TIMEOUT_SECONDS, pool_blocks=8)
    world.stage(case, counts)
    rows = poisoned((512, 512), BF16)
    torch.cuda.synchronize()

    def forward(index: int, rank: Sm90Rank) -> None:
        experts = world.experts(index)
        rank.forward(rows, case.gate_up[experts], case.down[experts])

    world.launch(forward)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="rank 0, step 1: the peer gave up: peer 1"):
        world.ranks[0].check()
    with pytest.raises(RuntimeError, match=r"needs 2048 pool rows and 1024 are allocated.*capacity_factor"):
        world.ranks[1].check()
    judge(world_of(counts, 4, 2, 512, 256, pool_blocks=32).step(case, counts), case)


def test_a_full_pool_never_hangs_the_backward() -> None:
    """Both CTAs of a cluster stop, whichever sees the fault first: or one waits for the other without end."""
    counts = [512, 512]
    case = make_case(sum(counts), 4, 2, 512, 256, "one")
    world = world_of(counts, 4, 2, 512, 256, timeout_seconds=SHORT_TIMEOUT_SECONDS, pool_blocks=8)
    world.stage(case, counts)
    dx, dtopk = poisoned((512, 512), BF16), poisoned((512, 2), torch.float32)
    dw1, dw2 = poisoned(case.gate_up.shape, torch.float32), poisoned(case.down.shape, torch.float32)
    torch.cuda.synchronize()

    def backward(index: int, rank: Sm90Rank) -> None:
        own = world.experts(index)
        rank.backward(dx, dw1[own], dw2[own], dtopk, case.gate_up[own], case.down[own])

    for _ in range(100):
        world.launch(backward)
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
