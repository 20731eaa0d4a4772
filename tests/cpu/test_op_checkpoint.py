"""Activation checkpointing of the op: full (the forward runs again) and selective (only y is kept)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from op_helpers import (
    SMALL,
    Inputs,
    assert_all_close,
    call,
    expected_forward,
    make_buffer,
    make_inputs,
    record_calls,
)
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from prime_kernels import SymmBuffer, op

TOLERANCE = 1e-10


def keep_y(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator is op.forward_op else CheckpointPolicy.PREFER_RECOMPUTE


MODES = {
    "full": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, keep_y),
    },
}


def block(hidden: Tensor, layer: Inputs, function: Any) -> Tensor:
    """Work before and after the experts, so that x is recomputed and y is needed for recomputing."""
    return hidden + function(replace(layer, x=hidden.tanh())).sin()


def model(layers: list[Inputs], function: Any, mode: str | None = None) -> Tensor:
    hidden = layers[0].x
    for layer in layers:
        if mode is None:
            hidden = block(hidden, layer, function)
        else:
            hidden = checkpoint(block, hidden, layer, function, **MODES[mode])
    return hidden.square().sum()


def layer_grads(layers: list[Inputs]) -> list[Tensor]:
    return [layers[0].x.grad, *(grad for layer in layers for grad in layer.grads()[1:])]


def poisoned(buffer: SymmBuffer, inputs: Inputs) -> Tensor:
    """The op, with nothing but its own staging valid in the buffer before and after."""
    for value in (buffer.x, buffer.topk_weights):
        value.fill_(float("nan"))
    y = call(inputs, buffer)
    for value in (buffer.x, buffer.topk_weights):
        value.fill_(float("nan"))
    return y


@pytest.mark.parametrize(("mode", "forwards_per_layer"), [("full", 2), ("reentrant", 2), ("selective", 1)])
def test_two_layers_over_one_buffer(
    monkeypatch: pytest.MonkeyPatch, mode: str, forwards_per_layer: int
) -> None:
    layers = [make_inputs(SMALL, 7, shared=True, seed=1), make_inputs(SMALL, 7, shared=True, seed=2)]
    reference = [layer.copy() for layer in layers]
    calls = record_calls(monkeypatch)
    loss = model(layers, partial(poisoned, make_buffer(SMALL)), mode)
    assert len(calls.forward) == 2
    loss.backward()
    assert len(calls.forward) == 2 * forwards_per_layer
    assert len(calls.backward) == 2
    model(reference, expected_forward).backward()
    assert_all_close(layer_grads(layers), layer_grads(reference), TOLERANCE)


@pytest.mark.parametrize("mode", list(MODES))
def test_main_grad_is_added_once(mode: str) -> None:
    layer = make_inputs(SMALL, 7)
    reference = layer.copy()
    layer.gate_up.main_grad = torch.zeros_like(layer.gate_up)
    for _ in range(2):
        model([layer], partial(call, buffer=make_buffer(SMALL)), mode).backward()
    model([reference], expected_forward).backward()
    assert layer.gate_up.grad is None
    assert_all_close([layer.gate_up.main_grad], [2 * reference.gate_up.grad], TOLERANCE)


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_few_tokens(num_tokens: int) -> None:
    for mode in MODES:
        layer = make_inputs(SMALL, num_tokens)
        model([layer], partial(call, buffer=make_buffer(SMALL)), mode).backward()
        reference = layer.copy()
        model([reference], expected_forward).backward()
        assert_all_close(layer_grads([layer]), layer_grads([reference]), TOLERANCE)
