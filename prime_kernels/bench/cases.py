"""The axes of the parity matrix and the inputs of each case.

A case is one point of precision x shape x routing x ranks x variant. Its inputs are a pure function of the
case, so every rank makes its own share and the judge makes all of it without anything being sent between
processes.

Inputs are drawn so that every output is O(1): a small scale hides wrong results behind an absolute tolerance.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

__all__ = [
    "PRECISIONS",
    "ROUTINGS",
    "SHAPES",
    "VARIANTS",
    "Case",
    "Limits",
    "Precision",
    "RankInputs",
    "Routing",
    "Shape",
    "Variant",
    "build_matrix",
    "expert_weights",
    "rank_inputs",
    "shared_weights",
]


@dataclass(frozen=True)
class Limits:
    """Largest relative Frobenius error of each output against the float64 reference."""

    y: float
    dx: float
    dw: float
    dtopk: float

    def of(self, output: str) -> float:
        """The limit of the output called ``output`` (y, dx, dtopk, or any weight gradient)."""
        return {"y": self.y, "dx": self.dx, "dtopk": self.dtopk}.get(output, self.dw)


@dataclass(frozen=True)
class Precision:
    """A precision of the public functions; ``dtype`` is that of x, y and weights."""

    name: str
    mma_type: str
    dtype: torch.dtype
    limits: Limits


@dataclass(frozen=True)
class Shape:
    """Model sizes of a case; ``tokens`` is the most tokens any rank has."""

    name: str
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    tokens: int


@dataclass(frozen=True)
class Routing:
    """How slots choose experts, and how many tokens each rank has.

    ``experts(case, rank, tokens, generator)`` returns int64 [tokens, K] on the generator's device, -1 where
    a slot has no expert; ``tokens(limit, ranks)`` returns the number of tokens of each rank, at most
    ``limit``.
    """

    name: str
    experts: Callable[[Case, int, int, torch.Generator], torch.Tensor]
    tokens: Callable[[int, int], list[int]]
    least_top_k: int = 1


@dataclass(frozen=True)
class Variant:
    """What a case does beside the plain call."""

    name: str
    clamp: float | None = None
    shared: bool = False
    accumulate: bool = False
    dw_dtype: torch.dtype | None = None
    skip_dw1: bool = False
    skip_dw2: bool = False
    natural_layout: bool = True
    strided_weights: bool = False
    zero_dy: bool = False


@dataclass(frozen=True)
class Case:
    """One point of the matrix. ``ranks`` is the size of the expert-parallel group."""

    precision: Precision
    shape: Shape
    routing: Routing
    ranks: int
    variant: Variant

    @property
    def name(self) -> str:
        """The case's name in reports, for example ``bf16-small-zipf-r4-plain``."""
        return (
            f"{self.precision.name}-{self.shape.name}-{self.routing.name}-r{self.ranks}-{self.variant.name}"
        )

    @property
    def tokens_per_rank(self) -> list[int]:
        """Tokens of each rank in this case."""
        return self.routing.tokens(self.shape.tokens, self.ranks)

    @property
    def experts_per_rank(self) -> int:
        """Local experts of a rank."""
        return self.shape.num_experts // self.ranks

    def local_experts(self, rank: int) -> range:
        """The global ids of the experts that ``rank`` holds."""
        return range(rank * self.experts_per_rank, (rank + 1) * self.experts_per_rank)

    @property
    def is_possible(self) -> bool:
        """Whether ranks divide experts, the routing has slots enough, and dW is not narrower than x."""
        dw_dtype = self.variant.dw_dtype or self.precision.dtype
        return (
            self.shape.num_experts % self.ranks == 0
            and self.shape.top_k >= self.routing.least_top_k
            and dw_dtype.itemsize >= self.precision.dtype.itemsize
        )


