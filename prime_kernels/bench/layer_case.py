"""The layer that ``bench layer`` measures: its sizes, its FLOPs and random data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..gemm_heuristics import GROUP_ALIGNMENT
from ..models import model_shape
from ..sizes import SIZE_LIMITS
from .gemm import LayerLoad

ROUTINGS = ("random", "even")
FORWARD_FLOPS, BACKWARD_FLOPS, RECOMPUTE_FLOPS = 6, 12, 4  # times rows * H * I
FLOP_CONVENTION = (
    "forward 6 n K H I, backward 12 n K H I (the recomputation of z, 4 n K H I more, is not counted)"
)
BF16_BYTES, FP32_BYTES = 2, 4


@dataclass(frozen=True)
class LayerSize:
    """One rank's load: T tokens with K experts each, over the E experts that the rank holds."""

    model: str
    hidden: int
    intermediate: int
    experts: int
    topk: int
    tokens: int

    @property
    def rows(self) -> int:
        """(token, slot) pairs."""
        return self.tokens * self.topk

    @property
    def forward_flops(self) -> int:
        """Of both products."""
        return FORWARD_FLOPS * self.rows * self.hidden * self.intermediate

    @property
    def backward_flops(self) -> int:
        """Of the four products, without recomputation."""
        return BACKWARD_FLOPS * self.rows * self.hidden * self.intermediate

    @property
    def recompute_flops(self) -> int:
        """Of z, done again in the backward."""
        return RECOMPUTE_FLOPS * self.rows * self.hidden * self.intermediate

    def compulsory_bytes(self, dw_bytes: int) -> dict[str, int]:
        """What each direction must move at least: inputs read once, outputs written once."""
        weights = 3 * self.experts * self.hidden * self.intermediate
        tokens = self.tokens * self.hidden * BF16_BYTES
        return {
            "forward": weights * BF16_BYTES + 2 * tokens,
            "backward": weights * (BF16_BYTES + dw_bytes) + 3 * tokens,
        }

    def gemm_load(self) -> LayerLoad:
        """The layer for :mod:`.gemm`: equal rows for every expert, padded to DeepGEMM's blocks."""
        per_expert = -(-self.rows // (self.experts * GROUP_ALIGNMENT)) * GROUP_ALIGNMENT
        return LayerLoad(self.model, self.hidden, self.intermediate, self.experts, per_expert * self.experts)


def layer_size(model: str, tokens: int, experts: int) -> LayerSize:
    """The load of one rank that holds ``experts`` of the model's experts.

    Raises:
        ValueError: unknown model, or sizes the kernels or balanced routing cannot take.
    """
    shape = model_shape(model)
    if tokens < 1:
        raise ValueError(f"--tokens is {tokens}; needs at least 1")
    if not shape.top_k <= experts <= shape.num_experts:
        raise ValueError(
            f"--experts-per-rank is {experts}; {shape.name} routes a token to {shape.top_k} of "
            f"{shape.num_experts} experts, so balanced routing to one rank needs {shape.top_k} to "
            f"{shape.num_experts}"
        )
    limits = SIZE_LIMITS["sm90"]
    if not (limits.hidden.takes(shape.hidden) and limits.intermediate.takes(shape.intermediate)):
        raise ValueError(
            f"{shape.name} has H {shape.hidden} and I {shape.intermediate}; the kernels need "
            f"H {limits.hidden}, I {limits.intermediate}"
        )
    return LayerSize(shape.name, shape.hidden, shape.intermediate, experts, shape.top_k, tokens)


def check_routing(size: LayerSize, routing: str) -> None:
    """Raises ValueError for "even" and rows that the experts cannot share equally."""
    if routing == "even" and size.rows % size.experts:
        raise ValueError(
            f"even routing needs rows that {size.experts} experts can share equally, {size.tokens} tokens "
            f"make {size.rows}; choose another number of tokens or random routing"
        )


@dataclass(frozen=True)
class LayerTensors:
    """Inputs of both directions.

    x, dy: bf16 [T, H]. topk_idx: int64 [T, K]. topk_weights: fp32 [T, K].
    gate_up: bf16 [E, 2I, H]. down: bf16 [E, H, I].
    """

    x: Tensor
    dy: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    gate_up: Tensor
    down: Tensor


def choose_experts(size: LayerSize, routing: str, device: torch.device) -> Tensor:
    """int64 [T, K], the experts of a token all different.

    "random": drawn uniformly, so loads scatter a little. "even": exactly the same load for every expert.

    Raises:
        ValueError: as :func:`check_routing`.
    """
    check_routing(size, routing)
    if routing == "random":
        scores = torch.rand(size.tokens, size.experts, device=device)
        return scores.argsort(dim=1)[:, : size.topk].contiguous()
    experts = torch.randperm(size.experts, device=device)
    turns = torch.arange(size.rows, device=device).view(size.tokens, size.topk) % size.experts
    return experts[turns][torch.randperm(size.tokens, device=device)].contiguous()


def make_tensors(size: LayerSize, routing: str, device: torch.device) -> LayerTensors:
    """Random data from torch's global generator; outputs are O(1)."""

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, device=device).mul_(scale).to(torch.bfloat16)

    hidden, intermediate = size.hidden, size.intermediate
    return LayerTensors(
        x=normal(size.tokens, hidden),
        dy=normal(size.tokens, hidden),
        topk_idx=choose_experts(size, routing, device),
        topk_weights=torch.rand(size.tokens, size.topk, device=device),
        gate_up=normal(size.experts, 2 * intermediate, hidden, scale=hidden**-0.5),
        down=normal(size.experts, hidden, intermediate, scale=intermediate**-0.5),
    )
