"""Randomised runs of the SM90 kernels over shapes, routing, options and virtual ranks, by hypothesis.

The same examples every time. RANDOM_RUNS=<n> runs n of them for each number of ranks instead of the default.
A failing one is printed as a `Run`, which `@example` of the same test repeats.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sm90_cases import BF16, DEVICE, FP32, SHAPES, make_case, same_bits
from virtual_world import judge, world_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("sm90_kernels")]

EXAMPLES = int(os.environ.get("RANDOM_RUNS", "24"))
MAX_LOCAL_EXPERTS = 6
MAX_TOPK = 32
TOKENS = (0, 1, 45, 127, 128, 129, 255, 256, 257)
ROUTING = ("even", "random", "masked", "none", "one", "skewed")
FROZEN = ((), ("dw1",), ("dw2",), ("dw1", "dw2"))
DELAY_CYCLES = 2_000_000  # about 1 ms


@dataclass(frozen=True)
class Run:
    """One example.

    Attributes:
        shape: (H, I).
        experts: E, over all ranks.
        topk: K.
        counts: tokens of each rank.
        routing: of :func:`sm90_cases.route`.
        clamp: limit of SwiGLU.
        dw: "bf16", "fp32" or "accumulate".
        frozen: weight gradients that are not computed.
        keep_z: whether the forward keeps gate and up.
        sms: of each rank; None: its share of the GPU.
        seed: of the data.
    """

    shape: tuple[int, int]
    experts: int
    topk: int
    counts: tuple[int, ...]
    routing: str
    clamp: float | None
    dw: str
    frozen: tuple[str, ...]
    keep_z: bool
    sms: int | None
    seed: int


@st.composite
def runs(draw: st.DrawFn, ranks: int) -> Run:
    experts = ranks * draw(st.integers(1, MAX_LOCAL_EXPERTS))
    most = min(experts, MAX_TOPK)
    tokens = st.one_of(st.sampled_from(TOKENS), st.integers(2, 300))
    return Run(
        shape=draw(st.sampled_from(SHAPES)),
        experts=experts,
        topk=draw(st.one_of(st.integers(1, min(most, 8)), st.just(most))),
        counts=tuple(draw(st.lists(tokens, min_size=ranks, max_size=ranks))),
        routing=draw(st.sampled_from(ROUTING)),
        clamp=draw(st.sampled_from((None, 0.5, 1.5))),
        dw=draw(st.sampled_from(("bf16", "fp32", "accumulate"))),
        frozen=draw(st.sampled_from(FROZEN)),
        keep_z=draw(st.booleans()),
        sms=draw(st.sampled_from((None, 2, 4))),
        seed=draw(st.integers(0, 2**16)),
    )


def check_run(run: Run) -> None:
    """Every output against float64, then once more, with a late rank, to the same bits."""
    ranks = len(run.counts)
    case = make_case(
        sum(run.counts), run.experts, run.topk, *run.shape, run.routing, clamp=run.clamp, seed=run.seed
    )
    initial = None
    if run.dw == "accumulate":
        generator = torch.Generator(DEVICE).manual_seed(run.seed)
        gate_up, down = (
            torch.randn(weight.shape, device=DEVICE, generator=generator)
            for weight in (case.gate_up, case.down)
        )
        initial = (gate_up, down)
    world = world_of(
        run.counts, run.experts, run.topk, *run.shape, sms=None if run.sms is None else run.sms * ranks
    )
    options = {
        "dw_dtype": BF16 if run.dw == "bf16" else FP32,
        "initial": initial, "frozen": run.frozen, "keep_z": run.keep_z,
    }  # fmt: skip
    out = world.step(case, run.counts, **options)
    judge(out, case, initial)
    assert ((out.dw1 is None), (out.dw2 is None)) == ("dw1" in run.frozen, "dw2" in run.frozen)
    again = world.step(case, run.counts, **options, delays={run.seed % ranks: DELAY_CYCLES})
    assert all(same_bits(a, b) for a, b in zip(out.all(), again.all(), strict=True))


def randomised(ranks: int):
    # Nothing is shrunk: a failure that is a time-out costs seconds for every attempt.
    return lambda test: settings(
        max_examples=EXAMPLES, derandomize=True, database=None, deadline=None,
        phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck),
    )(given(run=runs(ranks))(test))  # fmt: skip


@randomised(1)
def test_one_rank(run: Run) -> None:
    check_run(run)


@randomised(2)
def test_two_ranks(run: Run) -> None:
    check_run(run)


@randomised(4)
def test_four_ranks(run: Run) -> None:
    check_run(run)


@randomised(8)
def test_eight_ranks(run: Run) -> None:
    check_run(run)
