"""The BF16 Mega MoE functions: validation, then the buffer's backend."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import reference, validation
from ._dropin import upstream_attribute
from .ep import plan_over_group
from .reference import BF16_ROUNDING, NO_ROUNDING, Experts, LocalTransport, Transport, WeightGrad
from .routing import RoutePlan, make_route_plan
from .symm import UPSTREAM_MMA_TYPE, SymmBuffer

_FORWARD, _BACKWARD = "mega_moe_bf16", "mega_moe_bf16_backward"


def bf16_mega_moe(
    y: Tensor,
    l1_weights: Tensor,
    l2_weights: Tensor,
    sym_buffer: SymmBuffer,
    shared_l1_weights: Tensor | None = None,
    shared_l2_weights: Tensor | None = None,
    cumulative_local_expert_recv_stats: Tensor | None = None,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
    l1_natural_layout: bool = True,
) -> None:
    """Mixture-of-experts MLP over the ranks of the buffer's group: dispatch, L1, SwiGLU, L2, combine.

    ``y_t = sum_k w_tk down_e(silu(min(g, c)) * clamp(u, -c, c))`` with [g | u] = x_t W13_e^T.
    Staged before, in ``sym_buffer``: x[:n], topk_idx[:n] (-1: no expert) and topk_weights[:n], where n is the
    row count of y, may differ between ranks and may be 0. Collective over the group.

    Args:
        y: bf16 [n, H], overwritten.
        l1_weights: bf16 [El, 2I, H], rows [gate | up]. Only the last dim has to be contiguous.
        l2_weights: bf16 [El, H, I]. Only the last dim has to be contiguous.
        sym_buffer: the staging buffer. With "f32xf32" or "f64xf64" every bf16 here is fp32 or fp64.
        shared_l1_weights, shared_l2_weights: [2Is, H] and [H, Is] of a shared expert, added with weight 1.
            The SM90 backend adds its fp32 output to the bf16 sum of the routed experts: y is rounded twice.
        cumulative_local_expert_recv_stats: int32 [El]; the rows each local expert received are added to it.
        activation: "swiglu".
        activation_clamp: c, None for no clamp.
        fast_math: the kernels may use approximate exp and division. The reference is exact either way. The
            SM90 kernels are the same either way: their sigmoid is off by at most a quarter of the rounding
            of the bf16 activation it goes into.
        l1_natural_layout: False when the gate and up rows of the L1 weights (the shared one's too) alternate
            in groups of 8. The SM90 backend then copies them into natural order at each call, into memory
            that the buffer keeps; weights in natural layout are never copied.

    Raises:
        ValueError: a tensor or argument outside its limits.
        RuntimeError: more tokens than the buffer is sized for, a destroyed buffer, a peer that does not come.
    """
    call = _Call(
        l1_weights, l2_weights, sym_buffer, shared_l1_weights, shared_l2_weights,
        activation, activation_clamp, fast_math, l1_natural_layout,
    )  # fmt: skip
    _forward(call, y, cumulative_local_expert_recv_stats)


def forward_keeping_z(
    y: Tensor, l1_weights: Tensor, l2_weights: Tensor, sym_buffer: SymmBuffer,
    shared_l1_weights: Tensor | None, shared_l2_weights: Tensor | None, activation_clamp: float | None,
    rows: int | None,
) -> Tensor:  # fmt: skip
    """:func:`bf16_mega_moe` that also returns z, gate and up of the rows that the routed experts received.

    Args:
        rows: of z. None: as many as this rank received, which only the reference backend does. Else the
            buffer's ``pool_rows``; the reference zeroes those that it has no use for.

    Returns:
        z [rows, 2I] in the buffer's data type, for :func:`backward_from_z`. Where rounding would carry a
        value across the clamp, it is the neighbour on the right side.
    """
    call = _Call(
        l1_weights, l2_weights, sym_buffer, shared_l1_weights, shared_l2_weights,
        activation_clamp=activation_clamp,
    )  # fmt: skip
    z = _forward(call, y, keep_z=True, z_rows=rows)
    assert z is not None
    return z


@dataclass(frozen=True)
class _Call:
    """What both directions take, by the public functions' names."""

    l1_weights: Tensor
    l2_weights: Tensor
    sym_buffer: SymmBuffer
    shared_l1_weights: Tensor | None
    shared_l2_weights: Tensor | None
    activation: str = "swiglu"
    activation_clamp: float | None = None
    fast_math: bool = True
    l1_natural_layout: bool = True

    def check(self, **natural_layouts: bool) -> int | None:
        """Refuse what is outside its limits; ``natural_layouts`` are those of the weight gradients.

        Returns:
            Is of the shared expert, None without one.
        """
        buffer = self.sym_buffer
        validation.check_buffer(buffer)
        validation.check_activation(self.activation)
        validation.check_clamp(self.activation_clamp)
        validation.check_weights(self.l1_weights, self.l2_weights, buffer)
        shared_inter = validation.check_shared_weights(self.shared_l1_weights, self.shared_l2_weights, buffer)
        for argument, natural in {"l1_natural_layout": self.l1_natural_layout, **natural_layouts}.items():
            if not natural:
                validation.check_interleaved(buffer.intermediate_hidden, argument)
                if shared_inter is not None:
                    validation.check_interleaved(shared_inter, argument)
        return shared_inter

    def kernel_arguments(self) -> dict[str, Any]:
        """By name; without the activation, of which one is left after :meth:`check`."""
        arguments = dict(vars(self))
        del arguments["activation"]
        return arguments

    def experts(self) -> tuple[Experts, Experts | None]:
        """The weights as the reference takes them: routed and shared experts."""
        rounding = BF16_ROUNDING if self.sym_buffer.mma_type == "bf16xbf16" else NO_ROUNDING
        shared_l1, shared_l2 = self.shared_l1_weights, self.shared_l2_weights
        shared = None if shared_l1 is None or shared_l2 is None else (shared_l1, shared_l2)
        clamp, interleaved = self.activation_clamp, not self.l1_natural_layout
        return (
            Experts(self.l1_weights, self.l2_weights, clamp, rounding, interleaved),
            reference.shared_experts(shared, clamp, rounding, interleaved),
        )


def _forward(
    call: _Call, y: Tensor, stats: Tensor | None = None, *, keep_z: bool = False, z_rows: int | None = None
) -> Tensor | None:
    buffer = call.sym_buffer
    call.check()
    num_tokens = validation.check_rows("y", y, buffer)
    validation.check_output("y", y, buffer)
    validation.check_stats(stats, buffer)
    if z_rows not in (None, buffer.pool_rows):
        raise ValueError(f"z is to have {z_rows} rows, this buffer takes {buffer.pool_rows} rows; pass that")
    if buffer.backend != "reference":
        z = _empty_z(buffer, buffer.pool_rows) if keep_z else None
        _kernel(buffer, _FORWARD).forward(
            y=y, cumulative_local_expert_recv_stats=stats, z=z, **call.kernel_arguments()
        )
        return z
    with torch.no_grad():
        x, topk_idx, topk_weights, plan, transport = _staged(buffer, num_tokens)
        z = None
        if keep_z:
            received = sum(transport.local_counts())
            z = _empty_z(buffer, received if z_rows is None else z_rows)
            z[received:].zero_()
        y.copy_(reference.run_forward(x, topk_idx, topk_weights, plan, transport, *call.experts(), z))
        if stats is not None:
            stats += torch.tensor(transport.local_counts(), dtype=torch.int32, device=y.device)
    return z


def bf16_mega_moe_backward(
    dx: Tensor,
    dw1: Tensor | None,
    dw2: Tensor | None,
    dtopk: Tensor,
    dy: Tensor,
    l1_weights: Tensor,
    l2_weights: Tensor,
    sym_buffer: SymmBuffer,
    shared_l1_weights: Tensor | None = None,
    shared_l2_weights: Tensor | None = None,
    shared_dw1_weights: Tensor | None = None,
    shared_dw2_weights: Tensor | None = None,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
    dw_natural_layout: bool = True,
    l1_natural_layout: bool = True,
    accumulate: bool = False,
) -> None:
    """Gradients of :func:`bf16_mega_moe`; x and its routing are staged again before, nothing else is kept.

    Every output is overwritten, whatever its memory held: exact zeros in the dW of an expert without rows, in
    dtopk of a slot without expert, in dx of a token without expert. Collective over the group.

    Args:
        dx: bf16 [n, H], output.
        dw1: bf16 or fp32 [El, 2I, H], output; None skips the work (frozen experts).
        dw2: bf16 or fp32 [El, H, I], output; None skips the work.
        dtopk: fp32 [n, K], output.
        dy: bf16 [n, H].
        l1_weights, l2_weights, sym_buffer: as in forward. With "f32xf32" or "f64xf64" every bf16 here is fp32
            or fp64, and dtopk and dW of "f64xf64" are fp64.
        shared_l1_weights, shared_l2_weights: as in forward.
        shared_dw1_weights, shared_dw2_weights: [2Is, H] and [H, Is] outputs, of this rank's tokens alone;
            None skips the work.
        activation, activation_clamp, fast_math, l1_natural_layout: as in forward.
        dw_natural_layout: False writes the rows of dw1 (and shared_dw1) with gate and up alternating in
            groups of 8.
        accumulate: add into the weight gradients, which must be fp32 then, instead of overwriting them.

    Raises:
        ValueError: a tensor or argument outside its limits; ``accumulate`` with bf16 dW.
        RuntimeError: more tokens than the buffer is sized for, a destroyed buffer, a peer that does not come.
    """
    call = _Call(
        l1_weights, l2_weights, sym_buffer, shared_l1_weights, shared_l2_weights,
        activation, activation_clamp, fast_math, l1_natural_layout,
    )  # fmt: skip
    outputs = _Outputs(
        dx, dw1, dw2, dtopk, shared_dw1_weights, shared_dw2_weights, accumulate, dw_natural_layout
    )
    _backward(call, outputs, dy)


def backward_from_z(
    dx: Tensor, dw1: Tensor | None, dw2: Tensor | None, dtopk: Tensor, dy: Tensor,
    l1_weights: Tensor, l2_weights: Tensor, sym_buffer: SymmBuffer,
    shared_l1_weights: Tensor | None, shared_l2_weights: Tensor | None,
    shared_dw1_weights: Tensor | None, shared_dw2_weights: Tensor | None,
    activation_clamp: float | None, accumulate: bool, z: Tensor,
) -> None:  # fmt: skip
    """:func:`bf16_mega_moe_backward` with the ``z`` of :func:`forward_keeping_z` instead of a gate/up GEMM.

    The same x and routing as for that forward have to be staged, on all ranks. The shared expert, for which
    nothing is kept, recomputes its own gate and up.

    Raises:
        ValueError: also a ``z`` that the forward of this buffer and routing can't have kept.
    """
    call = _Call(
        l1_weights, l2_weights, sym_buffer, shared_l1_weights, shared_l2_weights,
        activation_clamp=activation_clamp,
    )  # fmt: skip
    outputs = _Outputs(dx, dw1, dw2, dtopk, shared_dw1_weights, shared_dw2_weights, accumulate)
    _backward(call, outputs, dy, z)


@dataclass(frozen=True)
class _Outputs:
    """What a backward writes, by the public function's names."""

    dx: Tensor
    dw1: Tensor | None
    dw2: Tensor | None
    dtopk: Tensor
    shared_dw1_weights: Tensor | None
    shared_dw2_weights: Tensor | None
    accumulate: bool
    dw_natural_layout: bool = True

    def check(self, num_tokens: int, shared_inter: int | None, buffer: SymmBuffer) -> None:
        """Refuse what is outside its limits."""
        validation.check_token_grads(self.dx, self.dtopk, num_tokens, buffer)
        validation.check_weight_grads(self.dw1, self.dw2, buffer, self.accumulate)
        validation.check_shared_weight_grads(
            self.shared_dw1_weights, self.shared_dw2_weights, shared_inter, buffer, self.accumulate
        )

    def weight_grads(self) -> tuple[WeightGrad, WeightGrad]:
        """Those of the routed experts, as the reference takes them."""
        return self._pair(self.dw1, self.dw2)

    def shared_weight_grads(self) -> tuple[WeightGrad, WeightGrad]:
        """Those of the shared expert, as the reference takes them."""
        dw1, dw2 = self.shared_dw1_weights, self.shared_dw2_weights
        return self._pair(
            None if dw1 is None else dw1.unsqueeze(0), None if dw2 is None else dw2.unsqueeze(0)
        )

    def _pair(self, dw1: Tensor | None, dw2: Tensor | None) -> tuple[WeightGrad, WeightGrad]:
        return WeightGrad(dw1, self.accumulate, not self.dw_natural_layout), WeightGrad(dw2, self.accumulate)


def _backward(call: _Call, outputs: _Outputs, dy: Tensor, z: Tensor | None = None) -> None:
    buffer = call.sym_buffer
    shared_inter = call.check(dw_natural_layout=outputs.dw_natural_layout)
    num_tokens = validation.check_rows("dy", dy, buffer)
    outputs.check(num_tokens, shared_inter, buffer)
    if buffer.backend != "reference":
        if z is not None:
            validation.check_kept_z(z, buffer.pool_rows, buffer)
        _kernel(buffer, _BACKWARD).backward(dy=dy, z=z, **vars(outputs), **call.kernel_arguments())
        return
    with torch.no_grad():
        x, topk_idx, topk_weights, plan, transport = _staged(buffer, num_tokens)
        experts, shared = call.experts()
        if z is not None:
            validation.check_kept_z(z, sum(transport.local_counts()), buffer)
        dx, dtopk = reference.run_backward(
            dy, x, topk_idx, topk_weights, plan, transport, experts, *outputs.weight_grads(),
            shared, *outputs.shared_weight_grads(), z,
        )  # fmt: skip
        outputs.dx.copy_(dx)
        outputs.dtopk.copy_(dtopk)


def transform_weights_for_mega_moe(
    l1_weights: Any, l2_weights: Any, activation: str = "swiglu", mma_type: str = UPSTREAM_MMA_TYPE
) -> tuple[Any, Any]:
    """Bring weights with rows [gate | up] into the layout the BF16 functions read: the same one, so no copy.

    Clients that call this before :func:`bf16_mega_moe` and train the weights in place stay right. Clients
    that hold gate and up rows interleaved in groups of 8 pass ``l1_natural_layout=False`` instead
    (``prime_kernels.reference.interleave_gate_up`` makes that layout).

    Args:
        l1_weights: [E, 2I, H] or a shared expert's [2I, H]. Pairs (weights, scales) are quantised weights of
            upstream's types: they go to the installed ``deep_gemm``.
        l2_weights: [E, H, I] or [H, I], or a pair.
        activation: "swiglu" (upstream's too, for pairs).
        mma_type: the type of a pair; not read for tensors.

    Raises:
        ValueError: the shapes do not belong together, an unknown activation.
        ImportError: pairs, and no ``deep_gemm`` is installed.
    """
    if isinstance(l1_weights, tuple):
        transform: Any = upstream_attribute("transform_weights_for_mega_moe", "mega")
        return transform(l1_weights, l2_weights, activation, mma_type)
    validation.check_activation(activation)
    validation.check_weight_pair(l1_weights, l2_weights)
    return l1_weights, l2_weights


def _kernel(buffer: SymmBuffer, name: str) -> ModuleType:
    """A kernel's module, whose function ``forward`` or ``backward`` takes the checked arguments by name.

    The buffer keeps it, because asking the registry looks at the file system and every call comes here.
    """
    from . import registry

    if name not in buffer.kernels:
        buffer.kernels[name] = registry.load(name)
    return buffer.kernels[name]


def _empty_z(buffer: SymmBuffer, rows: int) -> Tensor:
    return torch.empty(rows, 2 * buffer.intermediate_hidden, dtype=buffer.x.dtype, device=buffer.x.device)


def _staged(buffer: SymmBuffer, num_tokens: int) -> tuple[Tensor, Tensor, Tensor, RoutePlan, Transport]:
    """This call's inputs, read from the buffer, with their route plan and transport (collective)."""
    topk_idx = buffer.topk_idx[:num_tokens]
    transport: Transport
    if buffer.group is None:
        plan = make_route_plan(topk_idx, buffer.num_experts)
        transport = LocalTransport(plan)
    else:
        plan, transport = plan_over_group(buffer.group, topk_idx, buffer.num_experts)
    return buffer.x[:num_tokens], topk_idx, buffer.topk_weights[:num_tokens], plan, transport
