"""Expert parallelism over gloo groups of 1, 2, 4 and 8 processes, against one process and autograd."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_world import GROUP_TIMEOUT, GlooWorld, join_group
from hypothesis import given, settings
from hypothesis import strategies as st
from mega_calls import Outputs, backward, forward, make_buffer, run_both
from moe_oracle import Problem, make_problem, relative_error, solve
from torch import Tensor

from prime_kernels import SymmBuffer, bf16_mega_moe_backward, reference, runtime

SIZES = [1, 2, 4, 8]
TOKENS = 12  # the buffer's, per rank
FLOAT64_TOLERANCE = 1e-12


@pytest.fixture(scope="module", params=SIZES, ids=lambda size: f"{size}ranks")
def world(request: pytest.FixtureRequest) -> Iterator[GlooWorld]:
    with GlooWorld(request.param) as result:
        yield result


@dataclass(frozen=True)
class Case:
    """A global problem and how many of its tokens each rank brings. ``routing`` names a function below."""

    counts: tuple[int, ...]
    local_experts: int = 3  # 3, 6, 12 and 24 experts in all: not a power of two
    topk: int = 3
    hidden: int = 8
    inter: int = 8
    routing: str = "uniform"
    dtype: torch.dtype = torch.float64
    clamp: float | None = None
    shared_inter: int | None = None
    seed: int = 0

    @property
    def experts(self) -> int:
        return self.local_experts * len(self.counts)

    def tokens_of(self, rank: int) -> slice:
        start = sum(self.counts[:rank])
        return slice(start, start + self.counts[rank])

    def experts_of(self, rank: int) -> slice:
        return slice(rank * self.local_experts, (rank + 1) * self.local_experts)

    def problem(self) -> Problem:
        tokens = sum(self.counts)
        generator = torch.Generator().manual_seed(self.seed + 1)
        topk_idx = ROUTINGS[self.routing](tokens, self.experts, self.topk, generator)
        return make_problem(
            tokens, self.experts, self.topk, self.hidden, self.inter, seed=self.seed, topk_idx=topk_idx,
            clamp=self.clamp, shared_inter=self.shared_inter,
        ).to(self.dtype)  # fmt: skip


def _uniform(tokens: int, experts: int, topk: int, generator: torch.Generator) -> Tensor:
    return torch.randint(-1, experts, (tokens, topk), generator=generator)


def _zipf(tokens: int, experts: int, topk: int, generator: torch.Generator) -> Tensor:
    popularity = 1.0 / torch.arange(1, experts + 1) ** 1.2
    return torch.multinomial(popularity.expand(max(tokens, 1), -1), topk, generator=generator)[:tokens]


ROUTINGS = {
    "uniform": _uniform,
    "zipf": _zipf,
    "to the last expert": lambda n, e, k, g: torch.full((n, k), e - 1),
    "to the first expert": lambda n, e, k, g: torch.zeros(n, k, dtype=torch.int64),
    "nothing": lambda n, e, k, g: torch.full((n, k), -1),
    "even experts, first slot masked": lambda n, e, k, g: torch.cat(
        [torch.full((n, 1), -1), 2 * torch.randint(0, (e + 1) // 2, (n, k - 1), generator=g)], 1
    ),
}


def run_rank(rank: int, size: int, case: Case, options: dict[str, Any]) -> Outputs:
    """One rank's forward and backward."""
    problem = case.problem()
    buffer = make_buffer(problem, TOKENS)
    return run_both(problem, buffer, case.tokens_of(rank), case.experts_of(rank), **options)


def collect(world: GlooWorld, case: Case, **options: Any) -> dict[str, Tensor]:
    """All ranks' outputs in the order of the global problem; shared weight gradients summed over ranks."""
    ranks = [outputs.named() for outputs in world.run(run_rank, case, options)]
    joined = {}
    for name in ranks[0]:
        parts = [outputs[name] for outputs in ranks]
        joined[name] = sum(parts) if name.startswith("shared") else torch.cat(parts)
    return joined


def assert_right(got: dict[str, Tensor], case: Case) -> None:
    """Against autograd over loops and against the one-process reference; exact zeros and counts."""
    problem = case.problem()
    want = solve(problem)
    grads = reference.moe_backward(
        problem.dy, *problem.arguments(), clamp=problem.clamp, shared=problem.shared
    )
    y = reference.moe_forward(*problem.arguments(), clamp=problem.clamp, shared=problem.shared)
    pairs = {
        "y": (want.y, y), "dx": (want.dx, grads.dx), "dtopk": (want.dtopk, grads.dtopk),
        "dw1": (want.dgate_up, grads.dgate_up), "dw2": (want.ddown, grads.ddown),
    }  # fmt: skip
    if want.shared is not None:
        pairs["shared_dw1"] = (want.shared[0], grads.dshared_gate_up)
        pairs["shared_dw2"] = (want.shared[1], grads.dshared_down)
    for name, judges in pairs.items():
        for judge in judges:
            assert got[name].shape == judge.shape
            assert relative_error(got[name], judge) <= FLOAT64_TOLERANCE, name
    routed = problem.topk_idx[problem.topk_idx >= 0]
    counts = torch.bincount(routed, minlength=case.experts)
    assert got["stats"].tolist() == counts.tolist()
    assert (got["dw1"][counts == 0] == 0).all()
    assert (got["dw2"][counts == 0] == 0).all()
    assert (got["dtopk"][problem.topk_idx < 0] == 0).all()


