"""Trains one variant of ``bench end-to-end`` and measures it; nothing of it is left in memory afterwards."""

from __future__ import annotations

import gc
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

import torch
from torch import Tensor

from ..module import release_buffers
from .end_to_end_case import VARIANTS, EndToEndCase, build_model, count_parameters, prepare, step_loss
from .rounds import Event, Spread

PARTS = ("forward", "backward", "optimizer")

# Relative differences of the loss from that of the first variant. The first loss is of equal weights and
# bytes: only rounding differs. Later ones drift apart, since rounding moves tokens to other experts.
FIRST_LOSS_LIMIT = 2e-3
LOSS_LIMIT = 5e-2


@dataclass(frozen=True)
class VariantResult:
    """One variant's run.

    Attributes:
        losses: nats per byte, of every step.
        step: milliseconds of the timed steps; ``parts`` of their forward, backward and optimizer.
        first_step_ms: of the first step of all, with whatever is compiled in it.
        setup_seconds: to make the model and its optimizer.
        state_bytes: between steps: weights, optimizer and staging buffers. None on a CPU.
        peak_bytes: the most that was allocated at a time. None on a CPU.
        parameters: see ``count_parameters``.
    """

    losses: list[float]
    step: Spread
    parts: dict[str, Spread]
    first_step_ms: float
    setup_seconds: float
    state_bytes: int | None
    peak_bytes: int | None
    parameters: dict[str, int]


@dataclass(frozen=True)
class LossDifference:
    """Relative difference from the losses of the first variant: of the first step, and the largest."""

    first: float
    largest: float

    @property
    def agrees(self) -> bool:
        """Within both limits."""
        return self.first <= FIRST_LOSS_LIMIT and self.largest <= LOSS_LIMIT


@dataclass
class EndToEndResult:
    """Everything one run measured.

    Attributes:
        text: what was trained on.
        backend: what computed our experts.
        variants: by name, in the order they ran.
        failures: why a variant could not be measured, by its name.
    """

    case: EndToEndCase
    text: str
    backend: str
    variants: dict[str, VariantResult] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def tokens_per_second(self, name: str) -> float:
        """At the median step."""
        return self.case.tokens / self.variants[name].step.median * 1e3

    def differences(self) -> dict[str, LossDifference]:
        """Of each variant's losses from those of the first."""
        if not self.variants:
            return {}
        reference, *others = self.variants
        losses = self.variants[reference].losses
        return {name: compare_losses(self.variants[name].losses, losses) for name in others}

    def agrees(self) -> bool:
        """Everything was measured, and all losses agree."""
        return not self.failures and all(difference.agrees for difference in self.differences().values())


def compare_losses(losses: Sequence[float], reference: Sequence[float]) -> LossDifference:
    """Step by step."""
    relative = relative_differences(losses, reference)
    return LossDifference(relative[0], max(relative))


def relative_differences(losses: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Of each step's loss."""
    return [abs(loss - want) / want for loss, want in zip(losses, reference, strict=True)]


class HostEvent:
    """An :class:`Event` for devices that run what they are told at once."""

    time = 0.0

    def record(self) -> None:
        """Now."""
        self.time = time.perf_counter()

    def elapsed_time(self, end: HostEvent, /) -> float:
        """Milliseconds."""
        return (end.time - self.time) * 1e3


def _new_event(device: torch.device) -> Callable[[], Event]:
    if device.type == "cuda":
        return lambda: torch.cuda.Event(enable_timing=True)  # type: ignore[return-value]
    return HostEvent  # type: ignore[return-value]


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Raises TimeoutError inside once ``seconds`` are over. Main thread only."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"{what} took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_variant(case: EndToEndCase, name: str, batches: Tensor, limit_seconds: float) -> VariantResult:
    """Train a new model on ``batches`` [steps, batch, sequence], on their device.

    Raises:
        TimeoutError: it took more than ``limit_seconds``.
        RuntimeError: out of memory, a compiler that failed, a fault in the kernels, a loss that isn't finite.
    """
    with time_limit(limit_seconds, name):
        try:
            return _train(case, name, batches)
        finally:
            release_buffers()
            torch._dynamo.reset()


def free_memory(device: torch.device) -> None:
    """Give back what the last variant used: nothing may hold it any more, also no exception's traceback."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _train(case: EndToEndCase, name: str, batches: Tensor) -> VariantResult:
    device, on_gpu = batches.device, batches.device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    model = build_model(case, device)
    buffers = prepare(model, case, VARIANTS[name])
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.learning_rate, fused=True)
    new_event = _new_event(device)
    events: list[list[Event]] = []
    losses = []

    def mark() -> None:
        event = new_event()
        event.record()
        events[-1].append(event)

    if on_gpu:
        torch.cuda.synchronize(device)
    setup_seconds = time.perf_counter() - start
    for ids in batches:  # nothing here waits for the GPU; the library does once, to look for packed sequences
        events.append([])
        mark()
        loss = step_loss(model, ids)
        mark()
        loss.backward()
        mark()
        optimizer.step()
        optimizer.zero_grad()
        mark()
        losses.append(loss.detach())
    for buffer in buffers:
        buffer.check()
    values = torch.stack(losses).tolist()
    if on_gpu:
        torch.cuda.synchronize(device)
    if not all(math.isfinite(value) for value in values):
        raise RuntimeError(f"a loss of {name} is not finite: {values}")
    timed = events[case.warmup :]
    return VariantResult(
        losses=values,
        step=Spread.of([marks[0].elapsed_time(marks[-1]) for marks in timed]),
        parts={
            part: Spread.of([marks[i].elapsed_time(marks[i + 1]) for marks in timed])
            for i, part in enumerate(PARTS)
        },
        first_step_ms=events[0][0].elapsed_time(events[0][-1]),
        setup_seconds=setup_seconds,
        state_bytes=torch.cuda.memory_allocated(device) - before if on_gpu else None,
        peak_bytes=torch.cuda.max_memory_allocated(device) - before if on_gpu else None,
        parameters=count_parameters(model, case),
    )
