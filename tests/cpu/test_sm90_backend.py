"""The SM90 backend without its kernels: memory, views, faults, and everything around the launches.

The launches are replaced by the reference on the CPU; what is staged, copied, added and checked around them
is the package's own.
"""

from __future__ import annotations

import ctypes
from itertools import pairwise
from typing import Any

import pytest
import torch
from mega_calls import backward, forward, make_buffer, run_both
from moe_oracle import Problem, make_problem, relative_error, solve
from torch import Tensor

from prime_kernels import (
    SymmBuffer,
    bf16_mega_moe,
    exchange,
    mega_moe,
    op,
    registry,
    runtime,
    sm90,
    sm90_mega_moe,
    sm90_memory,
)
from prime_kernels.exchange import (
    FLAGS_BYTES,
    MAX_RANKS,
    REGION_ALIGNMENT,
    ExchangeShape,
    FaultBox,
    FaultRecord,
    PoolMemory,
    Pools,
    SymmetricOffsets,
    pool_layout,
)
from prime_kernels.reference import (
    BF16_ROUNDING,
    deinterleave_gate_up,
    interleave_gate_up,
    moe_backward,
    moe_forward,
)

TOLERANCE = 5e-3
TOKENS = 96
BF16 = torch.bfloat16
FLAGS = ("ready_flags", "done_flags", "epoch")


class _NoKernel:
    def launch(self, *arguments: Any, **options: Any) -> None:
        """Does nothing: the fake launches plan for themselves."""


def _forward(
    rank: Any, y: Tensor, l1: Tensor, l2: Tensor, clamp: float | None, stats: Tensor | None,
    z: Tensor | None, rounds: int,
) -> None:  # fmt: skip
    assert y.is_contiguous()
    rank.route_plan(y.shape[0], rounds)
    n = y.shape[0]
    rank.route_plan(n)
    staged = (rank.x[:n], rank.topk_idx[:n], rank.topk_weights[:n])
    y.copy_(moe_forward(*staged, l1, l2, clamp=clamp, rounding=BF16_ROUNDING))
    if stats is not None:
        stats += torch.bincount(staged[1][staged[1] >= 0], minlength=l1.shape[0]).int()


