"""What the kernels round or quantise, as switches of the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

Round = Callable[[Tensor], Tensor]


def keep(value: Tensor) -> Tensor:
    """The rounding that changes nothing."""
    return value


def _through(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype).to(value.dtype)


def through(dtype: torch.dtype) -> Round:
    """A rounding to ``dtype`` and back, for a point where a kernel stores that type."""
    return partial(_through, dtype=dtype)


@dataclass(frozen=True)
class Rounding:
    """What a kernel rounds or quantises. Each point maps a matrix [rows, columns] to the same shape.

    Points inside an expert are given all rows of that expert at once, in pool order, so that quantisers
    with scales over rows (per column, per tile) can stand here as well.

    Attributes:
        x, dy: rows as dispatched.
        gate_up_weight, down_weight: one expert's weights.
        gate_up: the L1 GEMM's output [g | u].
        act: a, operand of the down GEMM (forward only: the backward's operand is w * a).
        out_row: an expert's output row as pushed to the source rank; the weighted sum follows.
        y: the sum.
        dact: da' as it leaves the down dgrad. The BF16 kernel keeps it, and a, in fp32 registers, where
            dtopk and dz are computed.
        dz: operand of the gate/up dgrad.
        x_wgrad, dy_wgrad, dz_wgrad, weighted_act: operands of the weight gradients (applied to the
            dispatched x and dy, to the unrounded dz, and to w * a).
        dx_row: an expert's dx row as pushed; the sum follows.
        dx: the sum.
    """

    x: Round = keep
    dy: Round = keep
    gate_up_weight: Round = keep
    down_weight: Round = keep
    gate_up: Round = keep
    act: Round = keep
    out_row: Round = keep
    y: Round = keep
    dact: Round = keep
    dz: Round = keep
    x_wgrad: Round = keep
    dy_wgrad: Round = keep
    dz_wgrad: Round = keep
    weighted_act: Round = keep
    dx_row: Round = keep
    dx: Round = keep


_BF16 = through(torch.bfloat16)

NO_ROUNDING = Rounding()
# The points at which the BF16 kernels store a bf16 value. Sums, da' and dtopk stay fp32.
BF16_ROUNDING = Rounding(
    gate_up=_BF16, act=_BF16, out_row=_BF16, y=_BF16,
    dz=_BF16, dz_wgrad=_BF16, weighted_act=_BF16, dx_row=_BF16, dx=_BF16,
)  # fmt: skip
