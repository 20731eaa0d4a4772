"""The gradients of a training step against the float64 reference.

One batch goes through the trained model, forward and backward. Around every layer's experts the check keeps
what went in (x, routing, weights, dy) and what came out of the backward (dx, dtopk, dgate_up, ddown), gathers
tokens and experts of all ranks, and computes the same gradients from the same inputs in float64
(`reference.moe_backward`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..reference import moe_backward
from .model import ByteMoE, MoE
from .optim import fp32_gradient
from .parallel import Parallel

KINDS = ("dx", "dtopk", "dgate_up", "ddown")
# Relative Frobenius norm allowed against float64, BF16 (the table of docs: numerics).
BF16_LIMIT = 5e-3


@dataclass(frozen=True)
class GradientCheck:
    """Relative norm |got - reference| / |reference| over all ranks: for each kind, one value per layer."""

    errors: dict[str, list[float]]
    limit: float = BF16_LIMIT

    @property
    def passed(self) -> bool:
        """Whether every layer is within the limit."""
        return all(error <= self.limit for errors in self.errors.values() for error in errors)  # NaN fails

    def line(self) -> str:
        """The verdict in one line, with the worst layer of each kind."""
        worst = []
        for kind, errors in self.errors.items():
            layer = max(range(len(errors)), key=lambda i: (errors[i] != errors[i], errors[i]))
            worst.append(f"{kind} {errors[layer]:.1e} (layer {layer})")
        verdict = "match" if self.passed else "DO NOT MATCH"
        return (
            f"final gradients {verdict} the float64 reference: worst relative norm {', '.join(worst)}; "
            f"limit {self.limit:.0e}"
        )


def relative_norm(got: torch.Tensor, reference: torch.Tensor) -> float:
    """|got - reference| / |reference| in float64; 0 if both are zero, infinite if only the reference is."""
    difference, scale = float((got.double() - reference).norm()), float(reference.norm())
    if scale == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / scale


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def check_layer(moe: MoE, parallel: Parallel) -> dict[str, float]:
    """Judge one layer's experts after a backward with `moe.record` set. Collective; equal on every rank."""
    call = moe.call
    if call is None:
        raise RuntimeError("no forward was recorded; set `record` on the layer before the forward pass")
    gather = parallel.gather
    expected = moe_backward(
        gather(_gradient(call.y)).double(),
        gather(call.x.detach()).double(),
        gather(call.topk_idx),
        gather(call.topk_weights.detach()).double(),
        gather(moe.experts.gate_up.detach()).double(),
        gather(moe.experts.down.detach()).double(),
    )
    return {
        "dx": relative_norm(gather(_gradient(call.x)), expected.dx),
        "dtopk": relative_norm(gather(_gradient(call.topk_weights)), expected.dtopk),
        "dgate_up": relative_norm(gather(fp32_gradient(moe.experts.gate_up)), expected.dgate_up),
        "ddown": relative_norm(gather(fp32_gradient(moe.experts.down)), expected.ddown),
    }


def check_model(model: ByteMoE, parallel: Parallel) -> GradientCheck:
    """Judge every layer after a backward with `record` set on all of them. Collective."""
    errors: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for moe in model.moe_layers():
        for kind, error in check_layer(moe, parallel).items():
            errors[kind].append(error)
    return GradientCheck(errors)