def _cycle(size: int, *pattern: int) -> tuple[int, ...]:
    return tuple(itertools.islice(itertools.cycle(pattern), size))


@pytest.mark.parametrize(
    "pattern", [(TOKENS,), (5, 0, 1, TOKENS), (0, 7), (1,), (0,), (TOKENS, TOKENS - 1, 0, 0)], ids=str
)
def test_unequal_and_zero_token_counts(world: GlooWorld, pattern: tuple[int, ...]) -> None:
    case = Case(_cycle(world.size, *pattern))
    assert_right(collect(world, case), case)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routing(world: GlooWorld, routing: str) -> None:
    case = Case(_cycle(world.size, 6, 0, 9), routing=routing)
    assert_right(collect(world, case), case)


@pytest.mark.parametrize(("local_experts", "topk"), [(1, 1), (5, 5), (2, 2), (11, 11)])
def test_expert_and_slot_counts(world: GlooWorld, local_experts: int, topk: int) -> None:
    """K = 1, K = E on one rank, K above 8."""
    case = Case(_cycle(world.size, 4, 3), local_experts=local_experts, topk=topk)
    assert_right(collect(world, case), case)


def test_clamp_and_shared_expert(world: GlooWorld) -> None:
    case = Case(_cycle(world.size, 7, 0, 4), clamp=0.4, shared_inter=5)
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
    case = replace(BF16_CASE, counts=_cycle(world.size, 9, 0, 12, 1))
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
    case = replace(BF16_CASE, counts=_cycle(world.size, 5, 0, 8))
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
    cases = Case(_cycle(world.size, 3, 12, 0)), Case(_cycle(world.size, 0, 5, 8), seed=5, routing="zipf")
    steps = world.run(_two_layers, cases)
    for step, (layer, case) in itertools.product(range(6), enumerate(cases)):
        outputs = [by_step[step][layer].named() for by_step in steps]
        assert_right({name: torch.cat([rank[name] for rank in outputs]) for name in outputs[0]}, case)


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
    case = Case(_cycle(world.size, 9, 0, 4))
    parts = world.run(_accumulate, case)
    want = solve(case.problem())
    assert relative_error(torch.cat([dw1 for dw1, _ in parts]), want.dgate_up + 1) <= FLOAT64_TOLERANCE
    assert relative_error(torch.cat([dw2 for _, dw2 in parts]), want.ddown + 1) <= FLOAT64_TOLERANCE


def _unequal_arguments(rank: int, size: int) -> str:
    with pytest.raises(ValueError) as error:
        SymmBuffer(
            None, 3 * size, 16 if rank else 8, 2, 64 if rank < size - 1 else 128, 128, mma_type="bf16xbf16"
        )
    SymmBuffer(None, 3 * size, 16, 2, 64, 128, mma_type="bf16xbf16")  # the group is still usable
    return str(error.value)


def test_unequal_arguments_name_field_values_and_ranks(world: GlooWorld) -> None:
    if world.size == 1:
        pytest.skip("one rank always agrees with itself")
    others, before_last, last = list(range(1, world.size)), list(range(world.size - 1)), world.size - 1
    for message in world.run(_unequal_arguments):
        assert f"num_max_tokens_per_rank is 8 on rank(s) [0], 16 on rank(s) {others}" in message
        assert f"hidden is 64 on rank(s) {before_last}, 128 on rank(s) [{last}]" in message
        assert "num_experts" not in message
        assert "pass equal arguments on all ranks" in message


def _argument_errors(rank: int, size: int) -> None:
    common = {"num_max_tokens_per_rank": 8, "num_topk": 1, "hidden": 64, "intermediate_hidden": 128}
    with pytest.raises(
        ValueError, match=rf"num_experts is {size + 1}, needs a multiple of the group's {size} ranks"
    ):
        SymmBuffer(None, size + 1, mma_type="bf16xbf16", **common)
    buffer = SymmBuffer(None, size, mma_type="bf16xbf16", **common)
    group = dist.new_group(list(range(size)))
    with pytest.raises(ValueError, match="a view and its base need the same group"):
        SymmBuffer(group, size, mma_type="bf16xbf16", base=buffer, **common)


def test_errors_of_a_group(world: GlooWorld) -> None:
    if world.size == 1:
        pytest.skip("every count is a multiple of one rank")
    world.run(_argument_errors)


def _bad_routing(rank: int, size: int, case: Case) -> str:
    problem = case.problem()
    buffer = make_buffer(problem, TOKENS)
    if rank == size - 1:
        problem.topk_idx[case.tokens_of(rank).start, 0] = case.experts
    messages = []
    for function in (forward, backward):
        with pytest.raises((ValueError, RuntimeError)) as error:
            function(problem, buffer, case.tokens_of(rank), case.experts_of(rank))
        messages.append(f"{error.type.__name__}: {error.value}")
    assert messages[0] == messages[1]
    run_rank(rank, size, case, {})  # the group is still usable
    return messages[0]


