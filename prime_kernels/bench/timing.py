"""Timing with CUDA events."""

from __future__ import annotations

import statistics
import time
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


def host_us(call: Callable[[], object], rounds: int = 20, calls: int = 50) -> float:
    """Microseconds of host time one call takes: the median over rounds of calls that start on an idle GPU.

    A round is shorter than the launch queue, so that it never waits for the GPU.
    """
    call()
    samples = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        samples.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(samples)
