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
    tokens, topk = topk_idx.shape
    experts, order = topk_idx.reshape(-1).sort(stable=True)
    every_expert = torch.arange(gate_up.shape[0], device=x.device)
    ends = torch.searchsorted(experts, every_expert, right=True).to(torch.int32)
    rows = x.index_select(0, order // topk)
    gate, up = _grouped_mm(rows, gate_up.transpose(1, 2), ends).chunk(2, dim=-1)
    result = _grouped_mm(F.silu(gate) * up, down.transpose(1, 2), ends)
    weights = topk_weights.reshape(-1).index_select(0, order).to(x.dtype)
    result = result * weights.unsqueeze(1)
    slots = torch.empty_like(result).index_copy(0, order, result)
    return slots.view(tokens, topk, -1).sum(1)