def _backward(
    rank: Any, dx: Tensor, dw1: Tensor | None, dw2: Tensor | None, dtopk: Tensor, l1: Tensor, l2: Tensor,
    clamp: float | None, accumulate: bool, z: Tensor | None,
) -> None:  # fmt: skip
    assert dx.is_contiguous()
    rank.route_plan(dx.shape[0])
    assert dtopk.is_contiguous()
    assert rank.pools.dz.shape[0] == rank.pools.x.shape[0]
    n = dx.shape[0]
    rank.route_plan(n)
    staged = (rank.dy[:n], rank.x[:n], rank.topk_idx[:n], rank.topk_weights[:n])
    grads = moe_backward(*staged, l1, l2, clamp=clamp, rounding=BF16_ROUNDING)
    dx.copy_(grads.dx)
    dtopk.copy_(grads.dtopk)
    for out, value in ((dw1, grads.dgate_up), (dw2, grads.ddown)):
        if out is not None:
            out.copy_(out + value if accumulate else value)


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers use the SM90 backend, on the CPU."""
    monkeypatch.setattr(runtime, "resolve_backend", lambda device, mma_type: "sm90")
    monkeypatch.setattr(registry, "load", lambda name: sm90_mega_moe)
    monkeypatch.setattr(sm90, "load_kernel", lambda source, device: _NoKernel())
    monkeypatch.setattr(sm90.forward_kernel, "launch", _forward)
    monkeypatch.setattr(sm90.backward_kernel, "launch", _backward)
    monkeypatch.setattr(sm90_memory, "usable_sms", lambda device: 8)
    monkeypatch.setattr(sm90_memory, "synchronize", lambda device: None)
    for name in ("_pool_capacity_factor", "_synchronous_checks", "_timeout_seconds"):
        monkeypatch.setattr(runtime, name, getattr(runtime, name))


def problem_of(
    tokens: int = TOKENS, experts: int = 5, topk: int = 2, inter: int = 128, **options: Any
) -> Problem:
    return make_problem(tokens, experts, topk, 256, inter, **options).to(BF16)


def record(buffer: SymmBuffer, site: int, **fields: int) -> None:
    """As a kernel would write it."""
    assert buffer.sm90_memory is not None
    found = FaultRecord.from_address(buffer.sm90_memory.fault.address)
    for name, value in fields.items():
        setattr(found, name, value)
    found.site = site


def assert_matches(got: dict[str, Tensor | None], problem: Problem) -> None:
    want = solve(problem)
    pairs = {"y": want.y, "dx": want.dx, "dtopk": want.dtopk, "dw1": want.dgate_up, "dw2": want.ddown}
    if want.shared is not None:
        pairs |= {"shared_dw1": want.shared[0], "shared_dw2": want.shared[1]}
    for name, value in pairs.items():
        if got.get(name) is not None:
            assert relative_error(got[name], value) <= TOLERANCE, name


@pytest.mark.parametrize("shared_inter", [None, 128])
@pytest.mark.parametrize("dw_dtype", [BF16, torch.float32])
def test_both_directions_around_the_launches(shared_inter: int | None, dw_dtype: torch.dtype) -> None:
    problem = problem_of(shared_inter=shared_inter, clamp=1.5)
    got = run_both(problem, make_buffer(problem, TOKENS), dw_dtype=dw_dtype)
    assert_matches(got.named(), problem)
    routed = problem.topk_idx[problem.topk_idx >= 0]
    assert torch.equal(got.stats.long(), torch.bincount(routed, minlength=5))


@pytest.mark.parametrize("accumulate", [False, True])
def test_interleaved_layouts_are_those_of_the_reference(accumulate: bool) -> None:
    problem = problem_of(shared_inter=128)
    assert problem.shared is not None
    buffer = make_buffer(problem, TOKENS)
    plain_y, _ = forward(problem, buffer)
    plain = backward(problem, buffer, dw_dtype=torch.float32)
    mixed = Problem(
        problem.x, problem.topk_idx, problem.topk_weights, interleave_gate_up(problem.gate_up),
        problem.down, problem.dy, problem.clamp, (interleave_gate_up(problem.shared[0]), problem.shared[1]),
    )  # fmt: skip
    y, _ = forward(mixed, buffer, l1_natural_layout=False)
    assert torch.equal(y, plain_y)
    dw1, dw2 = (torch.full(w.shape, 3.0) for w in (problem.gate_up, problem.down))
    shared_dw = [torch.full(w.shape, 3.0) for w in problem.shared]
    dx, dtopk = torch.empty_like(problem.x), torch.empty_like(problem.topk_weights)
    sm90_mega_moe.backward(
        dx=dx, dw1=dw1, dw2=dw2, dtopk=dtopk, dy=problem.dy, l1_weights=mixed.gate_up, l2_weights=mixed.down,
        sym_buffer=buffer, shared_l1_weights=mixed.shared[0], shared_l2_weights=mixed.shared[1],
        shared_dw1_weights=shared_dw[0], shared_dw2_weights=shared_dw[1], activation_clamp=None,
        fast_math=True, dw_natural_layout=False, l1_natural_layout=False, accumulate=accumulate,
    )  # fmt: skip
    got = (deinterleave_gate_up(dw1), dw2, deinterleave_gate_up(shared_dw[0]), shared_dw[1])
    for value, name in zip(got, ("dw1", "dw2", "shared_dw1", "shared_dw2"), strict=True):
        assert torch.allclose(value - 3.0 * accumulate, plain[name], atol=1e-5), name
    assert torch.equal(dx, plain["dx"])


@pytest.mark.parametrize("factor", [None, 0.5])
def test_kept_z_goes_from_launch_to_launch(factor: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """z has a row for each of the pools', F1 F2 B2 B1 over two shapes take each their own, in one round."""
    runtime.set_pool_capacity_factor(factor)
    problems = (problem_of(), problem_of(40, experts=4, topk=1))
    base = make_buffer(problems[0], TOKENS)
    buffers = (base, make_buffer(problems[1], 40, base=base))
    assert [buffer.pool_rows for buffer in buffers] == [buffer.sm90.pool_blocks * 128 for buffer in buffers]
    assert base.pool_rows == (7 if factor is None else 6) * 128
    forwards: list[Tensor] = []
    backwards: list[Tensor] = []

    def forward_launch(*arguments: Any) -> None:
        *_, z, rounds = arguments
        assert rounds == 1
        forwards.append(z)
        _forward(*arguments)

    def backward_launch(*arguments: Any) -> None:
        backwards.append(arguments[-1])
        _backward(*arguments)

    monkeypatch.setattr(sm90.forward_kernel, "launch", forward_launch)
    monkeypatch.setattr(sm90.backward_kernel, "launch", backward_launch)
    leaves = [
        [t.clone().requires_grad_() for t in (p.x, p.topk_weights, p.gate_up, p.down)] for p in problems
    ]
    outputs = [
        mega_moe(x, problem.topk_idx, topk_weights, gate_up, down, buffer=buffer, keep="z")
        for problem, buffer, (x, topk_weights, gate_up, down) in zip(problems, buffers, leaves, strict=True)
    ]
    for index in (1, 0):
        outputs[index].backward(problems[index].dy)
        grads = (leaf.grad for leaf in leaves[index])
        got = dict(zip(("dx", "dtopk", "dw1", "dw2"), grads, strict=True))
        assert_matches({"y": outputs[index].detach(), **got}, problems[index])
    assert [z.shape for z in forwards] == [(buffer.pool_rows, 2 * 128) for buffer in buffers]
    assert {z.dtype for z in forwards} == {BF16}
    assert [z.data_ptr() for z in backwards] == [z.data_ptr() for z in reversed(forwards)]
    with pytest.raises(ValueError, match=rf"z has shape \[128, 256\].* contiguous \[{base.pool_rows}, 256"):
        op.backward_op(
            problems[0].dy, problems[0].x, problems[0].topk_idx, problems[0].topk_weights,
            problems[0].gate_up, problems[0].down, *[None] * 6, base.handle, None, [True, True, False, False],
            forwards[0][:128],
        )  # fmt: skip


