"""The custom ops of :func:`~.op.mega_moe`: schemas, implementations, fakes and the autograd formula.

The ops are ``<package>::mega_moe``, ``<package>::mega_moe_keep_z`` (the same forward, which also returns gate
and up for the backward) and ``<package>::mega_moe_backward``, where ``<package>`` is the name this
package was imported under, so that two copies of it live in one process. They take the buffer as its int
handle: to torch they are functions of tensors, with fakes, so ``torch.compile(fullgraph=True)``, activation
checkpointing and FSDP2 treat them like any matmul. Nothing is kept in the buffer between them: the backward
op stages x and its routing again, and z is a tensor of its own.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy

from .bf16 import backward_from_z, bf16_mega_moe, bf16_mega_moe_backward, forward_keeping_z
from .symm import SymmBuffer, lookup_buffer
from .validation import wide_dtype

NAMESPACE = __name__.rpartition(".")[0].replace(".", "_")

# Position of the first weight among the forward ops' arguments; the weights from there on, then as many
# main_grad tensors, then the buffer's handle and the clamp.
_FIRST_WEIGHT = 3
WEIGHT_NAMES = ("gate_up", "down", "shared_gate_up", "shared_down")
_FIRST_MAIN_GRAD = _FIRST_WEIGHT + len(WEIGHT_NAMES)
_FIRST_SETTING = _FIRST_MAIN_GRAD + len(WEIGHT_NAMES)

_INPUTS = (
    "Tensor x, Tensor topk_idx, Tensor topk_weights, "
    "Tensor gate_up, Tensor down, Tensor? shared_gate_up, Tensor? shared_down, "
)
_SETTINGS = "SymInt buffer, float? activation_clamp"

# The forward op takes the main_grad tensors only to hand them to the backward op, which adds to them.
# It writes nothing to `effect`: compilers drop a call that writes nothing and whose results nobody reads. So
# they see a rank without tokens, which would then never reach its peers.
_FORWARD_INPUTS = (
    f"{_INPUTS}Tensor? main_gate_up, Tensor? main_down, "
    f"Tensor? main_shared_gate_up, Tensor? main_shared_down, {_SETTINGS}, Tensor(a!) effect"
)
_FORWARD_SCHEMA = f"({_FORWARD_INPUTS}) -> Tensor"
# An op of its own: the one without z stays free of a second output, and a checkpointing policy, which decides
# by op, decides for y and z together.
_FORWARD_KEEP_Z_SCHEMA = f"({_FORWARD_INPUTS}, SymInt? z_rows) -> (Tensor y, Tensor z)"
_BACKWARD_SCHEMA = (
    f"(Tensor dy, {_INPUTS}Tensor(a!)? main_gate_up, Tensor(b!)? main_down, "
    f"Tensor(c!)? main_shared_gate_up, Tensor(d!)? main_shared_down, {_SETTINGS}, bool[] weight_grads, "
    "Tensor? z=None) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)

# torch.library.custom_op would count every addition to main_grad as a new version of a tensor that autograd
# saved, and then refuse the backward of a later micro-batch (F1 F2 B1 B2 under torch.compile). Nothing reads
# main_grad through autograd, so the ops are defined without that count.
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_library.define(f"mega_moe{_FORWARD_SCHEMA}")
_library.define(f"mega_moe_keep_z{_FORWARD_KEEP_Z_SCHEMA}")
_library.define(f"mega_moe_backward{_BACKWARD_SCHEMA}")

#: The ops, for selective activation checkpointing: saving what a forward op returns (y, or y and z) spares
#: running it again. ``forward_keep_z_op`` is the one that runs with ``keep="z"``.
forward_op = getattr(torch.ops, NAMESPACE).mega_moe.default
forward_keep_z_op = getattr(torch.ops, NAMESPACE).mega_moe_keep_z.default
backward_op = getattr(torch.ops, NAMESPACE).mega_moe_backward.default


def _stage(buffer: SymmBuffer, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> None:
    """Check the inputs of one call and copy them into the buffer, on the current stream."""
    num_tokens = x.shape[0] if x.dim() else 0
    inputs = (
        ("x", x, buffer.x, "H"),
        ("topk_idx", topk_idx, buffer.topk_idx, "K"),
        ("topk_weights", topk_weights, buffer.topk_weights, "K"),
    )
    for name, tensor, region, columns in inputs:
        expected = (num_tokens, region.shape[1])
        if tensor.shape != expected:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, this buffer needs [n, {columns}] = {list(expected)}"
            )
        if tensor.dtype != region.dtype:
            raise ValueError(
                f"{name} is {tensor.dtype}, a buffer of mma_type {buffer.mma_type!r} needs {region.dtype}; "
                f"cast it with {name}.to({region.dtype})"
            )
        if tensor.device != region.device:
            raise ValueError(f"{name} is on {tensor.device}, the buffer on {region.device}; move one of them")
        if num_tokens and tensor.untyped_storage().data_ptr() == region.untyped_storage().data_ptr():
            raise ValueError(
                f"{name} lies in the buffer, which the next call overwrites before the backward reads it; "
                "pass a tensor of its own memory, it is staged for you"
            )
    if num_tokens > buffer.num_max_tokens_per_rank:
        raise RuntimeError(
            f"buffer is sized for {buffer.num_max_tokens_per_rank} tokens/rank, got {num_tokens}; build it "
            f"with num_max_tokens_per_rank >= {num_tokens} on every rank (of MegaMoE and the integrations: "
            "max_tokens_per_rank)"
        )
    for _, tensor, region, _ in inputs:
        region[:num_tokens].copy_(tensor)


@torch.library.impl(_library, "mega_moe", "CompositeExplicitAutograd")
def _forward(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor,
    gate_up: Tensor, down: Tensor, shared_gate_up: Tensor | None, shared_down: Tensor | None,
    main_gate_up: Tensor | None, main_down: Tensor | None,
    main_shared_gate_up: Tensor | None, main_shared_down: Tensor | None,
    buffer: int, activation_clamp: float | None, effect: Tensor,
) -> Tensor:  # fmt: skip
    symm = lookup_buffer(buffer)
    # What was cast is settled by now: the reference must not be cast again inside.
    with torch.autocast(x.device.type, enabled=False):
        _stage(symm, x, topk_idx, topk_weights)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        bf16_mega_moe(
            y, gate_up, down, symm, shared_l1_weights=shared_gate_up, shared_l2_weights=shared_down,
            activation_clamp=activation_clamp,
        )  # fmt: skip
    return y


@torch.library.impl(_library, "mega_moe_keep_z", "CompositeExplicitAutograd")
def _forward_keep_z(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor,
    gate_up: Tensor, down: Tensor, shared_gate_up: Tensor | None, shared_down: Tensor | None,
    main_gate_up: Tensor | None, main_down: Tensor | None,
    main_shared_gate_up: Tensor | None, main_shared_down: Tensor | None,
    buffer: int, activation_clamp: float | None, effect: Tensor, z_rows: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    symm = lookup_buffer(buffer)
    with torch.autocast(x.device.type, enabled=False):
        _stage(symm, x, topk_idx, topk_weights)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        z = forward_keeping_z(y, gate_up, down, symm, shared_gate_up, shared_down, activation_clamp, z_rows)
    return y, z


@torch.library.register_fake(f"{NAMESPACE}::mega_moe", lib=_library)
def _forward_fake(x: Tensor, *_: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.register_fake(f"{NAMESPACE}::mega_moe_keep_z", lib=_library)
def _forward_keep_z_fake(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    gate_up, z_rows = rest[_FIRST_WEIGHT - 1], rest[-1]
    rows = torch.library.get_ctx().new_dynamic_size() if z_rows is None else z_rows
    return _forward_fake(x), torch.empty(rows, gate_up.shape[1], dtype=x.dtype, device=x.device)


@torch.library.impl(_library, "mega_moe_backward", "CompositeExplicitAutograd")
def _backward(
    dy: Tensor, x: Tensor, topk_idx: Tensor, topk_weights: Tensor,
    gate_up: Tensor, down: Tensor, shared_gate_up: Tensor | None, shared_down: Tensor | None,
    main_gate_up: Tensor | None, main_down: Tensor | None,
    main_shared_gate_up: Tensor | None, main_shared_down: Tensor | None,
    buffer: int, activation_clamp: float | None, weight_grads: list[bool], z: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """dx, dtopk and the weights' gradients; empty for each one not asked for or added to main_grad."""
    symm = lookup_buffer(buffer)
    weights = (gate_up, down, shared_gate_up, shared_down)
    main_grads = (main_gate_up, main_down, main_shared_gate_up, main_shared_down)
    # One flag serves all gradients of a call: beside a main_grad the others are added to zeros of its dtype.
    accumulate = any(main is not None for main in main_grads)
    wide = wide_dtype(symm.mma_type) if accumulate else None
    outputs = [
        _gradient_memory(weight, main, wide) if needed and weight is not None else None
        for weight, main, needed in zip(weights, main_grads, weight_grads, strict=True)
    ]
    with torch.autocast(x.device.type, enabled=False):
        _stage(symm, x, topk_idx, topk_weights)
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dtopk = torch.empty(topk_weights.shape, dtype=topk_weights.dtype, device=x.device)
        arguments: dict[str, Any] = {
            "shared_l1_weights": shared_gate_up, "shared_l2_weights": shared_down,
            "shared_dw1_weights": outputs[2], "shared_dw2_weights": outputs[3],
            "activation_clamp": activation_clamp, "accumulate": accumulate,
        }  # fmt: skip
        results = (dx, outputs[0], outputs[1], dtopk)
        if z is None:
            bf16_mega_moe_backward(*results, dy.contiguous(), gate_up, down, symm, **arguments)
        else:
            backward_from_z(*results, dy.contiguous(), gate_up, down, symm, **arguments, z=z)
    returned = [
        x.new_empty(0) if weight is None or output is None or main is not None else output.to(weight.dtype)
        for weight, output, main in zip(weights, outputs, main_grads, strict=True)
    ]
    return dx, dtopk, *returned


