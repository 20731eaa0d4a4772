"""The route plan: which row of which expert every (token, slot) becomes.

Rows of an expert are ordered by (rank, token, slot). The order follows from the routing alone, no atomic
decides it, so every sum over rows is taken in the same order on every run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NO_EXPERT = -1


@dataclass(frozen=True)
class RoutePlan:
    """The routed rows of one rank's tokens, sorted by (expert, token, slot).

    Attributes:
        token: int64 [M], token of each row.
        slot: int64 [M], top-k slot of each row.
        expert: int64 [M], global expert of each row, ascending.
        counts: int64 [E], rows of each expert.
        offsets: int64 [E+1], first row of each expert; the last entry is M.
    """

    token: Tensor
    slot: Tensor
    expert: Tensor
    counts: Tensor
    offsets: Tensor

    @property
    def num_rows(self) -> int:
        """M, the routed rows: slots that are not -1."""
        return self.token.numel()


def make_route_plan(topk_idx: Tensor, num_experts: int) -> RoutePlan:
    """Build the plan of one rank by a stable histogram, scan and scatter.

    Args:
        topk_idx: integer [n, K] global expert ids; -1 marks a slot without an expert.
        num_experts: E, experts over all ranks.

    Raises:
        ValueError: when an id is neither -1 nor in [0, E).
    """
    num_topk = topk_idx.shape[1]
    flat = topk_idx.reshape(-1).to(torch.int64)
    if flat.numel():
        low, high = int(flat.min()), int(flat.max())
        if low < NO_EXPERT or high >= num_experts:
            bad = low if low < NO_EXPERT else high
            raise ValueError(
                f"topk_idx holds {bad}, needs values in [0, {num_experts}) or -1 for no expert; "
                "check the router's expert count"
            )
    routed = torch.nonzero(flat != NO_EXPERT).squeeze(1)
    experts = flat[routed]
    order = torch.argsort(experts, stable=True)
    rows = routed[order]
    counts = torch.bincount(experts, minlength=num_experts)
    return RoutePlan(
        token=rows // num_topk,
        slot=rows % num_topk,
        expert=experts[order],
        counts=counts,
        offsets=torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
    )


def pool_order(recv_counts: Tensor) -> Tensor:
    """Order the rows a rank received, (rank, expert, ...), by (expert, rank, ...).

    Args:
        recv_counts: int64 [R, El], rows received from each rank for each local expert.

    Returns:
        int64 [rows]: pool row i is received row ``result[i]``. The sort is stable, so rows of one expert
        keep their (rank, token, slot) order.
    """
    num_ranks, num_local = recv_counts.shape
    expert = torch.arange(num_local, device=recv_counts.device).repeat(num_ranks)
    return torch.argsort(torch.repeat_interleave(expert, recv_counts.reshape(-1)), stable=True)