@pytest.mark.parametrize("skip", [("dw1",), ("dw2",), ("dw1", "dw2")])
def test_frozen_weights(skip: tuple[str, ...]) -> None:
    problem = problem_of()
    got = backward(problem, make_buffer(problem, TOKENS), skip=skip)
    assert all(got[name] is None for name in skip)
    assert_matches(got, problem)


def test_no_tokens() -> None:
    problem = problem_of(shared_inter=128)
    none = slice(0, 0)
    buffer = make_buffer(problem, TOKENS)
    y, _ = forward(problem, buffer, none)
    assert y.shape == (0, 256)
    got = backward(problem, buffer, none)
    for name in ("dw1", "dw2", "shared_dw1", "shared_dw2"):
        assert bool((got[name] == 0).all()), name


def test_outputs_with_gaps_are_written_through_a_temporary() -> None:
    problem = problem_of()
    buffer = make_buffer(problem, TOKENS)
    wide = torch.full((TOKENS, 2, 256), 7.0, dtype=BF16)
    want, _ = forward(problem, buffer)
    bf16_mega_moe(wide[:, 1], problem.gate_up, problem.down, buffer)
    assert torch.equal(wide[:, 1], want)
    assert bool((wide[:, 0] == 7).all())


def test_strides_the_copy_engine_cannot_take() -> None:
    problem = problem_of()
    buffer = make_buffer(problem, TOKENS)
    y = torch.empty_like(problem.x)
    gate_up = torch.zeros(5, 256, 260, dtype=BF16)[..., :256]
    with pytest.raises(ValueError, match=r"l1_weights has stride 260 in dim 1.* of 8 \(16 bytes\)"):
        bf16_mega_moe(y, gate_up, problem.down, buffer)
    shifted = torch.zeros(5 * 256 * 128 + 1, dtype=BF16)[1:].view(5, 256, 128)
    with pytest.raises(ValueError, match=r"l2_weights starts at .* that is 2 bytes past a multiple of 16"):
        bf16_mega_moe(y, problem.gate_up, shifted, buffer)


