"""The shared expert on the GPU: dense SwiGLU of this rank's own tokens, by torch's GEMMs on the same stream.

It needs no exchange. Products come in fp32, and bf16 roundings are where the kernels have theirs: z, a, dz
and the operands of the weight gradients. Only the sum differs: the kernels have rounded the routed experts'
part to bf16 already, and it is rounded again after this part is added.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .swiglu import deinterleave_gate_up, interleave_gate_up, swiglu, swiglu_backward


def add_forward(
    y: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, clamp: float | None, interleaved: bool
) -> None:
    """y += down(SwiGLU(x gate_up^T)). y, x: bf16 [n, H]; gate_up [2Is, H]; down [H, Is]."""
    z = _product(x, _natural(gate_up, interleaved).t()).bfloat16()
    act = swiglu(z.float(), clamp).bfloat16()
    _add(y, _product(act, down.t()))


def add_backward(
    dx: Tensor, dgate_up: Tensor | None, ddown: Tensor | None, dy: Tensor, x: Tensor,
    gate_up: Tensor, down: Tensor,
    clamp: float | None, accumulate: bool, interleaved: bool, grad_interleaved: bool,
) -> None:  # fmt: skip
    """dx += the shared expert's part; its weight gradients, of this rank's tokens, overwritten or added to.

    Args:
        dx, dy, x: bf16 [n, H].
        dgate_up, ddown: bf16 or fp32 [2Is, H] and [H, Is]; None skips the work.
        interleaved, grad_interleaved: rows of gate_up and of dgate_up alternate in groups of 8.
    """
    gate_up = _natural(gate_up, interleaved)
    exact_z = _product(x, gate_up.t())
    z = exact_z.bfloat16().float()
    dz = swiglu_backward(z, _product(dy, down), clamp, exact_z).bfloat16()
    _add(dx, _product(dz, gate_up))
    if dgate_up is not None:
        gradient = _product(dz.t(), x)
        _store(dgate_up, interleave_gate_up(gradient) if grad_interleaved else gradient, accumulate)
    if ddown is not None:
        _store(ddown, _product(dy.t(), swiglu(z, clamp).bfloat16()), accumulate)


def _natural(gate_up: Tensor, interleaved: bool) -> Tensor:
    return deinterleave_gate_up(gate_up) if interleaved else gate_up


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b of bf16 matrices in fp32."""
    if a.numel() == 0:  # no tokens
        return torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _add(total: Tensor, part: Tensor) -> None:
    total.copy_(total.float() + part)


def _store(out: Tensor, value: Tensor, accumulate: bool) -> None:
    if accumulate:
        out.add_(value)
    else:
        out.copy_(value)