def test_bad_routing_of_one_rank_raises_on_all(world: GlooWorld) -> None:
    case = Case(_cycle(world.size, 4))
    *others, last = world.run(_bad_routing, case)
    assert last.startswith(f"ValueError: topk_idx holds {case.experts}, needs values in [0, {case.experts})")
    for rank, message in enumerate(others):
        assert message.startswith(
            f"RuntimeError: rank {rank}: rank(s) [{world.size - 1}] refused the routing"
        )


def _subgroups(rank: int, size: int, case: Case) -> list[Outputs]:
    """Every second process forms a group, so that ranks in a group differ from ranks in the world."""
    groups = [dist.new_group(list(range(first, size, 2))) for first in (0, 1)]
    problem, ours = case.problem(), rank // 2
    buffer = make_buffer(problem, TOKENS, group=groups[rank % 2])
    assert (buffer.rank, buffer.num_ranks) == (ours, size // 2)
    return run_both(problem, buffer, case.tokens_of(ours), case.experts_of(ours))


def test_group_that_is_not_the_world(world: GlooWorld) -> None:
    if world.size < 4:
        pytest.skip("needs two groups of several ranks")
    case = Case(_cycle(world.size // 2, 5, 3))
    ranks = world.run(_subgroups, case)
    for first in (0, 1):
        outputs = [rank.named() for rank in ranks[first::2]]
        assert_right({name: torch.cat([rank[name] for rank in outputs]) for name in outputs[0]}, case)


def _rebuild(rank: int, size: int, case: Case, store: str) -> tuple[Outputs, Outputs]:
    problem = case.problem()
    buffer = make_buffer(problem, TOKENS)
    before = run_both(problem, buffer, case.tokens_of(rank), case.experts_of(rank))
    buffer.destroy()
    dist.destroy_process_group()
    join_group(rank, size, store)
    return before, run_rank(rank, size, case, {})


def test_destroy_and_build_again_over_a_new_group(world: GlooWorld, tmp_path: Path) -> None:
    case = Case(_cycle(world.size, 6, 2))
    for before, after in world.run(_rebuild, case, str(tmp_path / "store")):
        for name, value in before.named().items():
            assert torch.equal(value, after.named()[name])


def _build_and_call(rank: int, size: int, case: Case) -> None:
    problem = case.problem()
    _kept.append(make_buffer(problem, TOKENS))
    run_both(problem, _kept[-1], case.tokens_of(rank), case.experts_of(rank))


_kept: list[SymmBuffer] = []


def test_leaving_without_destroying_does_not_hang() -> None:
    with GlooWorld(2) as world:
        world.run(_build_and_call, Case((3, 4)))
        assert world.wait() == [0, 0]


def _wait_for_a_peer(rank: int, size: int, case: Case) -> str:
    """The last rank stays away."""
    problem = case.problem()
    buffer = make_buffer(problem, TOKENS)
    if rank == size - 1:
        return ""
    runtime.set_timeout_seconds(1.5)
    started = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        forward(problem, buffer, case.tokens_of(rank), case.experts_of(rank))
    assert time.monotonic() - started < GROUP_TIMEOUT.total_seconds() / 2
    return str(error.value)


def test_peer_that_does_not_arrive_is_named() -> None:
    with GlooWorld(3) as world:
        *waiting, _ = world.run(_wait_for_a_peer, Case((2, 2, 2)))
    assert any("peer 2 did not complete phase 'counts' within 1.5 s" in message for message in waiting)
    for rank, message in enumerate(waiting):
        assert message.startswith(f"rank {rank}: peer ")
        assert "raise the limit with set_timeout_seconds" in message


def _die(rank: int, size: int, case: Case) -> str:
    problem = case.problem()
    buffer = make_buffer(problem, TOKENS)
    if rank == 0:
        dist.destroy_process_group()
        return ""
    with pytest.raises(RuntimeError) as error:
        forward(problem, buffer, case.tokens_of(rank), case.experts_of(rank))
    return str(error.value)


def test_peer_that_is_gone_makes_the_others_raise_and_exit() -> None:
    with GlooWorld(2) as world:
        _, message = world.run(_die, Case((2, 2)))
        assert "rank 1: peer 0 did not complete phase 'counts'" in message
        assert world.wait() == [0, 0]


def _late_peer_within_the_limit(rank: int, size: int, case: Case) -> Outputs:
    runtime.set_timeout_seconds(30)
    if rank == 0:
        time.sleep(1.0)
    return run_rank(rank, size, case, {})


def test_late_peer_within_the_limit_is_waited_for() -> None:
    with GlooWorld(2) as world:
        case = Case((3, 2))
        outputs = [rank.named() for rank in world.run(_late_peer_within_the_limit, case)]
    assert_right({name: torch.cat([rank[name] for rank in outputs]) for name in outputs[0]}, case)