def test_flags_lie_at_the_same_place_for_every_shape() -> None:
    shapes = [ExchangeShape(8, 2, 256, 128, 8, 4), ExchangeShape(4096, 8, 7168, 2048, 256, 4)]
    for shape in shapes:
        offsets, size = shape.symmetric_layout()
        assert [getattr(offsets, name) for name in FLAGS] == [0, REGION_ALIGNMENT, 2 * REGION_ALIGNMENT]
        others = [name for name, _ in SymmetricOffsets._fields_ if name not in FLAGS]
        starts = sorted(getattr(offsets, name) for name in others)
        assert starts[0] == FLAGS_BYTES
        assert len(set(starts)) == len(others)
        assert all(start % REGION_ALIGNMENT == 0 for start in starts)
        assert starts[-1] < size
    assert MAX_RANKS * ctypes.sizeof(ctypes.c_uint64) <= REGION_ALIGNMENT


def test_views_share_storage_pools_and_faults() -> None:
    large, small = problem_of(), problem_of(40, inter=128, topk=1)
    base = make_buffer(large, TOKENS)
    view = make_buffer(small, 40, base=base)
    assert view.sm90_memory is base.sm90_memory
    assert view.buffer is base.buffer
    assert view.num_bytes < base.num_bytes
    assert base.num_bytes == base.sm90_memory.num_bytes
    assert base.buffer.numel() == base.sm90_memory.num_symmetric_bytes
    assert make_buffer(small, 40, base=view).sm90 is view.sm90
    y1, _ = forward(large, base)
    y2, _ = forward(small, view)
    got2, got1 = backward(small, view), backward(large, base)
    assert_matches({"y": y1, **got1}, large)
    assert_matches({"y": y2, **got2}, small)
    assert base.sm90.pools.x.data_ptr() == view.sm90.pools.x.data_ptr()
    assert base.sm90.fault is view.sm90.fault
    with pytest.raises(ValueError, match=r"needs \d+ bytes of symmetric memory and its base holds \d+"):
        make_buffer(large, 2 * TOKENS, base=base)
    with pytest.raises(ValueError, match=r"needs \d+ bytes of pools of both directions and its .* \d+"):
        make_buffer(problem_of(8, inter=4096), TOKENS, base=base)


def test_pools_are_allocated_when_they_are_used() -> None:
    problem = problem_of()
    buffer = make_buffer(problem, TOKENS)
    parts = buffer.sm90_memory._pool_memory._parts
    assert not parts
    forward(problem, buffer)
    assert set(parts) == {"both"}
    backward(problem, buffer)
    assert set(parts) == {"both", "backward"}


