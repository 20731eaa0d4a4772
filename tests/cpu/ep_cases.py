"""Global problems split over ranks, and what every rank's outputs have to be."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from gloo_world import GlooWorld
from mega_calls import Outputs, make_buffer, run_both
from moe_oracle import Problem, make_problem, relative_error, solve
from torch import Tensor

from prime_kernels import reference

TOKENS = 12  # the buffer's, per rank
FLOAT64_TOLERANCE = 1e-12


@dataclass(frozen=True)
class Case:
    """A global problem and how many of its tokens each rank brings. ``routing`` names a function below."""

    counts: tuple[int, ...]
    local_experts: int = 3  # 3, 6, 12 and 24 experts in all: not a power of two
    topk: int = 3
    hidden: int = 8
    inter: int = 8
    routing: str = "uniform"
    dtype: torch.dtype = torch.float64
    clamp: float | None = None
    shared_inter: int | None = None
    seed: int = 0

    @property
    def experts(self) -> int:
        return self.local_experts * len(self.counts)

    def tokens_of(self, rank: int) -> slice:
        start = sum(self.counts[:rank])
        return slice(start, start + self.counts[rank])

    def experts_of(self, rank: int) -> slice:
        return slice(rank * self.local_experts, (rank + 1) * self.local_experts)

    def problem(self) -> Problem:
        tokens = sum(self.counts)
        generator = torch.Generator().manual_seed(self.seed + 1)
        topk_idx = ROUTINGS[self.routing](tokens, self.experts, self.topk, generator)
        return make_problem(
            tokens, self.experts, self.topk, self.hidden, self.inter, seed=self.seed, topk_idx=topk_idx,
            clamp=self.clamp, shared_inter=self.shared_inter,
        ).to(self.dtype)  # fmt: skip


def _uniform(tokens: int, experts: int, topk: int, generator: torch.Generator) -> Tensor:
    return torch.randint(-1, experts, (tokens, topk), generator=generator)


def _zipf(tokens: int, experts: int, topk: int, generator: torch.Generator) -> Tensor:
    popularity = 1.0 / torch.arange(1, experts + 1) ** 1.2
    return torch.multinomial(popularity.expand(max(tokens, 1), -1), topk, generator=generator)[:tokens]


ROUTINGS = {
    "uniform": _uniform,
    "zipf": _zipf,
    "to the last expert": lambda n, e, k, g: torch.full((n, k), e - 1),
    "to the first expert": lambda n, e, k, g: torch.zeros(n, k, dtype=torch.int64),
    "nothing": lambda n, e, k, g: torch.full((n, k), -1),
    "even experts, first slot masked": lambda n, e, k, g: torch.cat(
        [torch.full((n, 1), -1), 2 * torch.randint(0, (e + 1) // 2, (n, k - 1), generator=g)], 1
    ),
}


def run_rank(rank: int, size: int, case: Case, options: dict[str, Any]) -> Outputs:
    """One rank's forward and backward."""
    problem = case.problem()
    buffer = make_buffer(problem, TOKENS)
    return run_both(problem, buffer, case.tokens_of(rank), case.experts_of(rank), **options)


def collect(world: GlooWorld, case: Case, **options: Any) -> dict[str, Tensor]:
    """Run a case on all ranks; the outputs as :func:`concatenate` joins them."""
    return concatenate(world.run(run_rank, case, options))


def assert_right(got: dict[str, Tensor], case: Case) -> None:
    """Against autograd over loops and against the one-process reference; exact zeros and counts."""
    problem = case.problem()
    want = solve(problem)
    grads = reference.moe_backward(
        problem.dy, *problem.arguments(), clamp=problem.clamp, shared=problem.shared
    )
    y = reference.moe_forward(*problem.arguments(), clamp=problem.clamp, shared=problem.shared)
    pairs = {
        "y": (want.y, y), "dx": (want.dx, grads.dx), "dtopk": (want.dtopk, grads.dtopk),
        "dw1": (want.dgate_up, grads.dgate_up), "dw2": (want.ddown, grads.ddown),
    }  # fmt: skip
    if want.shared is not None:
        pairs["shared_dw1"] = (want.shared[0], grads.dshared_gate_up)
        pairs["shared_dw2"] = (want.shared[1], grads.dshared_down)
    for name, judges in pairs.items():
        for judge in judges:
            assert got[name].shape == judge.shape
            assert relative_error(got[name], judge) <= FLOAT64_TOLERANCE, name
    routed = problem.topk_idx[problem.topk_idx >= 0]
    counts = torch.bincount(routed, minlength=case.experts)
    assert got["stats"].tolist() == counts.tolist()
    assert (got["dw1"][counts == 0] == 0).all()
    assert (got["dw2"][counts == 0] == 0).all()
    assert (got["dtopk"][problem.topk_idx < 0] == 0).all()


def concatenate(ranks: list[Outputs]) -> dict[str, Tensor]:
    """The ranks' outputs in the order of the global problem; shared weight gradients summed over ranks."""
    outputs = [rank.named() for rank in ranks]
    joined = {}
    for name in outputs[0]:
        parts = [rank[name] for rank in outputs]
        joined[name] = sum(parts) if name.startswith("shared") else torch.cat(parts)
    return joined


def cycle(size: int, *pattern: int) -> tuple[int, ...]:
    return tuple(itertools.islice(itertools.cycle(pattern), size))
