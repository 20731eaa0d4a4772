"""The expert layer as a careful user writes it in plain torch: what the kernels are compared with.

Entries are sorted by expert, both products are ``grouped_mm``, and results return through one slot per
(token, k), summed over k. Nothing waits for the host, so it can be compiled as one graph and captured.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _grouped_mm(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    # Public since torch 2.10.
    function = getattr(F, "grouped_mm", None) or torch._grouped_mm
    return function(rows, matrices, offs=ends)


def sort_entries(topk_idx: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The order that sorts the T*K entries by expert, int64 [T*K], and where each expert's end, [E]."""
    experts, order = topk_idx.reshape(-1).sort(stable=True)
    every_expert = torch.arange(num_experts, device=topk_idx.device)
    return order, torch.searchsorted(experts, every_expert, right=True)


def run_experts(rows: Tensor, ends: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """down(silu(gate(row)) * up(row)) of [N, H] rows sorted by expert; ``ends``: int32 [E]."""
    gate, up = _grouped_mm(rows, gate_up.transpose(1, 2), ends).chunk(2, dim=-1)
    return _grouped_mm(F.silu(gate) * up, down.transpose(1, 2), ends)


def weigh_and_sum(results: Tensor, order: Tensor, topk_weights: Tensor) -> Tensor:
    """y [T, H] of the results [T*K, H] of all entries in the order of :func:`sort_entries`."""
    weights = topk_weights.reshape(-1).index_select(0, order).to(results.dtype)
    results = results * weights.unsqueeze(1)
    slots = torch.empty_like(results).index_copy(0, order, results)
    return slots.view(*topk_weights.shape, -1).sum(1)


def torch_moe(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """y = sum over k of weight[t, k] * down(silu(gate(x)) * up(x)) of expert topk_idx[t, k]; differentiable.

    Args:
        x: bf16 [T, H].
        topk_idx: int64 [T, K], every entry an expert.
        topk_weights: [T, K].
        gate_up: bf16 [E, 2I, H], gate rows first. down: bf16 [E, H, I].

    Returns:
        bf16 [T, H].
    """
    order, ends = sort_entries(topk_idx, gate_up.shape[0])
    rows = x.index_select(0, order // topk_idx.shape[1])
    results = run_experts(rows, ends.to(torch.int32), gate_up, down)
    return weigh_and_sum(results, order, topk_weights)
