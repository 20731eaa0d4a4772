"""Actors that run at random speeds, and what they wait for: mbarriers and counters.

An actor is a generator that yields what it waits for, or None where time passes.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Generator


class Fault(Exception):
    """Something that would be an error or a wrong result on the GPU."""


class Deadlock(Fault):
    """Actors are left and nothing is under way."""


class Source:
    """What actors wait for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.parked: list[Callable[[], None]] = []

    def passes(self, number: int) -> bool:
        """Whether a wait for this number goes through now."""
        raise TypeError(f"{self.name} is nothing to wait for")

    def wake(self) -> None:
        parked, self.parked = self.parked, []
        for resume in parked:
            resume()


class Count(Source):
    """A number that grows: a counter in memory, or what the copy engine has done."""

    value = 0

    def add(self) -> None:
        self.value += 1
        self.wake()

    def passes(self, number: int) -> bool:
        return self.value >= number


class Barrier(Source):
    """An mbarrier: a phase ends when all arrivals and all announced loads are there.

    Like the hardware, a wait sees only the parity of the phase: it hangs if the next phase has ended too when
    it looks. Unlike the hardware, the model knows which phase was meant.
    """

    def __init__(self, name: str, count: int) -> None:
        super().__init__(name)
        self.count = self.pending = count
        self.loads = 0
        self.phases = 0  # completed

    def arrive(self, count: int = 1, loads: int = 0) -> None:
        self.loads += loads
        self.pending -= count
        if self.pending < 0:
            raise Fault(f"{self.name}: {-self.pending} arrivals too many")
        self._end()

    def land(self) -> None:
        """One of the loads, which may come before it is announced."""
        self.loads -= 1
        self._end()

    def is_between_phases(self) -> bool:
        return self.pending == self.count and self.loads == 0

    def _end(self) -> None:
        if self.pending == 0 and self.loads == 0:
            self.pending = self.count
            self.phases += 1
            self.wake()

    def passes(self, number: int) -> bool:
        """``number``: of phases that shall have ended; 0 goes through at the start."""
        if self.phases % 2 != number % 2:
            return False
        if self.phases != number:
            raise Fault(f"{self.name}: a wait for the end of phase {number} sees that of phase {self.phases}")
        return True


class Position:
    """In a ring; ``lap % 2`` is the phase that the kernels keep."""

    def __init__(self, size: int) -> None:
        self.size, self.index, self.lap = size, 0, 0

    def advance(self) -> None:
        self.index = (self.index + 1) % self.size
        self.lap += self.index == 0


Wait = tuple[Source, int]
Steps = Generator["Wait | None", None, None]


class Clock:
    """Runs actors and delivers messages in the order of random times."""

    # Mean times, drawn once for each actor and once for each message.
    PACES = (1.0, 1.0, 20.0, 300.0)
    LATENCIES = (1.0, 1.0, 20.0, 200.0)

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._time, self._events = 0.0, 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._waits: dict[str, Wait | None] = {}  # by actor

    def _at(self, time: float, action: Callable[[], None]) -> None:
        self._events += 1
        heapq.heappush(self._queue, (time, self._events, action))

    def message(self, action: Callable[[], None], not_before: float = 0.0) -> float:
        """Something that the hardware does at a time of its own, which is returned."""
        delay = self.random.expovariate(1.0) * self.random.choice(self.LATENCIES)
        time = max(self._time + delay, not_before)
        self._at(time, action)
        return time

    def start(self, name: str, steps: Steps) -> None:
        pace = self.random.choice(self.PACES)
        self._waits[name] = None

        def later() -> None:
            self._at(self._time + pace * self.random.expovariate(1.0), resume)

        def resume() -> None:
            wait = self._waits[name]
            if wait is not None and not wait[0].passes(wait[1]):
                wait[0].parked.append(later)
                return
            try:
                self._waits[name] = next(steps)
                later()
            except StopIteration:
                del self._waits[name]

        later()

    def run(self) -> None:
        """Until every actor is at its end; raises Deadlock if one cannot get there."""
        while self._queue:
            self._time, _, action = heapq.heappop(self._queue)
            action()
        if self._waits:
            waits = [f"{name}: {wait[0].name}" for name, wait in self._waits.items() if wait is not None]
            raise Deadlock("; ".join(waits))
