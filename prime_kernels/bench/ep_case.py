"""The load that ``bench ep`` measures: one rank's share of a layer over R ranks, and the same load alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..models import model_shape
from .layer_case import BF16_BYTES, LayerSize, LayerTensors, choose_experts, layer_size, make_tensors

# Rows of H that a (token, slot) on another rank sends over links: x there and the result back; in the
# backward x and dy there, dx back. The kernels and torch's all-to-all send the same.
ROWS_OVER_LINKS = {"forward": 2, "backward": 3}


@dataclass(frozen=True)
class EpSize:
    """A layer over ``ranks`` ranks. ``alone``: its share of one rank, whose experts see the same rows."""

    alone: LayerSize
    ranks: int

    @property
    def experts(self) -> int:
        """E, over all ranks."""
        return self.alone.experts * self.ranks

    @property
    def name(self) -> str:
        """Model and tokens per rank."""
        return f"{self.alone.model}, T {self.alone.tokens}"

    def flops(self, direction: str) -> int:
        """Of one rank, without recomputation."""
        return self.alone.forward_flops if direction == "forward" else self.alone.backward_flops

    def sent_bytes(self, direction: str) -> int:
        """Bytes that each rank sends to others when all experts are loaded equally; it receives as many."""
        remote_rows = self.alone.rows * (self.ranks - 1) // self.ranks
        return ROWS_OVER_LINKS[direction] * remote_rows * self.alone.hidden * BF16_BYTES


def ep_sizes(models: Sequence[str], tokens: Sequence[int], ranks: int) -> list[EpSize]:
    """Every model with every number of tokens per rank.

    Raises:
        ValueError: sizes the kernels cannot take, ranks that cannot share a model's experts, or so many that
            a token's K experts are more than one rank holds (then one rank has no equal load).
    """
    sizes = []
    for model in models:
        shape = model_shape(model)
        local = shape.experts_per_rank(ranks)
        if local < shape.top_k:
            raise ValueError(
                f"{shape.name} has {local} experts on each of {ranks} ranks and routes a token to "
                f"{shape.top_k}: one rank alone has no equal load; use at most "
                f"{shape.num_experts // shape.top_k} ranks"
            )
        sizes += [EpSize(layer_size(model, count, local), ranks) for count in tokens]
    return sizes


@dataclass(frozen=True)
class EpTensors:
    """This rank's inputs: routed over all ranks' experts, and over its own alone. All else is shared."""

    over_ranks: LayerTensors
    alone: LayerTensors


def make_ep_tensors(size: EpSize, routing: str, device: torch.device) -> EpTensors:
    """Random data from torch's global generator, which each rank seeds differently.

    ``routing`` "even": every expert gets the same rows, from every rank, in both cases. "random": drawn
    uniformly.
    """
    alone = make_tensors(size.alone, routing, device)
    everywhere: Tensor = choose_experts(replace(size.alone, experts=size.experts), routing, device)
    return EpTensors(replace(alone, topk_idx=everywhere), alone)
