"""Timing several things against each other: in rounds, so that all see the same clocks and temperature.

A GPU under load lowers its clocks within a second. Timed one after the other, whatever comes first looks
fastest; here every round calls each contender once, and every other round in reverse order.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .timing import REPEATS, WARMUPS

MICROSECONDS = 1e6


class Event(Protocol):
    """What is used of ``torch.cuda.Event``."""

    def record(self) -> None:
        """Mark this point of the current stream."""

    def elapsed_time(self, end: Event, /) -> float:
        """Milliseconds from this event to ``end``."""


@dataclass(frozen=True)
class Spread:
    """Milliseconds of repeated calls."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Raises ValueError without samples."""
        if not samples:
            raise ValueError("a spread needs at least one sample, got none")
        return cls(statistics.median(samples), min(samples), max(samples), len(samples))


@dataclass(frozen=True)
class Contender:
    """Calls that are timed one by one and always run in this order: a forward and its backward."""

    calls: tuple[tuple[str, Callable[[], object]], ...]


def _cuda_event() -> Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[return-value]


def interleave(
    contenders: Sequence[Contender],
    repeats: int = REPEATS,
    warmups: int = WARMUPS,
    new_event: Callable[[], Event] = _cuda_event,
    synchronize: Callable[[], None] = torch.cuda.synchronize,
    settle: int = 0,
) -> dict[str, Spread]:
    """Time every call of every contender ``repeats`` times, after ``warmups`` untimed rounds.

    In every round a contender's calls run ``settle`` times before they are timed: a GPU that is bound by its
    power sets its clocks by what ran in the last milliseconds, and that shall be the contender itself.

    Everything is queued on the current stream without waiting in between, so the host is not part of a call
    that runs longer than it takes to launch.

    Returns:
        The spread of each call, by its name.

    Raises:
        ValueError: two calls have the same name.
    """
    names = [name for contender in contenders for name, _ in contender.calls]
    if len(set(names)) != len(names):
        raise ValueError(f"calls need names of their own, got {names}")
    pairs: dict[str, list[tuple[Event, Event]]] = {name: [] for name in names}
    for number in range(warmups + repeats):
        for contender in contenders[:: -1 if number % 2 else 1]:
            for _ in range(settle):
                for _, call in contender.calls:
                    call()
            for name, call in contender.calls:
                start, end = new_event(), new_event()
                start.record()
                call()
                end.record()
                if number >= warmups:
                    pairs[name].append((start, end))
    synchronize()
    return {name: Spread.of([start.elapsed_time(end) for start, end in pairs[name]]) for name in names}


def host_times(
    contender: Contender, rounds: int, calls: int, synchronize: Callable[[], None] = torch.cuda.synchronize
) -> dict[str, float]:
    """Microseconds of host time of each call: the median over ``rounds``, each the mean of ``calls`` turns.

    A round starts on an idle GPU; keep it shorter than the launch queue, so that it never waits for the GPU.
    """
    samples: dict[str, list[float]] = {name: [] for name, _ in contender.calls}
    for _ in range(rounds):
        synchronize()
        totals = dict.fromkeys(samples, 0.0)
        for _ in range(calls):
            for name, call in contender.calls:
                start = time.perf_counter()
                call()
                totals[name] += time.perf_counter() - start
        for name, total in totals.items():
            samples[name].append(total / calls * MICROSECONDS)
    synchronize()
    return {name: statistics.median(values) for name, values in samples.items()}


class Captured:
    """A call as a CUDA graph. It runs once before, so that what it compiles and loads is there."""

    def __init__(self, call: Callable[[], object]) -> None:
        call()
        torch.cuda.synchronize()
        self._call = call  # a graph knows addresses only: this keeps the tensors behind them
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            call()

    def __call__(self) -> None:
        self._graph.replay()