def _gradient_memory(weight: Tensor, main_grad: Tensor | None, wide: torch.dtype | None) -> Tensor:
    if main_grad is not None:
        return main_grad.data  # the same memory with a version count of its own, see _library
    if wide is not None:
        return torch.zeros(weight.shape, dtype=wide, device=weight.device)
    return torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)


@torch.library.register_fake(f"{NAMESPACE}::mega_moe_backward", lib=_library)
def _backward_fake(
    dy: Tensor, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    count = len(WEIGHT_NAMES)
    weights, main_grads, (_, _, weight_grads, *_) = rest[:count], rest[count : 2 * count], rest[2 * count :]
    returned = [
        torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        if weight is not None and needed and main is None
        else x.new_empty(0)
        for weight, main, needed in zip(weights, main_grads, weight_grads, strict=True)
    ]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dtopk = torch.empty(topk_weights.shape, dtype=topk_weights.dtype, device=x.device)
    return dx, dtopk, *returned


def _call(operator: Any, inputs: tuple[Any, ...]) -> Any:
    """A forward op below autograd; what is traced of it is marked to be kept."""
    mode = get_proxy_mode()
    nodes = None if mode is None else mode.tracer.graph.nodes
    traced_before = 0 if nodes is None else len(nodes)
    with torch._C._AutoDispatchBelowAutograd():
        outputs = operator(*inputs)
    if nodes is not None:
        # A compiler decides by sizes whether a checkpointed forward runs again in the backward or is
        # kept. With unequal n ranks would decide differently, and one would wait for the other for ever.
        for node in itertools.islice(reversed(nodes), len(nodes) - traced_before):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return outputs


def _save(ctx: Any, inputs: tuple[Any, ...], *kept: Tensor) -> None:
    ctx.save_for_backward(*inputs[:_FIRST_MAIN_GRAD], *kept)
    # Attributes, not saved tensors: an earlier backward may have added to main_grad since.
    ctx.main_grads = inputs[_FIRST_MAIN_GRAD:_FIRST_SETTING]
    ctx.handle, ctx.activation_clamp = inputs[_FIRST_SETTING : _FIRST_SETTING + 2]
    # Holds the buffer until the backward has run. While torch.compile traces, its owner does.
    ctx.buffer = lookup_buffer(ctx.handle) if isinstance(ctx.handle, int) else None


def _gradients(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    """Those of the forward op's arguments; ``dy`` None is zero."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "mega_moe has no second derivative, and a backward with create_graph=True asks for one; "
            "use create_graph=False"
        )
    needed = ctx.needs_input_grad
    weight_grads = [bool(wanted) for wanted in needed[_FIRST_WEIGHT:_FIRST_MAIN_GRAD]]
    saved = ctx.saved_tensors  # once: under checkpointing a second look fails
    inputs, kept = saved[:_FIRST_MAIN_GRAD], saved[_FIRST_MAIN_GRAD:]
    if dy is None:  # not skipped: the peers' backwards wait for this one
        dy = torch.zeros_like(inputs[0])
    dx, dtopk, *dweights = backward_op(
        dy, *inputs, *ctx.main_grads, ctx.handle, ctx.activation_clamp, weight_grads, *kept
    )
    returned = [
        gradient if wanted and main is None else None
        for gradient, wanted, main in zip(dweights, weight_grads, ctx.main_grads, strict=True)
    ]
    no_gradient = (None,) * (len(needed) - _FIRST_MAIN_GRAD)
    return (dx if needed[0] else None, None, dtopk if needed[2] else None, *returned, *no_gradient)


# torch.library.register_autograd would make the same of these, but refuses an op that writes.


class _MegaMoE(torch.autograd.Function):
    """The autograd formula of the forward op."""

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        return _call(forward_op, inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _save(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, dy)


class _MegaMoEKeepZ(torch.autograd.Function):
    """The autograd formula of the forward op that also returns z, which takes no gradient."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        return _call(forward_keep_z_op, inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _, z = output
        ctx.mark_non_differentiable(z)
        # Autograd would fill a tensor of z's size with zeros to stand for its gradient.
        ctx.set_materialize_grads(False)
        _save(ctx, inputs, z)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, dy)


@torch.library.impl(_library, "mega_moe", "Autograd")
def _forward_autograd(*inputs: Any) -> Tensor:
    apply = _MegaMoE.apply if torch.is_grad_enabled() else _MegaMoE.forward
    return apply(*inputs)


@torch.library.impl(_library, "mega_moe_keep_z", "Autograd")
def _forward_keep_z_autograd(*inputs: Any) -> tuple[Tensor, Tensor]:
    apply = _MegaMoEKeepZ.apply if torch.is_grad_enabled() else _MegaMoEKeepZ.forward
    return apply(*inputs)