@dataclass(frozen=True)
class RankInputs:
    """One rank's inputs: x and dy [n, H], topk_idx int64 [n, K], topk_weights [n, K]."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    dy: torch.Tensor


# Relative errors of plain bf16 arithmetic at these shapes are 3e-3 to 4e-3. f32 and f64 exist in the
# reference backend alone; their limits are some hundred ulps, which summation order cannot reach and a
# wrong formula cannot miss.
PRECISIONS = {
    p.name: p
    for p in (
        Precision("bf16", "bf16xbf16", torch.bfloat16, Limits(y=5e-3, dx=5e-3, dw=5e-3, dtopk=5e-3)),
        Precision("f32", "f32xf32", torch.float32, Limits(y=1e-5, dx=1e-5, dw=1e-5, dtopk=1e-5)),
        Precision("f64", "f64xf64", torch.float64, Limits(y=1e-12, dx=1e-12, dw=1e-12, dtopk=1e-12)),
    )
}

SHAPES = {
    s.name: s
    for s in (
        Shape("small", hidden=256, intermediate=128, num_experts=8, top_k=2, tokens=67),
        Shape("odd", hidden=512, intermediate=128, num_experts=24, top_k=5, tokens=29),
        Shape("wide-topk", hidden=256, intermediate=128, num_experts=16, top_k=16, tokens=19),
        Shape("edges", hidden=320, intermediate=192, num_experts=24, top_k=5, tokens=61),
        Shape("qwen3-30b-a3b", hidden=2048, intermediate=768, num_experts=128, top_k=8, tokens=2048),
        Shape("qwen3-235b-a22b", hidden=4096, intermediate=1536, num_experts=128, top_k=8, tokens=1024),
    )
}

VARIANTS = {
    v.name: v
    for v in (
        Variant("plain"),
        Variant("clamp", clamp=0.5),
        Variant("shared", shared=True),
        Variant("accumulate", accumulate=True, dw_dtype=torch.float32),
        Variant("fp32-dw", dw_dtype=torch.float32),
        Variant("frozen-w1", skip_dw1=True),
        Variant("frozen-w2", skip_dw2=True),
        Variant("interleaved", natural_layout=False),
        Variant("strided", strided_weights=True),
        Variant("zero-dy", zero_dy=True),
    )
}

ZIPF_EXPONENT = 1.2
MASKED_SLOTS = 0.3
MASKED_TOKENS = 0.125
# E[a^2] of a = silu(g) * u with g, u ~ N(0, 1), measured; with it W2's scale gives y a standard deviation
# of 1.
SWIGLU_MEAN_SQUARE = 0.356
WEIGHT_LOW, WEIGHT_HIGH = 0.2, 1.0
# Share of router weights that are exactly 0 in the mixed routing.
ZERO_WEIGHTS = 0.25


def _equal(limit: int, ranks: int) -> list[int]:
    return [limit] * ranks


def _unequal(limit: int, ranks: int) -> list[int]:
    shares = itertools.cycle((limit, 1, (2 * limit) // 3, limit - 1, 0))
    return [next(shares) for _ in range(ranks)]


def _zero_ranks(limit: int, ranks: int) -> list[int]:
    """Every second rank has nothing; with one rank the whole group has nothing."""
    return [limit if rank % 2 else 0 for rank in range(ranks)]


def _balanced(case: Case, rank: int, tokens: int, generator: torch.Generator) -> torch.Tensor:
    top_k, experts = case.shape.top_k, case.shape.num_experts
    slots = torch.arange(tokens * top_k, device=generator.device).view(tokens, top_k)
    return (slots + rank) % experts


def _draw(probabilities: torch.Tensor, tokens: int, top_k: int, generator: torch.Generator) -> torch.Tensor:
    if tokens == 0:
        return torch.empty(0, top_k, dtype=torch.int64, device=generator.device)
    return torch.multinomial(probabilities.expand(tokens, -1), top_k, generator=generator)


def _zipf(case: Case, rank: int, tokens: int, generator: torch.Generator) -> torch.Tensor:
    order = torch.arange(1, case.shape.num_experts + 1, device=generator.device, dtype=torch.float32)
    return _draw(order**-ZIPF_EXPONENT, tokens, case.shape.top_k, generator)


def _one_expert(case: Case, rank: int, tokens: int, generator: torch.Generator) -> torch.Tensor:
    idx = torch.full((tokens, case.shape.top_k), -1, dtype=torch.int64, device=generator.device)
    idx[:, case.shape.top_k // 2] = case.shape.num_experts - 1
    return idx


def _empty_experts(case: Case, rank: int, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Only the lowest quarter of the experts (at least top-k) have rows: whole ranks receive nothing."""
    used = max(case.shape.top_k, case.shape.num_experts // 4)
    return _draw(torch.ones(used, device=generator.device), tokens, case.shape.top_k, generator)


def _masked(case: Case, rank: int, tokens: int, generator: torch.Generator) -> torch.Tensor:
    return _mask(_balanced(case, rank, tokens, generator), generator)


def _mask(idx: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Empty some slots, and all slots of some tokens."""
    slots = torch.rand(idx.shape, generator=generator, device=generator.device) < MASKED_SLOTS
    whole = torch.rand((len(idx), 1), generator=generator, device=generator.device) < MASKED_TOKENS
    return idx.masked_fill(slots | whole, -1)


def _duplicates(case: Case, rank: int, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Slots in pairs of the same expert."""
    idx = _zipf(case, rank, tokens, generator)
    return idx[:, torch.arange(case.shape.top_k, device=idx.device) // 2 * 2]


def _mixed(case: Case, rank: int, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Skew, duplicates and masked slots at once."""
    return _mask(_duplicates(case, rank, tokens, generator), generator)


ROUTINGS = {
    r.name: r
    for r in (
        Routing("balanced", _balanced, _equal),
        Routing("zipf", _zipf, _equal),
        Routing("one-expert", _one_expert, _equal),
        Routing("empty-experts", _empty_experts, _equal),
        Routing("masked", _masked, _equal),
        Routing("duplicates", _duplicates, _equal, least_top_k=2),
        Routing("zero-ranks", _balanced, _zero_ranks),
        Routing("unequal", _zipf, _unequal),
        Routing("mixed", _mixed, _unequal, least_top_k=2),
    )
}


def build_matrix(
    precisions: Iterable[Precision],
    shapes: Iterable[Shape],
    routings: Iterable[Routing],
    ranks: Iterable[int],
    variants: Iterable[Variant],
) -> Iterator[Case]:
    """Every possible case of the product of the axes, the number of ranks varying slowest."""
    for num_ranks, precision, shape, routing, variant in itertools.product(
        ranks, precisions, shapes, routings, variants
    ):
        case = Case(precision, shape, routing, num_ranks, variant)
        if case.is_possible:
            yield case


def _generator(purpose: str, device: torch.device) -> torch.Generator:
    """A generator of its own for every purpose, always the same."""
    return torch.Generator(device).manual_seed(zlib.crc32(purpose.encode()))


def _normal(
    shape: tuple[int, ...], scale: float, generator: torch.Generator, dtype: torch.dtype
) -> torch.Tensor:
    values = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)
    return (values * scale).to(dtype)


def _down_scale(shape: Shape) -> float:
    """The standard deviation of W2 that gives y one of about 1: y sums K weighted rows of I products each."""
    mean_square_weight = (WEIGHT_HIGH**3 - WEIGHT_LOW**3) / (3 * (WEIGHT_HIGH - WEIGHT_LOW))
    terms = shape.top_k * shape.intermediate
    return (terms * mean_square_weight * SWIGLU_MEAN_SQUARE) ** -0.5


def expert_weights(
    shape: Shape, dtype: torch.dtype, expert: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Natural-layout weights of one expert: gate_up [2I, H] with rows [gate | up], and down [H, I]."""
    generator = _generator(f"{shape.name}/expert{expert}", device)
    gate_up = _normal((2 * shape.intermediate, shape.hidden), shape.hidden**-0.5, generator, dtype)
    down = _normal((shape.hidden, shape.intermediate), _down_scale(shape), generator, dtype)
    return gate_up, down


def shared_weights(case: Case, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Weights of the shared expert, shaped like one expert's; None in a variant without one."""
    if not case.variant.shared:
        return None
    return expert_weights(case.shape, case.precision.dtype, case.shape.num_experts, device)


def rank_inputs(case: Case, rank: int, device: torch.device) -> RankInputs:
    """The inputs of one rank; a quarter of the router weights is exactly 0 in the ``mixed`` routing."""
    generator = _generator(f"{case.shape.name}/{case.routing.name}/rank{rank}", device)
    tokens, dtype = case.tokens_per_rank[rank], case.precision.dtype
    x = _normal((tokens, case.shape.hidden), 1.0, generator, dtype)
    dy = _normal((tokens, case.shape.hidden), 1.0, generator, dtype)
    if case.variant.zero_dy:
        dy.zero_()
    weights = torch.rand((tokens, case.shape.top_k), generator=generator, device=device)
    weights = WEIGHT_LOW + (WEIGHT_HIGH - WEIGHT_LOW) * weights
    if case.routing.name == "mixed":
        weights[torch.rand(weights.shape, generator=generator, device=device) < ZERO_WEIGHTS] = 0.0
    idx = case.routing.experts(case, rank, tokens, generator).contiguous()
    return RankInputs(x, idx, weights.to(torch.float64 if dtype == torch.float64 else torch.float32), dy)
