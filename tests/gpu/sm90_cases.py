"""Problems for the SM90 BF16 kernels, their float64 results, and how outputs are judged."""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from prime_kernels import sm90
from prime_kernels.backward import sm90_bf16 as backward_kernel
from prime_kernels.exchange import Pools
from prime_kernels.forward import sm90_bf16 as forward_kernel
from prime_kernels.jit import KernelSource, compile_kernel
from prime_kernels.reference import Grads, moe_backward, moe_forward

BF16, FP32 = torch.bfloat16, torch.float32
DEVICE = torch.device("cuda", 0)
# Relative Frobenius norm of each output, also of each expert's weight gradient, against float64.
TOLERANCE = 5e-3
# The (H, I) of all tests: each pair costs compile time. No tile divides either size of the last.
SHAPES = ((512, 256), (768, 384), (320, 192))
POISON = 255  # a byte of NaN in bf16 and fp32, and -1 as an integer


@functools.cache
def compile_all() -> None:
    """Fill the cache with every kernel of these tests."""
    sources = [sm90.plan_source(entry) for entry in sm90.PLAN_ENTRIES]
    for hidden, inter in SHAPES:
        for clamped, kept in itertools.product((False, True), repeat=2):
            sources.append(forward_kernel.source(hidden, inter, clamped, kept))
            sources.append(backward_kernel.source(hidden, inter, clamped, kept))
    compile_together(sources)


def compile_together(sources: Iterable[KernelSource]) -> None:
    """Fill the cache, with several kernels at once: one after the other they take seconds each."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_kernel, dict.fromkeys(sources)))


@dataclass(frozen=True)
class Case:
    """One layer and the tokens of all ranks."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    gate_up: Tensor
    down: Tensor
    dy: Tensor
    clamp: float | None = None
    shared: tuple[Tensor, Tensor] | None = None

    @property
    def num_tokens(self) -> int:
        return self.x.shape[0]

    @functools.cached_property
    def y(self) -> Tensor:
        """float64."""
        return moe_forward(*self._wide(), clamp=self.clamp, shared=self._wide_shared())

    @functools.cached_property
    def grads(self) -> Grads:
        """float64."""
        return moe_backward(self.dy.double(), *self._wide(), clamp=self.clamp, shared=self._wide_shared())

    @functools.cached_property
    def dtopk_size(self) -> float:
        """The norm of products of such vectors as dtopk holds: that of a few may be near 0 by chance.

        dtopk of a slot is <dy, output row of the expert>; without a common direction its square is
        |dy|^2 |row|^2 / H on average, and its rounding error is in proportion to that.
        """
        x, _, _, gate_up, down = self._wide()
        token, slot = (self.topk_idx >= 0).nonzero(as_tuple=True)
        experts = self.topk_idx[token, slot, None]
        rows = moe_forward(x[token], experts, x.new_ones(experts.shape), gate_up, down, clamp=self.clamp)
        lengths = self.dy[token].double().norm(dim=1) * rows.norm(dim=1)
        return float(lengths.norm()) * x.shape[1] ** -0.5

    def _wide(self) -> tuple[Tensor, ...]:
        return (
            self.x.double(), self.topk_idx, self.topk_weights.double(),
            self.gate_up.double(), self.down.double(),
        )  # fmt: skip

    def _wide_shared(self) -> tuple[Tensor, Tensor] | None:
        return None if self.shared is None else (self.shared[0].double(), self.shared[1].double())


def route(kind: str, tokens: int, experts: int, topk: int, generator: torch.Generator) -> Tensor:
    """int64 [tokens, topk].

    "even"; "random", with duplicates; "masked", also with -1; "none", all -1; "one", all of one expert;
    "skewed", Zipf.
    """
    shape = (tokens, topk)
    if kind == "even":
        order = torch.rand(tokens, experts, device=DEVICE, generator=generator).argsort(1)
        return order[:, :topk].contiguous()
    if kind == "random":
        return torch.randint(0, experts, shape, device=DEVICE, generator=generator)
    if kind == "masked":
        idx = torch.randint(-1, experts, shape, device=DEVICE, generator=generator)
        idx[::7] = -1
        return idx
    if kind in ("one", "none"):
        expert = experts - 1 if kind == "one" else -1
        return torch.full(shape, expert, dtype=torch.int64, device=DEVICE)
    assert kind == "skewed"
    share = torch.arange(1, experts + 1, device=DEVICE).double() ** -2
    drawn = torch.multinomial(share, max(1, tokens * topk), True, generator=generator)
    return drawn[: tokens * topk].view(shape)


