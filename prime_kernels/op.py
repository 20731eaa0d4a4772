"""The trainable operator :func:`mega_moe`: checks its arguments and calls the ops of ``custom_ops.py``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks import check_tensors
from .custom_ops import NAMESPACE as NAMESPACE
from .custom_ops import WEIGHT_NAMES, forward_keep_z_op, forward_op
from .custom_ops import backward_op as backward_op
from .symm import SymmBuffer
from .validation import DATA_DTYPES, check_keep, wide_dtype

PRECISIONS = ("bf16", "fp8", "fp8_bwd", "mxfp8")


def mega_moe(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    buffer: SymmBuffer,
    precision: str = "bf16",
    activation_clamp: float | None = None,
    shared: tuple[Tensor, Tensor] | None = None,
    keep: str | None = None,
) -> Tensor:
    """Dispatch, experts and combine of a mixture-of-experts layer over the buffer's group, differentiable.

    y_t = sum_k w_tk * down_e(silu(min(g, c)) * clamp(u, -c, c)) for the expert e of each slot, plus the
    shared expert's output (``reference.py`` holds the formulas of both directions).

    Gradients flow to ``x``, ``topk_weights`` and all weights, each only where one is required: a frozen
    weight costs no weight gradient. A weight's gradient has the weight's dtype. Where a weight carries a
    ``main_grad`` attribute (fp32, the weight's shape, contiguous), its gradient is added to that tensor in
    place, in fp32, and autograd is given none for it. There are no gradients of gradients.

    Collective over the group: every rank calls it (and its backward), also a rank with n = 0 tokens, and all
    ranks in the same order.

    With ``keep="z"`` the forward also writes z, gate and up of every row this rank receives for its routed
    experts; autograd saves it, and the backward skips one of its GEMMs: memory until the backward for time.
    z is [C, 2I] in the dtype of x. With the SM90 kernels C is the capacity of the pools,
    ``buffer.pool_rows``: by default room for any routing, R T K rows over R ranks; with
    ``set_pool_capacity_factor(f)``, for buffers built from then on, about f T K rows, and a call that needs
    more is refused. The reference backend keeps the rows received and no more, inside ``torch.compile`` R T K
    rows. Without grad mode nothing is kept.

    Eager activation checkpointing runs the forward again in the backward, and with ``keep="z"`` z lives from
    there on. Selective checkpointing keeps y alone where the policy saves :data:`forward_op`; with
    ``keep="z"`` the op is :data:`forward_keep_z_op`, and y and z are kept. ``torch.compile`` keeps y, and z,
    whatever the policy says: its decision would depend on n, which differs between ranks. Its backend
    ``aot_eager``, unlike inductor, refuses two forwards before the first backward of one weight with
    ``main_grad``.

    Inside ``torch.autocast`` x and the weights are cast to the autocast dtype, as for a matmul, and
    ``topk_weights`` to fp32; ``main_grad`` is that of the weight before the cast. Outside nothing is cast.

    Args:
        x: [n, H] in the buffer's dtype (bf16), in memory of its own, n at most the buffer's tokens per rank.
        topk_idx: [n, K] int64, the global expert of each slot; -1 means none.
        topk_weights: [n, K] fp32, used as given.
        gate_up: [El, 2I, H] bf16, rows [gate | up]. Strided views with a contiguous last dim are not copied.
        down: [El, H, I] bf16, likewise.
        buffer: staging memory, shared by all layers. It must stay alive until the backward has run.
        precision: "bf16". The others of :data:`PRECISIONS` have no kernel in this version.
        activation_clamp: c, or None for plain SwiGLU.
        shared: (shared_gate_up [2Is, H], shared_down [H, Is]) of the shared expert, added with weight 1.
            Their gradients are those of this rank's tokens.
        keep: None, the backward recomputes gate and up from x; or "z", the forward keeps them. Equal on all
            ranks. The shared expert's are always recomputed.

    Returns:
        y: [n, H] in the dtype of x. With an "f64xf64" (or "f32xf32") buffer, which only the reference backend
        runs, fp64 (fp32) takes the place of bf16, and fp64 that of fp32.

    Raises:
        ValueError: wrong dtype, shape, device or stride; unknown precision or ``keep``; an unfit
            ``main_grad``.
        RuntimeError: more tokens than the buffer holds; a precision without a kernel; a dead buffer; inside
            a transform of ``torch.func``; in the backward, ``create_graph=True``.
    """
    _check_precision(precision, getattr(buffer, "mma_type", None))
    if not isinstance(buffer, SymmBuffer):
        # The ops take handles, and another copy of this package counts its own.
        raise ValueError(f"buffer is a {type(buffer).__module__}.{type(buffer).__name__}, needs {SymmBuffer}")
    check_keep(keep)
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "mega_moe has no rules for the transforms of torch.func (grad, vmap, jvp and others); "
            "call it outside of them and use torch.autograd"
        )
    check_tensors(None, x=x, topk_idx=topk_idx, topk_weights=topk_weights, gate_up=gate_up, down=down)
    shared_gate_up, shared_down = _shared_pair(shared, x)
    weights: list[Tensor | None] = [gate_up, down, shared_gate_up, shared_down]
    wide = wide_dtype(buffer.mma_type)
    main_grads = [_main_grad(name, weight, wide) for name, weight in zip(WEIGHT_NAMES, weights, strict=True)]
    device_type = x.device.type
    # On "meta", for shapes alone, there is no autocast.
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        x = _autocast(x, dtype)
        topk_weights = _autocast(topk_weights, torch.float32)
        weights = [None if weight is None else _autocast(weight, dtype) for weight in weights]
    effect = torch.empty(1, dtype=torch.uint8, device=x.device)
    inputs = (x, topk_idx, topk_weights, *weights, *main_grads, buffer.handle, activation_clamp, effect)
    # By grad mode, not by what requires grad: ranks have to agree, and the second may differ between them.
    if keep is None or not torch.is_grad_enabled():
        return forward_op(*inputs)
    y, _ = forward_keep_z_op(*inputs, _z_rows(buffer))
    return y


def _z_rows(buffer: SymmBuffer) -> int | None:
    """Rows of z, or None for those received, which nothing knows before the call.

    To a compiler the latter is a size that data decides ("unbacked"), and inductor (torch 2.13) fails on one
    that goes from a forward to its backward. So it is given a bound, which is a constant of the buffer.
    """
    if buffer.backend == "reference" and not torch.compiler.is_compiling():
        return None
    return buffer.pool_rows


def _shared_pair(shared: Any, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    if shared is None:
        return None, None
    if not isinstance(shared, (tuple, list)) or len(shared) != 2:
        raise ValueError(
            f"shared is a {type(shared).__name__}, needs the pair (shared_gate_up, shared_down), or None"
        )
    if shared[0] is None and shared[1] is None:
        return None, None
    check_tensors(x.device, shared_gate_up=shared[0], shared_down=shared[1])
    return shared[0], shared[1]


def _check_precision(precision: str, mma_type: Any) -> None:
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}; use one of {', '.join(PRECISIONS)}")
    if precision != "bf16":
        raise RuntimeError(f'no kernel for precision "{precision}" is in this version; use precision="bf16"')
    if mma_type not in DATA_DTYPES:
        raise ValueError(
            f'precision "bf16" needs a buffer of mma_type {" or ".join(DATA_DTYPES)}, got {mma_type!r}; '
            "build it with get_symm_buffer_for_mega_moe(..., mma_type=...)"
        )


def _autocast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As autocast treats a matmul's operands: float64 is left alone."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)


def _main_grad(name: str, weight: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The tensor that takes a weight's gradient in place, or None when autograd returns it."""
    if weight is None or not weight.requires_grad:
        return None
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is None:
        return None
    if not isinstance(main_grad, Tensor):
        raise ValueError(f"{name}.main_grad is a {type(main_grad).__name__}, needs a {dtype} tensor or None")
    if (main_grad.dtype, main_grad.shape, main_grad.device) != (dtype, weight.shape, weight.device):
        raise ValueError(
            f"{name}.main_grad is {main_grad.dtype} {tuple(main_grad.shape)} on {main_grad.device}, needs "
            f"{dtype} {tuple(weight.shape)} on {weight.device}; delete the attribute to get {name}.grad"
        )
    if not main_grad.is_contiguous():
        raise ValueError(f"{name}.main_grad has strides {main_grad.stride()}, needs contiguous memory")
    return main_grad
