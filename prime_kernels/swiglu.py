"""SwiGLU in both directions, and the two layouts of the gate and up rows that feed it, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

# Gate and up rows of the interleaved layout alternate in groups of this many rows.
INTERLEAVE = 8


def interleave_gate_up(weight: Tensor) -> Tensor:
    """Rows [gate | up] -> gate and up alternating in groups of 8. [..., 2I, H] -> [..., 2I, H], a copy."""
    half_groups = weight.shape[-2] // (2 * INTERLEAVE)
    return weight.unflatten(-2, (2, half_groups, INTERLEAVE)).transpose(-4, -3).flatten(-4, -2)


def deinterleave_gate_up(weight: Tensor) -> Tensor:
    """The inverse of :func:`interleave_gate_up`."""
    half_groups = weight.shape[-2] // (2 * INTERLEAVE)
    return weight.unflatten(-2, (half_groups, 2, INTERLEAVE)).transpose(-4, -3).flatten(-4, -2)


def swiglu(gate_up: Tensor, clamp: float | None) -> Tensor:
    """a = silu(min(g, c)) * clamp(u, -c, c). gate_up [..., 2I] -> [..., I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return gate * torch.sigmoid(gate) * up


def swiglu_backward(
    gate_up: Tensor, dact: Tensor, clamp: float | None, exact_gate_up: Tensor | None = None
) -> Tensor:
    """The gradient of :func:`swiglu` for [g | u]; exactly zero where the clamp binds (g > c, |u| > c).

    Args:
        gate_up: [..., 2I], rounded where the forward rounds it.
        dact: [..., I].
        clamp: c, or None.
        exact_gate_up: ``gate_up`` before it was rounded, if it was. Whether the clamp binds is decided on it:
            rounding moves values across c, and each that crosses switches a whole gradient off or on.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    dgate = dact * up * (sigmoid + silu * (1 - sigmoid))
    dup = dact * silu
    if clamp is not None:
        exact_gate, exact_up = (gate_up if exact_gate_up is None else exact_gate_up).chunk(2, dim=-1)
        dgate = dgate.masked_fill(exact_gate > clamp, 0)
        dup = dup.masked_fill(exact_up.abs() > clamp, 0)
    return torch.cat([dgate, dup], dim=-1)


def kept_gate_up(exact: Tensor, rounded: Tensor, clamp: float | None, dtype: torch.dtype) -> Tensor:
    """[g | u] as a forward keeps it for its backward, which has no ``exact`` to tell where the clamp binds.

    Args:
        exact, rounded: [..., 2I] before and after the forward rounds them.
        clamp: c, or None.
        dtype: of the result.

    Returns:
        ``rounded`` in ``dtype``, or its neighbour where rounding went across c: on the result the clamp binds
        for the same elements as on ``exact``.
    """
    stored = rounded.to(dtype)
    if clamp is None:
        return stored

    def binds(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.cat([gate, up.abs()], dim=-1) > clamp

    outside = binds(exact)
    away = torch.copysign(torch.full_like(stored, torch.inf), stored)
    neighbour = torch.nextafter(stored, torch.where(outside, away, torch.zeros_like(stored)))
    return torch.where(binds(stored.to(exact.dtype)) == outside, stored, neighbour)
