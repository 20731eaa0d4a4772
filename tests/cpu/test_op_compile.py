"""The op under ``torch.compile(fullgraph=True)``."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from op_helpers import (
    BF16,
    SMALL,
    Inputs,
    assert_all_close,
    assert_close,
    call,
    expected,
    expected_forward,
    make_buffer,
    make_inputs,
    record_calls,
)
from test_op_checkpoint import MODES
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

TOLERANCE = 1e-10


def why_no_inductor(torch_file: str) -> str | None:
    """The reason to skip where torch is `torch_file`, or None. inductor builds C++ for the CPU."""
    if shutil.which("g++") is None:
        return "inductor needs g++"
    folder = Path(torch_file).parent
    if any(character.isspace() for character in str(folder)):
        return f"inductor's linker line breaks at the space in torch's own path, {folder}"
    return None


NO_INDUCTOR = why_no_inductor(torch.__file__)
INDUCTOR = pytest.param(
    "inductor", marks=pytest.mark.skipif(NO_INDUCTOR is not None, reason=NO_INDUCTOR or "")
)
BACKENDS = pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Graphs from an earlier run's cache would be those of an earlier version of the ops."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Tensor], backend: str) -> Callable[..., Tensor]:
    return torch.compile(function, backend=backend, fullgraph=True)


def two_layers(
    first: Inputs, second: Inputs, layer: Callable[..., Tensor], mode: str | None = None
) -> Tensor:
    """Elementwise work around two layers, so that the op's neighbours are fused and reordered."""

    def block(hidden: Tensor, inputs: Inputs) -> Tensor:
        return hidden + layer(replace(inputs, x=hidden.tanh())).sin()

    hidden = first.x * 2
    for inputs in (first, second):
        hidden = block(hidden, inputs) if mode is None else checkpoint(block, hidden, inputs, **MODES[mode])
    return hidden.square()


def all_grads(first: Inputs, second: Inputs) -> list[Tensor | None]:
    return [*first.grads(), *second.grads()[1:]]