def test_a_capture_does_not_allocate(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of()
    buffer = make_buffer(problem, TOKENS)
    for module in (exchange, sm90_memory):
        monkeypatch.setattr(module, "capturing", lambda device: True)
    with pytest.raises(RuntimeError, match="run the captured calls once before the capture"):
        forward(problem, buffer)
    with pytest.raises(RuntimeError, match="scratch for l1_weights in natural layout"):
        forward(problem, buffer, l1_natural_layout=False)


def test_pool_regions_do_not_overlap() -> None:
    shape = ExchangeShape(300, 3, 256, 128, 6, 2)
    blocks = shape.worst_case_pool_blocks()
    layout = pool_layout(shape, blocks)
    memory = PoolMemory(layout, torch.device("cpu"))
    pools = Pools(shape, blocks, memory)
    pools.add_backward()
    assert pools.num_bytes == memory.num_bytes == layout.both_bytes + layout.backward_bytes
    for part in (layout.both, layout.backward):
        spans = sorted(
            (getattr(pools, name).data_ptr(), getattr(pools, name).numel() * dtype.itemsize)
            for name, (_, dtype) in part.items()
        )
        for (start, size), (following, _) in pairwise(spans):
            assert start + size <= following
    assert pools.dz.shape == (blocks * 128, 256)


@pytest.mark.parametrize(
    ("factor", "blocks"),
    [(None, 8 * 16 + 4), (1.0, 16 + 4), (1.5, 24 + 4), (0.01, 1 + 4), (99.0, 8 * 16 + 4)],
)
def test_pool_capacity(factor: float | None, blocks: int) -> None:
    shape = ExchangeShape(tokens=512, topk=4, hidden=256, intermediate=128, experts=32, ranks=8)
    assert shape.pool_blocks(factor) == blocks


def test_the_capacity_factor_holds_for_buffers_built_after_it() -> None:
    problem = problem_of()
    runtime.set_pool_capacity_factor(0.5)
    buffer = make_buffer(problem, TOKENS)
    assert buffer.sm90.pool_blocks == 1 + 5
    runtime.set_pool_capacity_factor(None)
    assert make_buffer(problem, 40, base=buffer).sm90.pool_blocks == 1 + 5
    assert make_buffer(problem, TOKENS).sm90.pool_blocks == 2 + 5


def test_a_fault_is_raised_once_by_check_and_the_buffer_recovers() -> None:
    problem = problem_of()
    buffer = make_buffer(problem, TOKENS)
    buffer.buffer[:FLAGS_BYTES].fill_(9)
    record(buffer, 7, rank=0, expected=2048, seen=1024, epoch=3)
    with pytest.raises(RuntimeError, match=r"step 3: the routing needs 2048 pool rows and 1024 are"):
        buffer.check()
    buffer.check()
    assert bool((buffer.buffer[:FLAGS_BYTES] == 9).all())
    y, _ = forward(problem, buffer)
    assert bool((buffer.buffer[:FLAGS_BYTES] == 0).all())
    assert_matches({"y": y}, problem)


def test_a_fault_is_raised_by_the_next_call_of_any_view() -> None:
    problem = problem_of()
    base = make_buffer(problem, TOKENS)
    view = make_buffer(problem, 96, base=base)
    record(base, 8, rank=0, peer=5, expected=4, seen=9)
    with pytest.raises(ValueError, match="entry 5 holds expert 9, the limit is 0 <= expert < 4, or -1"):
        backward(problem, view)
    backward(problem, view)


def test_a_failed_group_needs_a_reset() -> None:
    problem = problem_of()
    buffer = make_buffer(problem, TOKENS)
    buffer.sm90_memory._num_ranks = 4
    runtime.set_timeout_seconds(12.5)
    forward(problem, buffer)
    assert buffer.sm90.comm.timeout_ns == 12_500_000_000
    record(buffer, 1, rank=0, peer=3, expected=2, seen=1, epoch=2)
    with pytest.raises(RuntimeError, match=r"step 2: peer 3 did not come within 12.5 s .*set_timeout"):
        forward(problem, buffer)
    with pytest.raises(RuntimeError, match=r"call buffer.reset\(\) on all ranks"):
        forward(problem, buffer)
    buffer.reset()
    forward(problem, buffer)


def test_synchronous_checks_raise_in_the_call_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of()
    buffer = make_buffer(problem, TOKENS)

    def fail(rank: Any, *arguments: Any) -> None:
        record(buffer, 3, rank=0, peer=2)

    monkeypatch.setattr(sm90.forward_kernel, "launch", fail)
    forward(problem, buffer)
    with pytest.raises(RuntimeError, match="the peer gave up: peer 2"):
        buffer.check()
    runtime.set_synchronous_checks(True)
    with pytest.raises(RuntimeError, match="the peer gave up: peer 2"):
        forward(problem, buffer)


def test_destroy_raises_what_is_left_and_frees_all_the_same() -> None:
    problem = problem_of()
    buffer = make_buffer(problem, TOKENS)
    view = make_buffer(problem, TOKENS, base=buffer)
    record(buffer, 7, expected=256, seen=128)
    view.destroy()  # a view owns nothing
    with pytest.raises(RuntimeError, match="256 pool rows"):
        buffer.destroy()
    assert buffer.destroyed
    buffer.destroy()
    with pytest.raises(RuntimeError, match="destroyed"):
        buffer.check()


@pytest.mark.parametrize(("site", "message"), [(4, "waiting for dispatched rows"), (77, "site 77")])
def test_every_fault_has_words(site: int, message: str) -> None:
    box = FaultBox(pinned=False)
    FaultRecord.from_address(box.address).site = site
    with pytest.raises(RuntimeError, match=message):
        box.raise_if_set()
    box.raise_if_set()


def test_limits_of_the_kernels_tables() -> None:
    with pytest.raises(ValueError, match="num_experts is 385, the SM90 kernels take at most 384"):
        make_buffer(problem_of(8, experts=385), 8)
