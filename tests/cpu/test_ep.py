"""Expert parallelism over gloo groups of 1, 2, 4 and 8 processes, against one process and autograd."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from ep_cases import FLOAT64_TOLERANCE, ROUTINGS, TOKENS, Case, assert_right, collect, concatenate, cycle
from gloo_world import GlooWorld
from hypothesis import given, settings
from hypothesis import strategies as st
from mega_calls import Outputs, backward, forward, make_buffer, run_both
from moe_oracle import relative_error, solve
from torch import Tensor

from prime_kernels import bf16_mega_moe_backward


@pytest.mark.parametrize(
    "pattern", [(TOKENS,), (5, 0, 1, TOKENS), (0, 7), (1,), (0,), (TOKENS, TOKENS - 1, 0, 0)], ids=str
)
def test_unequal_and_zero_token_counts(world: GlooWorld, pattern: tuple[int, ...]) -> None:
    case = Case(cycle(world.size, *pattern))
    assert_right(collect(world, case), case)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routing(world: GlooWorld, routing: str) -> None:
    case = Case(cycle(world.size, 6, 0, 9), routing=routing)
    assert_right(collect(world, case), case)


@pytest.mark.parametrize(("local_experts", "topk"), [(1, 1), (5, 5), (2, 2), (11, 11)])
def test_expert_and_slot_counts(world: GlooWorld, local_experts: int, topk: int) -> None:
    """K = 1, K = E on one rank, K above 8."""
    case = Case(cycle(world.size, 4, 3), local_experts=local_experts, topk=topk)
    assert_right(collect(world, case), case)


def test_clamp_and_shared_expert(world: GlooWorld) -> None:
    case = Case(cycle(world.size, 7, 0, 4), clamp=0.4, shared_inter=5)
    assert_right(collect(world, case), case)


@st.composite
def cases(draw: st.DrawFn, size: int) -> Case:
    local = draw(st.integers(1, 5))
    topk = draw(st.integers(1, local * size).map(lambda k: min(k, 12)))
    names = [name for name in ROUTINGS if topk > 1 or "masked" not in name]
    return Case(
        tuple(draw(st.lists(st.integers(0, TOKENS), min_size=size, max_size=size))), local, topk,
        draw(st.integers(1, 10)), draw(st.integers(1, 7)), draw(st.sampled_from(names)), torch.float64,
        draw(st.sampled_from([None, 0.5])), draw(st.sampled_from([None, 3])), draw(st.integers(0, 2**31)),
    )  # fmt: skip


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_random_cases(world: GlooWorld, data: st.DataObject) -> None:
    case = data.draw(cases(world.size))
    assert_right(collect(world, case), case)


BF16_CASE = Case((), hidden=64, inter=128, dtype=torch.bfloat16, topk=3)


def test_bf16_over_ranks_is_bitwise_that_of_one_rank(world: GlooWorld) -> None:
    """Rows of an expert keep their order over any number of ranks, so no sum changes. And so do two runs."""
    case = replace(BF16_CASE, counts=cycle(world.size, 9, 0, 12, 1))
    first, second = collect(world, case), collect(world, case)
    problem = case.problem()
    alone = run_both(problem, make_buffer(problem, problem.x.shape[0] or 1)).named()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        assert torch.equal(value, alone[name]), name


@pytest.mark.parametrize(
    "options",
    [{"skip": ("dw1",)}, {"skip": ("dw1", "dw2")}, {"dw_dtype": torch.float32}, {"dw_natural_layout": False}],
    ids=str,
)
def test_options_over_ranks(world: GlooWorld, options: dict[str, Any]) -> None:
    case = replace(BF16_CASE, counts=cycle(world.size, 5, 0, 8))
    got, problem = collect(world, case, **options), case.problem()
    alone = run_both(problem, make_buffer(problem, problem.x.shape[0]), **options).named()
    assert set(got) == set(alone)
    for name, value in alone.items():
        assert torch.equal(got[name], value), name


def _two_layers(rank: int, size: int, cases: tuple[Case, Case]) -> list[tuple[Outputs, Outputs]]:
    """F1 F2 B2 B1 over one buffer, for some steps, the ranks out of step; every step must give the same."""
    problems = [case.problem() for case in cases]
    buffer = make_buffer(problems[0], TOKENS)
    jitter = random.Random(rank)
    results = []
    for _ in range(6):
        ys, grads = [], []
        for case, problem in zip(cases, problems, strict=True):
            time.sleep(jitter.random() * 0.004)
            ys.append(forward(problem, buffer, case.tokens_of(rank), case.experts_of(rank)))
        for case, problem in reversed(list(zip(cases, problems, strict=True))):
            time.sleep(jitter.random() * 0.004)
            grads.insert(0, backward(problem, buffer, case.tokens_of(rank), case.experts_of(rank)))
        results.append(tuple(Outputs(y=y, stats=s, **g) for (y, s), g in zip(ys, grads, strict=True)))
    return results


def test_two_layers_over_one_buffer_with_jitter(world: GlooWorld) -> None:
    cases = Case(cycle(world.size, 3, 12, 0)), Case(cycle(world.size, 0, 5, 8), seed=5, routing="zipf")
    steps = world.run(_two_layers, cases)
    for step, (layer, case) in itertools.product(range(6), enumerate(cases)):
        assert_right(concatenate([by_step[step][layer] for by_step in steps]), case)


def _accumulate(rank: int, size: int, case: Case) -> tuple[Tensor, Tensor]:
    """Two micro-batches (even and odd tokens) added into dW that starts at 1."""
    problem, experts = case.problem(), case.experts_of(rank)
    buffer = make_buffer(problem, TOKENS)
    dw1 = torch.ones_like(problem.gate_up[experts])
    dw2 = torch.ones_like(problem.down[experts])
    tokens = range(*case.tokens_of(rank).indices(problem.x.shape[0]))
    for half in (0, 1):
        part = [t for t in tokens if t % 2 == half]
        count = len(part)
        buffer.x[:count] = problem.x[part]
        buffer.topk_idx[:count] = problem.topk_idx[part]
        buffer.topk_weights[:count] = problem.topk_weights[part]
        dx, dtopk = (
            torch.empty(count, case.hidden, dtype=case.dtype),
            torch.empty(count, case.topk, dtype=case.dtype),
        )
        bf16_mega_moe_backward(
            dx, dw1, dw2, dtopk, problem.dy[part], problem.gate_up[experts], problem.down[experts], buffer,
            accumulate=True,
        )  # fmt: skip
    return dw1, dw2


def test_accumulation_over_micro_batches(world: GlooWorld) -> None:
    case = Case(cycle(world.size, 9, 0, 4))
    parts = world.run(_accumulate, case)
    want = solve(case.problem())
    assert relative_error(torch.cat([dw1 for dw1, _ in parts]), want.dgate_up + 1) <= FLOAT64_TOLERANCE
    assert relative_error(torch.cat([dw2 for _, dw2 in parts]), want.ddown + 1) <= FLOAT64_TOLERANCE