@BACKENDS
@pytest.mark.parametrize("mode", [None, "full", "selective"])
def test_two_layers_over_one_buffer(backend: str, mode: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain and checkpointed. y is kept in any case: see the next test."""
    layers = [make_inputs(SMALL, 7, shared=True, seed=seed) for seed in (1, 2)]
    reference = [layer.copy() for layer in layers]
    calls = record_calls(monkeypatch)
    y = compiled(two_layers, backend)(*layers, partial(call, buffer=make_buffer(SMALL)), mode)
    y.sum().backward()
    assert len(calls.forward) == len(calls.backward) == 2
    expected_y = two_layers(*reference, expected_forward)
    expected_y.sum().backward()
    assert_close(y.detach(), expected_y.detach(), TOLERANCE, "y")
    assert_all_close(all_grads(*layers), all_grads(*reference), TOLERANCE)


def recompute_everything(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


@pytest.mark.parametrize("mode", ["full", "selective", "recompute"])
def test_checkpointing_makes_the_same_calls_for_any_token_count(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks have different n. Left alone, the partitioner keeps y where n = 0 and not elsewhere."""
    context_fn = partial(create_selective_checkpoint_contexts, recompute_everything)
    monkeypatch.setitem(MODES, "recompute", {"use_reentrant": False, "context_fn": context_fn})
    calls = record_calls(monkeypatch)
    for num_tokens in (0, 1, 7):
        torch._dynamo.reset()
        calls.forward.clear()
        calls.backward.clear()
        layers = [make_inputs(SMALL, num_tokens, seed=seed) for seed in (1, 2)]
        function = partial(call, buffer=make_buffer(SMALL))
        compiled(two_layers, "aot_eager")(*layers, function, mode).sum().backward()
        assert len(calls.forward) == len(calls.backward) == 2


@BACKENDS
def test_token_counts_and_buffers_vary(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One compiled function over changing n (0 and 1 included) and changing buffers."""
    layer = make_inputs(SMALL, 8)
    buffers = [make_buffer(SMALL), make_buffer(SMALL), make_buffer(SMALL)]
    calls = record_calls(monkeypatch)
    function = compiled(
        lambda inputs, buffer: call(replace(inputs, x=inputs.x.tanh()), buffer).sin(), backend
    )
    for step, num_tokens in enumerate([7, 5, 0, 1, 8, 3]):
        batch = layer.tokens(slice(0, num_tokens))
        layer.gate_up.grad = layer.down.grad = None
        function(batch, buffers[step % 3]).sum().backward()
        # A rank without tokens has to reach both collectives: the call must not be optimised away.
        assert len(calls.forward) == len(calls.backward) == step + 1
        reference = batch.copy()
        expected_forward(replace(reference, x=reference.x.tanh())).sin().sum().backward()
        assert_all_close(batch.grads(), [
            torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in reference.leaves()
        ], TOLERANCE)  # fmt: skip


@BACKENDS
def test_frozen_weights(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_inputs(SMALL, 7)
    layer.gate_up.requires_grad_(False)
    layer.topk_weights.requires_grad_(False)
    calls = record_calls(monkeypatch)
    compiled(partial(call, buffer=make_buffer(SMALL)), backend)(layer).sum().backward()
    assert [out is None for out in calls.backward[0]] == [True, False, True, True]
    assert layer.gate_up.grad is None
    assert layer.topk_weights.grad is None
    dx, _, _, ddown = expected(layer, torch.ones_like(layer.x))[1]
    assert_all_close([layer.x.grad, layer.down.grad], [dx, ddown], TOLERANCE)


@BACKENDS
@pytest.mark.parametrize("needs_dx", [True, False])
def test_main_grad(backend: str, needs_dx: bool) -> None:
    """Several steps add up. Where nothing but main_grad depends on the backward op, it still runs."""
    layer = make_inputs(SMALL, 7)
    for weight in (layer.gate_up, layer.down):
        weight.main_grad = torch.zeros_like(weight)
    layer.x.requires_grad_(needs_dx)
    layer.topk_weights.requires_grad_(needs_dx)
    function = compiled(partial(call, buffer=make_buffer(SMALL)), backend)
    for _ in range(3):
        function(layer).sum().backward()
    grads = expected(layer, torch.ones_like(layer.x))[1]
    assert layer.gate_up.grad is None
    assert layer.down.grad is None
    assert_all_close(
        [layer.gate_up.main_grad, layer.down.main_grad], [3 * grad for grad in grads[2:]], TOLERANCE
    )
    if needs_dx:
        assert_all_close([layer.x.grad], [3 * grads[0]], TOLERANCE)


@BACKENDS
def test_main_grad_with_two_forwards_before_the_first_backward(backend: str) -> None:
    """What mega_moe's docstring says: inductor does it, aot_eager refuses, and neither is ever wrong."""
    layer = make_inputs(SMALL, 8)
    layer.gate_up.main_grad = torch.zeros_like(layer.gate_up)
    function = compiled(partial(call, buffer=make_buffer(SMALL)), backend)
    batches = [layer.tokens(slice(0, 5)), layer.tokens(slice(5, 8))]
    outputs = [function(batch) for batch in batches]
    outputs[0].sum().backward()
    if backend == "aot_eager":
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            outputs[1].sum().backward()
        return
    outputs[1].sum().backward()
    total = sum(expected(batch, torch.ones_like(batch.x))[1][2] for batch in batches)
    assert_close(layer.gate_up.main_grad, total, TOLERANCE)


@BACKENDS
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_autograd(backend: str, mode: Any) -> None:
    layer = make_inputs(SMALL, 7)
    function = compiled(partial(call, buffer=make_buffer(SMALL)), backend)
    with mode():
        y = function(layer)
    assert not y.requires_grad
    assert_close(y, expected(layer, torch.ones_like(layer.x))[0], TOLERANCE)


@BACKENDS
def test_autocast(backend: str) -> None:
    """The casts are part of the graph: same bits as eager."""
    layer = make_inputs(BF16, 7, torch.float32)
    eager = layer.copy()
    buffer = make_buffer(BF16, torch.bfloat16)
    function = compiled(partial(call, buffer=buffer), backend)
    for inputs, forward in ((layer, function), (eager, partial(call, buffer=buffer))):
        with torch.autocast("cpu", torch.bfloat16):
            y = forward(inputs)
        assert y.dtype == torch.bfloat16
        y.sum().backward()
    for grad, same in zip(layer.grads(), eager.grads(), strict=True):
        assert grad.dtype == torch.float32
        assert torch.equal(grad, same)


def test_inductor_is_skipped_where_torch_lies_below_a_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert why_no_inductor("/srv/env/torch/__init__.py") is None
    reason = why_no_inductor("/srv/a folder/torch/__init__.py")
    assert reason is not None
    assert "/srv/a folder/torch" in reason


def test_errors_arrive() -> None:
    function = compiled(partial(call, buffer=make_buffer(SMALL)), "aot_eager")
    with pytest.raises(RuntimeError, match="sized for 8 tokens/rank, got 9"):
        function(make_inputs(SMALL, 9))
    with pytest.raises(ValueError, match=r"topk_idx is torch\.int32"):
        function(replace(make_inputs(SMALL, 7), topk_idx=torch.zeros(7, 2, dtype=torch.int32)))
