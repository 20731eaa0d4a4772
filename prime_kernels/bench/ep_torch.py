"""Expert parallelism in plain torch: rows travel by all-to-all, both products are ``grouped_mm``.

What a careful user writes without these kernels, and what ``bench ep`` compares them with. The host waits for
the GPU once in each forward, because torch's all-to-all takes its row counts from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .torch_moe import run_experts, sort_entries, weigh_and_sum


class _AllToAll(torch.autograd.Function):
    """Rows to and from every rank of the group; the gradient takes the way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.way_back, ctx.group = (receive, send), group
        return _exchange(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        send, receive = ctx.way_back
        return _exchange(gradient, send, receive, ctx.group), None, None, None


def _exchange(rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), receive, send, group=group)
    return arrived


def _dispatch_rows(x: Tensor, topk_idx: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows sorted by expert, their order, and how many each expert gets: int64 [E]."""
    order, ends = sort_entries(topk_idx, num_experts)
    return x.index_select(0, order // topk_idx.shape[1]), order, ends.diff(prepend=ends.new_zeros(1))


def _local_experts(arrived: Tensor, counts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Results of rows that are ordered by (rank, expert), in that order. ``counts``: int64 [R, El]."""
    row = torch.arange(arrived.shape[0], device=arrived.device)
    pieces = torch.searchsorted(counts.reshape(-1).cumsum(0), row, right=True)
    order = (pieces % counts.shape[1]).argsort(stable=True)
    ends = counts.sum(0).cumsum(0).to(torch.int32)
    results = run_experts(arrived.index_select(0, order), ends, gate_up, down)
    return torch.empty_like(results).index_copy(0, order, results)


class AllToAllMoE:
    """The layer over a group; rank r holds the experts [r El, (r + 1) El).

    Args:
        group: the EP group.
        compiled: run what lies between the collectives through ``torch.compile``.
    """

    def __init__(self, group: dist.ProcessGroup, compiled: bool = False) -> None:
        self._group, self._ranks = group, dist.get_world_size(group)

        def part(function: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function, fullgraph=True, dynamic=False) if compiled else function

        self._dispatch, self._experts = part(_dispatch_rows), part(_local_experts)
        self._combine = part(weigh_and_sum)

    def __call__(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        """y [T, H], differentiable; collective. Arguments as :func:`.torch_moe.torch_moe`'s, of this rank.

        topk_idx: global experts. gate_up, down: this rank's El experts.
        """
        rows, order, counts = self._dispatch(x, topk_idx, self._ranks * gate_up.shape[0])
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self._group)
        by_rank = torch.stack([counts, received]).view(2, self._ranks, -1).sum(2)
        send, receive = by_rank.tolist()
        arrived = _AllToAll.apply(rows, send, receive, self._group)
        results = self._experts(arrived, received.view(self._ranks, -1), gate_up, down)
        returned = _AllToAll.apply(results, receive, send, self._group)
        return self._combine(returned, order, topk_weights)