def make_case(
    tokens: int, experts: int, topk: int, hidden: int, inter: int, kind: str = "even", *,
    clamp: float | None = None, shared_inter: int | None = None, seed: int = 0,
) -> Case:  # fmt: skip
    """Inputs of such a scale that outputs are O(1)."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device=DEVICE, generator=generator) * scale).to(BF16)

    shared = None
    if shared_inter is not None:
        shared = (
            normal(2 * shared_inter, hidden, scale=hidden**-0.5),
            normal(hidden, shared_inter, scale=1.6 * shared_inter**-0.5),
        )
    x = normal(tokens, hidden)
    topk_idx = route(kind, tokens, experts, topk, generator)
    topk_weights = torch.rand(tokens, topk, device=DEVICE, generator=generator)
    topk_weights.masked_fill_(topk_idx < 0, math.nan)  # the weight of a slot without an expert is not read
    gate_up = normal(experts, 2 * inter, hidden, scale=hidden**-0.5)
    return Case(
        x=x,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        gate_up=gate_up,
        down=normal(experts, hidden, inter, scale=1.6 * inter**-0.5),
        dy=normal(tokens, hidden),
        clamp=None if clamp is None else clear_of_values(clamp, x, topk_idx, gate_up, shared),
        shared=shared,
    )


def clear_of_values(
    limit: float, x: Tensor, topk_idx: Tensor, gate_up: Tensor, shared: tuple[Tensor, Tensor] | None
) -> float:
    """The limit nearby that is farthest from any gate or up value.

    A value that fp32 accumulation moves across the limit has a gradient or none: that is a whole element,
    no rounding error.
    """
    window = 0.02
    near = [torch.tensor([limit - window, limit + window], dtype=torch.float64, device=DEVICE)]
    products = [(x[(topk_idx == expert).any(1)], gate_up[expert]) for expert in range(gate_up.shape[0])]
    if shared is not None:
        products.append((x, shared[0]))
    for rows, weight in products:
        values = (rows.double() @ weight.double().T).abs().flatten()
        near.append(values[(values - limit).abs() < window])
    ordered = torch.cat(near).sort().values
    widest = int((ordered[1:] - ordered[:-1]).argmax())
    return float((ordered[widest] + ordered[widest + 1]) / 2)


def poisoned(shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, math.nan, dtype=dtype, device=DEVICE)


def poison_bytes(symmetric: Tensor, pools: Pools) -> None:
    """What earlier calls could have left in a rank's memory; ``symmetric`` without the flags."""
    symmetric.fill_(POISON)
    for pool in (pools.x, pools.dy, pools.dz, pools.activations, pools.weights, pools.dtopk_parts):
        pool.view(torch.uint8).fill_(POISON)


def relative_error(got: Tensor, want: Tensor, size: float = 0.0) -> float:
    """Relative Frobenius norm; where ``want`` is exactly zero, 0 or inf. ``size``: at least that of want."""
    norm = float(want.double().norm())
    if norm == 0.0:
        return 0.0 if bool((got == 0).all()) else math.inf
    return float((got.double() - want.double()).norm()) / max(norm, size)


def check(name: str, got: Tensor, want: Tensor, *, matrices: bool = False, size: float = 0.0) -> None:
    """``matrices``: each of them (an expert's gradient) is also judged alone. ``size``: relative to what."""
    assert bool(got.isfinite().all()), f"{name}: {int((~got.isfinite()).sum())} elements are not finite"
    error = relative_error(got, want, size)
    # A few elements do not average: each may be off by a few roundings of bf16.
    limit = TOLERANCE * (1 + 4 * want.numel() ** -0.5 if want.numel() else 1)
    assert error <= limit, f"{name}: relative error {error:.2e} of at most {limit:.2e}"
    for index in range(want.shape[0] if matrices else 0):
        error = relative_error(got[index], want[index])
        assert error <= TOLERANCE, f"{name}[{index}]: relative error {error:.2e}"


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
