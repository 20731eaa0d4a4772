"""Mega MoE as anyone would write it first: loops over tokens and slots, gradients by autograd.

It shares nothing with the package, whose explicit backward formulas are tested against it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Problem:
    """One global problem, float64 on the CPU unless converted."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    gate_up: Tensor
    down: Tensor
    dy: Tensor
    clamp: float | None = None
    shared: tuple[Tensor, Tensor] | None = None

    def arguments(self) -> tuple[Tensor, ...]:
        return (self.x, self.topk_idx, self.topk_weights, self.gate_up, self.down)

    def to(self, dtype: torch.dtype) -> Problem:
        """The same problem in another dtype (top-k weights at least fp32)."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return Problem(
            self.x.to(dtype), self.topk_idx, self.topk_weights.to(wide), self.gate_up.to(dtype),
            self.down.to(dtype), self.dy.to(dtype), self.clamp,
            None if self.shared is None else (self.shared[0].to(dtype), self.shared[1].to(dtype)),
        )  # fmt: skip


@dataclass
class Answer:
    """y and the gradient of sum(y * dy) for every input; shared ones only where there is a shared expert."""

    y: Tensor
    dx: Tensor
    dtopk: Tensor
    dgate_up: Tensor
    ddown: Tensor
    shared: tuple[Tensor, Tensor] | None = field(default=None)


def _expert(x: Tensor, gate_up: Tensor, down: Tensor, clamp: float | None) -> Tensor:
    inter = down.shape[1]
    gate, up = gate_up[:inter] @ x, gate_up[inter:] @ x
    if clamp is not None:
        bound = torch.full_like(gate, clamp)
        gate, up = torch.minimum(gate, bound), torch.maximum(torch.minimum(up, bound), -bound)
    return down @ (gate / (1 + torch.exp(-gate)) * up)


def solve(problem: Problem) -> Answer:
    """Run the problem in float64. Ties of the clamp have measure zero and do not occur in random problems."""
    problem = problem.to(torch.float64)
    leaves = [problem.x, problem.topk_weights, problem.gate_up, problem.down, *(problem.shared or ())]
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    x, weights, gate_up, down, *shared = leaves
    rows = []
    for token in range(x.shape[0]):
        row = x[token] * 0
        for slot in range(problem.topk_idx.shape[1]):
            expert = int(problem.topk_idx[token, slot])
            if expert >= 0:
                row = row + weights[token, slot] * _expert(
                    x[token], gate_up[expert], down[expert], problem.clamp
                )
        if shared:
            row = row + _expert(x[token], shared[0], shared[1], problem.clamp)
        rows.append(row)
    y = torch.stack(rows) if rows else x * 0
    grads = torch.autograd.grad((y * problem.dy).sum(), leaves, allow_unused=True)
    full = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, grads, strict=True)]
    return Answer(y.detach(), *full[:4], (full[4], full[5]) if shared else None)


def make_problem(
    tokens: int, experts: int, topk: int, hidden: int, inter: int, *, seed: int = 0,
    topk_idx: Tensor | None = None, clamp: float | None = None, shared_inter: int | None = None,
) -> Problem:  # fmt: skip
    """A random problem whose outputs are O(1). Without ``topk_idx``: uniform experts, some slots masked."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale

    if topk_idx is None:
        topk_idx = torch.randint(-1, experts, (tokens, topk), generator=generator)
    weights = torch.rand(tokens, topk, generator=generator, dtype=torch.float64) + 0.1
    shared = None
    if shared_inter is not None:
        shared = (
            normal(2 * shared_inter, hidden, scale=hidden**-0.5),
            normal(hidden, shared_inter, scale=shared_inter**-0.5),
        )
    return Problem(
        normal(tokens, hidden), topk_idx, weights, normal(experts, 2 * inter, hidden, scale=hidden**-0.5),
        normal(experts, hidden, inter, scale=2 * inter**-0.5), normal(tokens, hidden), clamp, shared,
    )  # fmt: skip


def relative_error(got: Tensor, want: Tensor) -> float:
    """Frobenius norm of the difference over that of ``want``; for a zero ``want`` the norm itself."""
    got, want = got.double(), want.double()
    norm = float(want.norm())
    return float((got - want).norm()) / (norm if norm > 0 else 1.0)
