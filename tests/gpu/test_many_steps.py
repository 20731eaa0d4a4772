"""A thousand steps back to back over virtual ranks that drift apart, two layers over one buffer."""

from __future__ import annotations

import dataclasses
import random
import time

import pytest
import torch
from sm90_cases import BF16, DEVICE, FP32, SHAPES, Case, check, make_case
from torch import Tensor
from virtual_world import Outputs, World, judge

from prime_kernels.exchange import ExchangeShape
from prime_kernels.sm90 import Sm90Rank

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("sm90_kernels")]

STEPS = 1000
RANKS, EXPERTS, TOPK, TOKENS = 4, 8, 4, 160
COUNTS = (
    (160, 160, 160, 160), (0, 129, 1, 45), (127, 128, 0, 0), (1, 1, 1, 1), (160, 0, 33, 128),
    (0, 0, 0, 0), (17, 31, 15, 160), (128, 127, 129, 2),
)  # fmt: skip
ROUTING = ("even", "random", "masked", "one", "skewed", "even", "none", "masked")
JITTER_SHARE = 0.2  # of the calls of a rank
JITTER_CYCLES = 150_000  # up to about 80 us: a few launches late
LONG_JITTER_SHARE = 0.005
LONG_JITTER_CYCLES = 4_000_000  # about 2 ms: ten steps late
LATE_CYCLES = 3_000_000_000  # more than a second at any clock of the GPU


@dataclasses.dataclass
class Batch:
    """What one layer of a step runs on, what it gave the first time, and where later results go."""

    case: Case
    counts: tuple[int, ...]
    first: Outputs
    out: Outputs


def batches_of(world: World, layer: int) -> list[Batch]:
    """Each with other data, routing and tokens, but the same weights; the first results are right."""
    batches: list[Batch] = []
    experts, topk = world.shape.experts, world.shape.topk
    for seed, (counts, kind) in enumerate(zip(COUNTS, ROUTING, strict=True)):
        drawn = make_case(sum(counts), experts, topk, *SHAPES[layer], kind, seed=8 * layer + seed)
        weights = batches[0].case if batches else drawn
        case = Case(drawn.x, drawn.topk_idx, drawn.topk_weights, weights.gate_up, weights.down, drawn.dy)
        first = world.step(case, counts)
        judge(first, case)
        batches.append(Batch(case, counts, first, world.poisoned_outputs(case, counts)))
    return batches


def differs(got: Tensor, want: Tensor) -> Tensor:
    """bool, on the device: any bit of it."""
    same_size = torch.int16 if got.dtype == BF16 else torch.int32
    return (got.view(same_size) != want.view(same_size)).any()


class Training:
    """Two layers of unlike shapes over the memory of four ranks; counts results unlike the first ones."""

    def __init__(self) -> None:
        small, large, _ = SHAPES
        base = World(ExchangeShape(TOKENS, TOPK, *large, EXPERTS, RANKS))
        self.worlds = (World(ExchangeShape(TOKENS, TOPK, *small, EXPERTS, RANKS), base=base), base)
        self.batches = [batches_of(world, layer) for layer, world in enumerate(self.worlds)]
        self.wrong = torch.zeros(RANKS, dtype=torch.int64, device=DEVICE)
        self.jitter = random.Random(0)

    def call(self, layer: int, index: int, forward: bool, delays: dict[int, int]) -> None:
        """One direction of one layer on all ranks, from staging to comparison; the host does not wait."""
        world, batch = self.worlds[layer], self.batches[layer][index]
        case, out, first = batch.case, batch.out, batch.first

        def run(rank: int, _: Sm90Rank) -> None:
            if rank in delays:
                torch.cuda._sleep(delays[rank])
            elif self.jitter.random() < JITTER_SHARE:
                torch.cuda._sleep(self.jitter.randrange(JITTER_CYCLES))
            elif self.jitter.random() < LONG_JITTER_SHARE:
                torch.cuda._sleep(LONG_JITTER_CYCLES)
            world.stage_rank(rank, case, batch.counts)
            if forward:
                world.forward(rank, case, out)
                pairs = [(out.y[rank], first.y[rank])]
            else:
                world.backward(rank, case, out)
                own = world.experts(rank)
                pairs = [(out.dx[rank], first.dx[rank]), (out.dtopk[rank], first.dtopk[rank])]
                pairs += [(out.dw1[own], first.dw1[own]), (out.dw2[own], first.dw2[own])]
            for got, want in pairs:
                self.wrong[rank] += differs(got, want)
                got.fill_(torch.nan)

        world.launch(run)

    def step(self, index: int, delays: dict[int, int] | None = None) -> None:
        """F1 F2 B2 B1."""
        self.call(0, index, True, delays or {})
        self.call(1, index, True, {})
        self.call(1, index, False, {})
        self.call(0, index, False, {})

    def check(self) -> None:
        for world in self.worlds:
            world.check()
        assert self.wrong.tolist() == [0] * RANKS


def test_a_thousand_steps_with_jitter_between_ranks() -> None:
    training = Training()
    order = random.Random(1)
    torch.cuda.synchronize()
    for _ in range(STEPS):
        training.step(order.randrange(len(COUNTS)))
    training.check()
    # One rank more than a second late, once, while the others wait in their kernels: then as before.
    late = time.monotonic()
    training.step(0, delays={2: LATE_CYCLES})
    training.check()
    assert time.monotonic() - late > 1.0
    for index in range(len(COUNTS)):
        training.step(index)
    training.check()


def test_a_single_bit_would_be_counted() -> None:
    for dtype in (BF16, FP32):
        want = torch.randn(64, 512, device=DEVICE).to(dtype)
        got = want.clone()
        assert not bool(differs(got, want))
        got.view(torch.uint8)[-1, -1] ^= 1
        assert bool(differs(got, want))


def test_micro_batches_are_added_up_by_every_rank() -> None:
    """Weight gradients of changing micro-batches in fp32, on ranks that drift apart."""
    counts_of = [counts for counts in COUNTS for _ in range(2)]
    world = World(ExchangeShape(TOKENS, TOPK, *SHAPES[0], EXPERTS, RANKS))
    weights = make_case(0, EXPERTS, TOPK, *SHAPES[0])
    dw1, dw2 = (torch.zeros(weight.shape, device=DEVICE) for weight in (weights.gate_up, weights.down))
    jitter = random.Random(2)
    cases = []
    for seed, counts in enumerate(counts_of):
        drawn = make_case(sum(counts), EXPERTS, TOPK, *SHAPES[0], "masked", seed=seed)
        cases.append(
            Case(drawn.x, drawn.topk_idx, drawn.topk_weights, weights.gate_up, weights.down, drawn.dy)
        )
    outs = [
        dataclasses.replace(world.poisoned_outputs(case, counts), dw1=dw1, dw2=dw2)
        for case, counts in zip(cases, counts_of, strict=True)
    ]
    torch.cuda.synchronize()
    for case, counts, out in zip(cases, counts_of, outs, strict=True):

        def run(rank: int, _: Sm90Rank) -> None:
            torch.cuda._sleep(jitter.randrange(JITTER_CYCLES))
            world.stage_rank(rank, case, counts)  # noqa: B023 (called at once)
            world.backward(rank, case, out, accumulate=True)  # noqa: B023

        world.launch(run)
    world.check()
    for name, got in (("dgate_up", dw1), ("ddown", dw2)):
        check(name, got, sum(getattr(case.grads, name) for case in cases), matrices=True)
