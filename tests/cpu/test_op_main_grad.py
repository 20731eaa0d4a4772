"""Gradient accumulation in a weight's fp32 ``main_grad``."""

from __future__ import annotations

import pytest
import torch
from op_helpers import (
    BF16,
    BF16_TOLERANCE,
    SMALL,
    Inputs,
    assert_all_close,
    assert_close,
    backward,
    call,
    expected,
    make_buffer,
    make_inputs,
    record_calls,
)
from torch import Tensor

EXACT = 1e-12


def weights(inputs: Inputs) -> list[Tensor]:
    return [inputs.gate_up, inputs.down, *(inputs.shared or ())]


def add_main_grads(inputs: Inputs, value: float = 0.0) -> None:
    for weight in weights(inputs):
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        weight.main_grad = torch.full(weight.shape, value, dtype=wide)


def test_micro_batches_add_up_in_fp32() -> None:
    """64 BF16 micro-batches: a bf16 accumulator would have lost the digits that fp32 keeps."""
    inputs = make_inputs(BF16, 16, torch.bfloat16, shared=True)
    add_main_grads(inputs)
    buffer = make_buffer(BF16, torch.bfloat16)
    totals = [torch.zeros(weight.shape, dtype=torch.float64) for weight in weights(inputs)]
    for step in range(64):
        batch = inputs.tokens(slice(step % 13, step % 13 + 3))
        dy = torch.randn(3, BF16.hidden, generator=torch.Generator().manual_seed(step)).bfloat16()
        backward(batch, buffer, dy)
        assert batch.x.grad is not None
        assert batch.topk_weights.grad is not None
        for total, grad in zip(totals, expected(batch, dy)[1][2:], strict=True):
            total += grad
    for weight, total in zip(weights(inputs), totals, strict=True):
        assert weight.grad is None
        assert_close(weight.main_grad, total, BF16_TOLERANCE)


def test_it_adds_in_place_without_a_gradient_tensor_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(SMALL, 7, shared=True)
    add_main_grads(inputs, value=3.0)
    calls = record_calls(monkeypatch)
    mains = [weight.main_grad for weight in weights(inputs)]
    dy = torch.randn_like(inputs.x)
    backward(inputs, make_buffer(SMALL), dy)
    assert [out.data_ptr() for out in calls.backward[0]] == [main.data_ptr() for main in mains]
    for weight, main, grad in zip(weights(inputs), mains, expected(inputs, dy)[1][2:], strict=True):
        assert weight.main_grad is main
        assert_close(main, grad + 3, EXACT)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forwards_before_the_first_backward(order: tuple[int, int]) -> None:
    """F1 F2 B1 B2 and F1 F2 B2 B1 of one layer: the first backward does not invalidate the second."""
    inputs = make_inputs(SMALL, 8)
    add_main_grads(inputs)
    buffer = make_buffer(SMALL)
    batches = [inputs.tokens(slice(0, 5)), inputs.tokens(slice(5, 8))]
    outputs = [call(batch, buffer) for batch in batches]
    for index in order:
        outputs[index].sum().backward()
    grads = [expected(batch, torch.ones_like(batch.x))[1] for batch in batches]
    assert_close(inputs.gate_up.main_grad, grads[0][2] + grads[1][2], EXACT)
    assert_close(inputs.down.main_grad, grads[0][3] + grads[1][3], EXACT)


def test_one_weight_with_and_one_without() -> None:
    """The other weight's gradient comes from autograd, in its own dtype."""
    inputs = make_inputs(BF16, 7, torch.bfloat16, shared=True)
    inputs.down.main_grad = torch.zeros(inputs.down.shape)
    dy = torch.randn(7, BF16.hidden).bfloat16()
    backward(inputs, make_buffer(BF16, torch.bfloat16), dy)
    dx, dtopk, dgate_up, ddown, *dshared = inputs.grads()
    assert ddown is None
    assert dgate_up.dtype == torch.bfloat16
    got = [dx, dtopk, dgate_up, inputs.down.main_grad, *dshared]
    assert_all_close(got, expected(inputs, dy)[1], BF16_TOLERANCE)


def test_a_frozen_weight_keeps_its_main_grad(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(SMALL, 7)
    add_main_grads(inputs, value=3.0)
    inputs.gate_up.requires_grad_(False)
    calls = record_calls(monkeypatch)
    backward(inputs, make_buffer(SMALL), torch.ones_like(inputs.x))
    assert calls.backward[0][0] is None
    assert inputs.gate_up.main_grad.eq(3).all()
    assert inputs.down.main_grad.ne(3).any()


def test_none_is_no_main_grad() -> None:
    inputs = make_inputs(SMALL, 7)
    inputs.gate_up.main_grad = None
    backward(inputs, make_buffer(SMALL), torch.ones_like(inputs.x))
    assert inputs.gate_up.grad is not None


def test_autocast_adds_to_the_main_grad_of_the_weight_before_the_cast() -> None:
    inputs = make_inputs(BF16, 7, torch.float32)
    add_main_grads(inputs)
    rounded = inputs.map(lambda leaf: leaf.bfloat16())
    rounded.topk_weights = inputs.topk_weights.detach().clone().requires_grad_()
    dy = torch.randn(7, BF16.hidden).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y = call(inputs, make_buffer(BF16, torch.bfloat16))
    y.backward(dy)
    assert inputs.gate_up.grad is None
    assert_all_close(
        [inputs.gate_up.main_grad, inputs.down.main_grad], expected(rounded, dy)[1][2:], BF16_TOLERANCE
    )


@pytest.mark.parametrize(
    ("main_grad", "message"),
    [
        (torch.zeros(4, 256, 64, dtype=torch.bfloat16), r"gate_up.main_grad is torch.bfloat16 .*float32"),
        (torch.zeros(4, 256, 63), r"\(4, 256, 63\).*\(4, 256, 64\)"),
        (torch.zeros(4, 256, 64, device="meta"), "on meta.*on cpu"),
        (torch.zeros(4, 64, 256).mT, r"strides \(16384, 1, 256\), needs contiguous"),
    ],
)
def test_an_unfit_main_grad(main_grad: Tensor, message: str) -> None:
    inputs = make_inputs(BF16, 7, torch.bfloat16)
    inputs.gate_up.main_grad = main_grad
    with pytest.raises(ValueError, match=message):
        call(inputs, make_buffer(BF16, torch.bfloat16))
