"""The H and I that BF16 Mega MoE takes, for whoever checks them before a buffer is built."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SizeLimit:
    """A size is a multiple of ``multiple``, and ``least`` (one of them) or more."""

    multiple: int
    least: int

    def __str__(self) -> str:
        minimum = f" and at least {self.least}" if self.least > self.multiple else ""
        return f"a multiple of {self.multiple}{minimum}"

    def takes(self, size: int) -> bool:
        """Whether ``size`` is within the limit."""
        return size >= self.least and size % self.multiple == 0

    def nearest(self, size: int) -> tuple[int, ...]:
        """The sizes next to ``size`` that are within the limit, at most one on either side."""
        below = size // self.multiple * self.multiple
        above = -(-size // self.multiple) * self.multiple
        return tuple(sorted({max(below, self.least), max(above, self.least)}))


@dataclass(frozen=True)
class SizeLimits:
    """Of one backend, for bf16."""

    hidden: SizeLimit
    intermediate: SizeLimit


_ATOM = SizeLimit(multiple=64, least=64)
# By backend. SM90: a row of a swizzled tile has 64 columns, tiles at the edge of a matrix are cut to whole
# ones, and a product along H fills the operand ring at least once (docs/protocol.md, "Why nothing
# deadlocks"); `takes_shape` in tiles.cuh says the same to the compiler. The reference needs none of it, but
# what it takes shall not fail on a GPU later; H below 256 alone is left to tests.
SIZE_LIMITS = {
    "sm90": SizeLimits(hidden=SizeLimit(multiple=64, least=256), intermediate=_ATOM),
    "reference": SizeLimits(hidden=_ATOM, intermediate=_ATOM),
}
