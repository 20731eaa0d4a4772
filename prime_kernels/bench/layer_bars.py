"""The passes of the kernels, and what is asked of each as a ratio to the sum of DeepGEMM's products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DIRECTIONS = ("forward", "backward")
BACKWARDS = ("recompute", "keep")
BAR_TOKENS = 16384  # the load the bars were set for; others are held against them for orientation
NOT_LANDED = "not landed"


@dataclass(frozen=True)
class Bars:
    """Ratios to the sum of products: ready to merge, done, and what is aimed at."""

    lands: float
    done: float
    goal: float

    def verdict(self, ratio: float) -> str:
        """The best bar that ``ratio`` does not exceed: "goal", "done", "lands" or "not landed"."""
        for name in ("goal", "done", "lands"):
            if ratio <= getattr(self, name):
                return name
        return NOT_LANDED


@dataclass(frozen=True)
class Pass:
    """One way in which the kernels go through a direction.

    bars: None where none is set.
    """

    name: str
    direction: str
    keeps_z: bool
    bars: Bars | None

    @property
    def slug(self) -> str:
        """The name as part of a file's name."""
        return self.name.replace(",", "").replace(" ", "-")


# The backward that recomputes z does 16/12 of the FLOPs of its products.
PASSES = (
    Pass("forward", "forward", False, Bars(1.35, 1.20, 1.10)),
    Pass("forward, z kept", "forward", True, None),
    Pass("backward, z recomputed", "backward", False, Bars(1.70, 1.55, 1.45)),
    Pass("backward, z kept", "backward", True, Bars(1.35, 1.20, 1.10)),
)


def pass_pairs(backwards: Sequence[str]) -> list[tuple[Pass, Pass]]:
    """The forward and the backward that go together, for each of ``backwards`` (of ``BACKWARDS``)."""
    pairs = []
    for backward in BACKWARDS:
        if backward in backwards:
            forward, back = (item for item in PASSES if item.keeps_z == (backward == "keep"))
            pairs.append((forward, back))
    return pairs
