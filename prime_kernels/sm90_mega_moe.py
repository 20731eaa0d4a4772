"""The SM90 backend of the BF16 functions: from checked arguments to launches on the current stream.

Nothing here waits for the device, so calls can be captured in a CUDA graph (after one call outside of a
capture, which compiles and allocates). Weights in natural layout are read where they are; outputs y, dx and
dtopk with gaps between their rows are written through a temporary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import shared_expert
from .sm90 import Sm90Rank
from .sm90_memory import Sm90Memory
from .swiglu import INTERLEAVE
from .symm import SymmBuffer
from .validation import COPY_BYTES, check_tma_access


@torch.no_grad()
def forward(
    *, y: Tensor, l1_weights: Tensor, l2_weights: Tensor, sym_buffer: SymmBuffer,
    shared_l1_weights: Tensor | None, shared_l2_weights: Tensor | None,
    cumulative_local_expert_recv_stats: Tensor | None, activation_clamp: float | None,
    fast_math: bool, l1_natural_layout: bool, z: Tensor | None = None,
) -> None:  # fmt: skip
    """:func:`.bf16.bf16_mega_moe` with checked arguments. ``fast_math`` makes no difference, see there.

    ``z``: bf16 [C, 2I] that takes gate and up of the routed experts, or None.
    """
    rank, memory = _state(sym_buffer)
    memory.begin_call(rank)
    l1 = _natural_weights(memory, l1_weights, l1_natural_layout)
    check_tma_access("l2_weights", l2_weights)
    target = _packed(y)
    rank.forward(target, l1, l2_weights, activation_clamp, cumulative_local_expert_recv_stats, z)
    if shared_l1_weights is not None and shared_l2_weights is not None and y.shape[0]:
        x = sym_buffer.x[: y.shape[0]]
        shared_expert.add_forward(
            target, x, shared_l1_weights, shared_l2_weights, activation_clamp, not l1_natural_layout
        )
    _unpack(y, target)
    memory.end_call()


@torch.no_grad()
def backward(
    *, dx: Tensor, dw1: Tensor | None, dw2: Tensor | None, dtopk: Tensor, dy: Tensor,
    l1_weights: Tensor, l2_weights: Tensor, sym_buffer: SymmBuffer,
    shared_l1_weights: Tensor | None, shared_l2_weights: Tensor | None,
    shared_dw1_weights: Tensor | None, shared_dw2_weights: Tensor | None, activation_clamp: float | None,
    fast_math: bool, dw_natural_layout: bool, l1_natural_layout: bool, accumulate: bool,
    z: Tensor | None = None,
) -> None:  # fmt: skip
    """:func:`.bf16.bf16_mega_moe_backward` with checked arguments.

    ``z``: what the forward of the same routing kept, or None. The shared expert recomputes in any case.
    """
    rank, memory = _state(sym_buffer)
    memory.begin_call(rank)
    l1 = _natural_weights(memory, l1_weights, l1_natural_layout)
    check_tma_access("l2_weights", l2_weights)
    check_tma_access("dw2", dw2)
    natural_dw1 = dw1
    if dw1 is not None and not dw_natural_layout:
        natural_dw1 = memory.scratch("dw1 in natural layout", tuple(dw1.shape), dw1.dtype)
        if accumulate:
            natural_dw1.zero_()
    check_tma_access("dw1", natural_dw1)
    num_tokens = dy.shape[0]
    rank.dy[:num_tokens].copy_(dy)
    dx_target, dtopk_target = _packed(dx), _packed(dtopk)
    rank.backward(dx_target, natural_dw1, dw2, dtopk_target, l1, l2_weights, activation_clamp, accumulate, z)
    if dw1 is not None and natural_dw1 is not None and not dw_natural_layout:
        alternating = dw1.unflatten(1, (-1, 2, INTERLEAVE))
        halves = natural_dw1.unflatten(1, (2, -1, INTERLEAVE)).transpose(1, 2)
        if accumulate:
            alternating.add_(halves)
        else:
            alternating.copy_(halves)
    if shared_l1_weights is not None and shared_l2_weights is not None:
        shared_expert.add_backward(
            dx_target, shared_dw1_weights, shared_dw2_weights,
            rank.dy[:num_tokens], sym_buffer.x[:num_tokens],
            shared_l1_weights, shared_l2_weights, activation_clamp, accumulate,
            not l1_natural_layout, not dw_natural_layout,
        )  # fmt: skip
    _unpack(dx, dx_target)
    _unpack(dtopk, dtopk_target)
    memory.end_call()


def _state(buffer: SymmBuffer) -> tuple[Sm90Rank, Sm90Memory]:
    assert buffer.sm90 is not None
    assert buffer.sm90_memory is not None
    return buffer.sm90, buffer.sm90_memory


def _natural_weights(memory: Sm90Memory, l1: Tensor, natural: bool) -> Tensor:
    """[El, 2I, H] with rows [gate | up]: ``l1``, or a copy of interleaved weights in the buffer's scratch."""
    if natural:
        check_tma_access("l1_weights", l1)
        return l1
    scratch = memory.scratch("l1_weights in natural layout", tuple(l1.shape), l1.dtype)
    halves = scratch.unflatten(1, (2, -1, INTERLEAVE))
    halves.copy_(l1.unflatten(1, (-1, 2, INTERLEAVE)).transpose(1, 2))
    return scratch


def _packed(output: Tensor) -> Tensor:
    """``output``, or memory for it where the kernels can't write it directly."""
    if output.is_contiguous() and output.data_ptr() % COPY_BYTES == 0:
        return output
    return torch.empty(output.shape, dtype=output.dtype, device=output.device)


def _unpack(output: Tensor, target: Tensor) -> None:
    if target is not output:
        output.copy_(target)
