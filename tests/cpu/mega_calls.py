"""Calls of the public functions on one rank's share of a problem, with every output poisoned before."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from moe_oracle import Problem
from torch import Tensor

from prime_kernels import SymmBuffer, bf16_mega_moe, bf16_mega_moe_backward

MMA_TYPES = {torch.bfloat16: "bf16xbf16", torch.float32: "f32xf32", torch.float64: "f64xf64"}


@dataclass
class Outputs:
    """One rank's outputs; a weight gradient that was skipped is None."""

    y: Tensor
    dx: Tensor
    dtopk: Tensor
    dw1: Tensor | None
    dw2: Tensor | None
    shared_dw1: Tensor | None
    shared_dw2: Tensor | None
    stats: Tensor

    def named(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if value is not None}


def make_buffer(
    problem: Problem, tokens: int, group: Any = None, base: SymmBuffer | None = None
) -> SymmBuffer:
    """A buffer for ``tokens`` tokens a rank of this problem."""
    experts, hidden, inter = problem.down.shape
    return SymmBuffer(
        group, experts, tokens, problem.topk_idx.shape[1], hidden, inter,
        mma_type=MMA_TYPES[problem.x.dtype], base=base,
    )  # fmt: skip


def poison_buffer(buffer: SymmBuffer) -> None:
    """Fill what earlier calls could have left: NaN data, routing to every expert, infinite weights."""
    buffer.x.fill_(math.nan)
    buffer.topk_idx.copy_(torch.arange(buffer.topk_idx.numel()).view_as(buffer.topk_idx) % buffer.num_experts)
    buffer.topk_weights.fill_(math.inf)


def stage(buffer: SymmBuffer, problem: Problem, tokens: slice) -> int:
    """Stage these tokens into a poisoned buffer; returns n."""
    poison_buffer(buffer)
    x = problem.x[tokens]
    count = x.shape[0]
    buffer.x[:count].copy_(x)
    buffer.topk_idx[:count].copy_(problem.topk_idx[tokens])
    buffer.topk_weights[:count].copy_(problem.topk_weights[tokens])
    return count


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, math.nan, dtype=dtype)


def forward(
    problem: Problem,
    buffer: SymmBuffer,
    tokens: slice = slice(None),
    experts: slice = slice(None),
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Stage, then run forward on ``tokens`` with the weights of ``experts``; returns y, receive counts."""
    count = stage(buffer, problem, tokens)
    y = poisoned(count, problem.x.shape[1], dtype=problem.x.dtype)
    stats = torch.full((buffer.num_local_experts,), 100, dtype=torch.int32)
    shared = problem.shared or (None, None)
    bf16_mega_moe(
        y, problem.gate_up[experts], problem.down[experts], buffer, *shared,
        cumulative_local_expert_recv_stats=stats, activation_clamp=problem.clamp, **options,
    )  # fmt: skip
    return y, stats - 100


def backward(
    problem: Problem, buffer: SymmBuffer, tokens: slice = slice(None), experts: slice = slice(None), *,
    dw_dtype: torch.dtype | None = None, skip: tuple[str, ...] = (), **options: Any,
) -> dict[str, Tensor | None]:  # fmt: skip
    """Stage, then run backward; returns the outputs by name. ``skip``: weight gradients to pass as None."""
    count = stage(buffer, problem, tokens)
    dtype, wide = problem.x.dtype, problem.topk_weights.dtype
    gate_up, down = problem.gate_up[experts], problem.down[experts]
    shapes = {"dw1": gate_up.shape, "dw2": down.shape}
    if problem.shared is not None:
        shapes |= {"shared_dw1": problem.shared[0].shape, "shared_dw2": problem.shared[1].shape}
    grads = {
        name: poisoned(*shapes[name], dtype=dw_dtype or dtype)
        if name in shapes and name not in skip
        else None
        for name in ("dw1", "dw2", "shared_dw1", "shared_dw2")
    }
    dx, dtopk = poisoned(*problem.x[tokens].shape, dtype=dtype), poisoned(count, buffer.num_topk, dtype=wide)
    bf16_mega_moe_backward(
        dx, grads["dw1"], grads["dw2"], dtopk, problem.dy[tokens], gate_up, down, buffer,
        *(problem.shared or (None, None)), grads["shared_dw1"], grads["shared_dw2"],
        activation_clamp=problem.clamp, **options,
    )  # fmt: skip
    return {"dx": dx, "dtopk": dtopk, **grads}


def run_both(
    problem: Problem,
    buffer: SymmBuffer,
    tokens: slice = slice(None),
    experts: slice = slice(None),
    **options: Any,
) -> Outputs:
    """Forward and backward of one rank."""
    y, stats = forward(problem, buffer, tokens, experts)
    return Outputs(y=y, stats=stats, **backward(problem, buffer, tokens, experts, **options))
