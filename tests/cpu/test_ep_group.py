"""Groups: what ranks must agree on, groups beside the world, new groups, peers that fail."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ep_cases import TOKENS, Case, assert_right, concatenate, cycle, run_rank
from gloo_world import GROUP_TIMEOUT, GlooWorld, join_group
from mega_calls import Outputs, backward, forward, make_buffer, run_both

from prime_kernels import SymmBuffer, bf16_mega_moe, ep, runtime, validation


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
    base = SymmBuffer(None, size, mma_type="bf16xbf16", **common)
    if rank == 0:
        base.destroy()  # the other ranks must not wait for this one
    with pytest.raises(ValueError, match=r"base bytes is None on rank\(s\) \[0\]"):
        SymmBuffer(None, size, mma_type="bf16xbf16", base=base, **common)
    gone = dist.new_group(list(range(size)))
    late = SymmBuffer(gone, size, mma_type="bf16xbf16", **common)
    dist.destroy_process_group(gone)
    y, gate_up, down = (
        torch.zeros(shape, dtype=torch.bfloat16) for shape in ((3, 64), (1, 256, 64), (1, 64, 128))
    )
    with pytest.raises(RuntimeError, match="the process group was destroyed; build the buffer anew"):
        bf16_mega_moe(y, gate_up, down, late)
    group = dist.new_group(list(range(size)))
    with pytest.raises(ValueError, match="a view and its base need the same group"):
        SymmBuffer(group, size, mma_type="bf16xbf16", base=buffer, **common)


def test_errors_of_a_group(world: GlooWorld) -> None:
    if world.size == 1:
        pytest.skip("every count is a multiple of one rank")
    world.run(_argument_errors)


def _two_machines(rank: int, size: int) -> str:
    """Ranks of a kernel's buffer on different machines; the reference does not mind."""
    arguments = (None, 2 * size, 8, 2, 256, 128)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ep, "nvlink_domain", lambda: "a" if rank % 2 else "b")
        SymmBuffer(*arguments, mma_type="bf16xbf16")
        patch.setattr(runtime, "resolve_backend", lambda device, mma_type: "sm90")
        with pytest.raises(RuntimeError) as error:
            SymmBuffer(*arguments, mma_type="bf16xbf16")
        patch.undo()
        validation.check_nvlink_domain(dist.group.WORLD, ep.nvlink_domain())  # this really is one machine
    return str(error.value)


def test_group_wider_than_one_nvlink_domain(world: GlooWorld) -> None:
    if world.size == 1:
        pytest.skip("one rank is in one domain")
    even, odd = list(range(0, world.size, 2)), list(range(1, world.size, 2))
    for message in world.run(_two_machines):
        assert f"the group's {world.size} ranks are in 2 NVLink domains: ranks {even} and {odd}" in message
        assert f"groups of at most {world.size // 2} ranks, each inside one machine" in message


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
    case = Case(cycle(world.size, 4))
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
    case = Case(cycle(world.size // 2, 5, 3))
    ranks = world.run(_subgroups, case)
    for first in (0, 1):
        assert_right(concatenate(ranks[first::2]), case)


def _rebuild(rank: int, size: int, case: Case, store: str) -> tuple[Outputs, Outputs]:
    problem = case.problem()
    buffer = make_buffer(problem, TOKENS)
    before = run_both(problem, buffer, case.tokens_of(rank), case.experts_of(rank))
    buffer.destroy()
    dist.destroy_process_group()
    join_group(rank, size, store)
    return before, run_rank(rank, size, case, {})


def test_destroy_and_build_again_over_a_new_group(world: GlooWorld, tmp_path: Path) -> None:
    case = Case(cycle(world.size, 6, 2))
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
        ranks = world.run(_late_peer_within_the_limit, case)
    assert_right(concatenate(ranks), case)
