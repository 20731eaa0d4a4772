"""Values, groups and buffers that have broken systems of this kind, on one rank."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from sm90_cases import BF16, DEVICE, Case, check, make_case, relative_error, same_bits
from test_sm90_bf16 import TOKENS, backward, forward, judge_backward, make_buffer, poison, run_both, stage
from torch import Tensor

from prime_kernels import runtime

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("sm90_kernels", "settings_undone")]


def with_rows(rows: tuple[int, ...], shape: tuple[int, int] = (512, 256), clamp: float | None = None) -> Case:
    """K = 1 and exactly ``rows[e]`` tokens for expert e, in mixed order."""
    case = make_case(sum(rows), len(rows), 1, *shape, clamp=clamp)
    experts = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows)).to(DEVICE)
    order = torch.randperm(len(experts), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    return dataclasses.replace(case, topk_idx=experts[order, None].contiguous())


@pytest.mark.parametrize(
    "rows",
    [
        (1, 15, 17, 31, 33, 127),
        (127, 128, 129, 255, 256, 257, 1),
        (0, 0, 1, 0, 0, 0, 300, 0),
        (162, 0, 2577, 446, 0, 83),
        (1,) * 64,
    ],
)
def test_rows_of_an_expert(rows: tuple[int, ...]) -> None:
    case = with_rows(rows)
    run_both(make_buffer(case, max(1, case.num_tokens)), case)


def test_most_experts_the_kernels_take_and_most_of_them_idle() -> None:
    case = make_case(100, 384, 2, 512, 256)
    case.topk_idx.remainder_(5).mul_(77)  # 0, 77, 154, 231, 308
    got = run_both(make_buffer(case), case, dw_dtype=BF16)
    idle = torch.ones(384, dtype=torch.bool)
    idle[::77] = False
    for name in ("dw1", "dw2"):
        assert bool((got[name][idle.to(DEVICE)] == 0).all()), name


def test_the_most_slots_of_a_token() -> None:
    case = make_case(70, 40, 32, 512, 256, "random")
    run_both(make_buffer(case), case)


@pytest.mark.parametrize("left", [math.inf, -math.inf, math.nan])
def test_what_earlier_calls_left(left: float) -> None:
    """Infinities meet zeros of padding rows: 0 x Inf must reach no output, with z recomputed."""
    case = with_rows((1, 127, 0, 129), clamp=1.0)
    buffer = make_buffer(case)
    stage(buffer, case)
    forward(buffer, case)
    backward(buffer, case)
    pools = buffer.sm90.pools
    floats = (pools.x, pools.dy, pools.dz, pools.activations, pools.weights, pools.dtopk_parts)
    at, shape = buffer.sm90.comm.at, buffer.sm90.shape
    slots = buffer.buffer[at.slots : at.slots + shape.tokens * shape.topk * shape.hidden * 2].view(BF16)

    def leave() -> None:
        for memory in (*floats, slots, buffer.x, buffer.sm90.dy, buffer.topk_weights):
            memory.fill_(left)

    leave()
    check("y", forward(buffer, case), case.y)
    leave()
    judge_backward(case, backward(buffer, case))
    buffer.check()


def test_a_clamp_that_binds_is_seen_in_every_output() -> None:
    case = make_case(300, 6, 3, 512, 256, clamp=0.4)
    free = dataclasses.replace(case, clamp=None)
    got = run_both(make_buffer(case), case)
    unlike = {"y": free.y, "dx": free.grads.dx, "dw1": free.grads.dgate_up, "dw2": free.grads.ddown}
    for name, without in {**unlike, "dtopk": free.grads.dtopk}.items():
        assert relative_error(got[name], without) > 0.2, name


def test_everything_beyond_the_clamp() -> None:
    """All gates above it and all up values beyond it: y is constant in x, so dx and dW13 are exactly zero."""
    case = make_case(100, 4, 2, 512, 256)
    ones = torch.ones_like(case.x)
    gate_up = torch.full_like(case.gate_up, 0.125)
    case = dataclasses.replace(case, x=ones, gate_up=gate_up, clamp=2.0)  # gate and up are 64
    got = run_both(make_buffer(case), case)
    assert bool((got["dx"] == 0).all())
    assert bool((got["dw1"] == 0).all())
    assert float(got["dw2"].norm()) > 0


def test_dy_of_zero() -> None:
    case = make_case(200, 6, 3, 512, 256, "masked")
    case.dy.zero_()
    for name, value in run_both(make_buffer(case), case).items():
        assert name == "y" or value is None or bool((value == 0).all()), name


def test_routing_weights_of_zero() -> None:
    """No gradient but that of the weights themselves."""
    case = make_case(200, 6, 3, 512, 256)
    case.topk_weights.zero_()
    got = run_both(make_buffer(case), case)
    for name in ("y", "dx", "dw1", "dw2"):
        assert bool((got[name] == 0).all()), name
    assert float(got["dtopk"].norm()) > 0


@pytest.mark.parametrize("zero", ["gate_up", "down"])
def test_expert_weights_of_zero(zero: str) -> None:
    case = make_case(200, 6, 3, 512, 256)
    getattr(case, zero).zero_()
    got = run_both(make_buffer(case), case)
    assert bool((got["y"] == 0).all())
    assert bool((got["dtopk"] == 0).all())


def test_weights_are_used_as_given() -> None:
    """Negative ones, large ones, and such that do not add up to 1."""
    case = make_case(200, 6, 3, 512, 256)
    case.topk_weights.mul_(20).sub_(10)
    run_both(make_buffer(case), case)


def test_a_large_row_beside_small_ones() -> None:
    """Rows do not meet: each is as exact as alone."""
    case = make_case(130, 4, 2, 512, 256)
    case.x[7].mul_(64)
    case.dy[90].mul_(1024)
    buffer = make_buffer(case)
    y, got = forward(buffer, case), backward(buffer, case)
    for name, value, want in (("y", y, case.y), ("dx", got["dx"], case.grads.dx)):
        for token in (0, 7, 8, 89, 90, 91):
            check(f"{name}[{token}]", value[token], want[token])


def test_two_buffers_alive() -> None:
    """Calls that alternate, and calls at once on two streams with half of the SMs each."""
    cases = (make_case(TOKENS, 8, 4, 768, 384, "random"), make_case(200, 6, 3, 512, 256, "masked", seed=1))
    buffers = [make_buffer(case) for case in cases]
    for buffer in buffers:
        poison(buffer)
    ys = [forward(buffer, case) for buffer, case in zip(buffers, cases, strict=True)]
    grads = [backward(buffer, case) for buffer, case in reversed(list(zip(buffers, cases, strict=True)))]
    for case, y, got in zip(cases, ys, reversed(grads), strict=True):
        check("y", y, case.y)
        judge_backward(case, got)
    runtime.set_num_sms(torch.cuda.get_device_properties(DEVICE).multi_processor_count // 2)
    streams = [torch.cuda.Stream(DEVICE) for _ in buffers]
    torch.cuda.synchronize()
    results: list[list[Tensor]] = [[], []]
    for _ in range(20):
        for index, (buffer, case, stream) in enumerate(zip(buffers, cases, streams, strict=True)):
            with torch.cuda.stream(stream):
                results[index].append(forward(buffer, case))
    torch.cuda.synchronize()
    for buffer, y, again in zip(buffers, ys, results, strict=True):
        buffer.check()
        assert all(same_bits(value, y) for value in again)


def test_destroy_and_build_again() -> None:
    case = make_case(200, 8, 4, 512, 256)
    for _ in range(3):
        buffer = make_buffer(case)
        run_both(buffer, case)
        buffer.destroy()
