"""Timing with CUDA events."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

WARMUPS = 3
REPEATS = 10


def time_calls(call: Callable[[], object], warmups: int = WARMUPS, repeats: int = REPEATS) -> list[float]:
    """Milliseconds of each of ``repeats`` calls on torch's current stream, after ``warmups`` untimed ones.

    Each call stands between two events of its own. The calls are queued without waiting in between, so the
    host is not part of a call that runs longer than it takes to launch.
    """
    for _ in range(warmups):
        call()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in ("start", "end")] for _ in range(repeats)]
    for start, end in pairs:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def median_ms(call: Callable[[], object], warmups: int = WARMUPS, repeats: int = REPEATS) -> float:
    """The median of :func:`time_calls`."""
    return statistics.median(time_calls(call, warmups, repeats))
