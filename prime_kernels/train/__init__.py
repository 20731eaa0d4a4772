"""The main job: `python -m prime_kernels train` trains a small MoE language model on real text, anywhere."""

from __future__ import annotations

import os
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Run the command with the words after `train`; returns the exit code (see job.py)."""
    # OpenMP threads that wait shall sleep: by default they spin, and on two cores that others use as well
    # a step was seen to take 6 s instead of 0.4 s. The runtime reads this when torch is loaded: set it first.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from .job import main as run

    return run(argv)
