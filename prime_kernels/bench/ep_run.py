"""Times one layer over a group of ranks, and the same load on one rank, in the same rounds."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import runtime
from ..op import mega_moe
from ..symm import SymmBuffer
from .ep_case import EpSize, EpTensors
from .ep_torch import AllToAllMoE
from .layer_case import LayerTensors
from .layer_contenders import TorchLayer
from .layer_run import PEER_ERRORS, compare
from .rounds import Contender, Event, Spread, interleave
from .torch_moe import torch_moe

# Where the load runs: over the group's ranks, or an equal load on this rank alone.
OVER_RANKS, ALONE = "over ranks", "alone"
PLACES = (OVER_RANKS, ALONE)
DIRECTIONS = ("forward", "backward")
#: Contenders: what they keep for the backward, None for torch's layers.
KEEPS: dict[str, str | None] = {"mega_moe": None, "mega_moe keep z": "z"}
PEERS = ("torch eager", "torch compile")
CONTENDERS = (*KEEPS, *PEERS)
# Room for this many times the rows of equal loads; what the prime-rl integration takes.
CAPACITY_FACTOR = 1.25
REFERENCE = "torch eager"

Times = dict[str, dict[str, dict[str, Spread]]]


@dataclass(frozen=True)
class Groups:
    """The ranks that are measured, and a group of this rank alone."""

    everyone: dist.ProcessGroup
    alone: dist.ProcessGroup


@dataclass(frozen=True)
class Clock:
    """How calls are timed; ``new_event`` and ``synchronize`` as in :func:`.rounds.interleave`."""

    repeats: int
    warmups: int
    new_event: Callable[[], Event]
    synchronize: Callable[[], None]


@dataclass(frozen=True)
class EpResult:
    """One load, measured.

    Attributes:
        times: milliseconds by contender, place and direction; of the rank that is slowest by its median.
        differences: relative difference of the kernels' outputs from torch eager, the largest of all ranks.
        failures: why a contender could not be measured, by its name.
    """

    size: EpSize
    routing: str
    times: Times
    differences: dict[str, float]
    failures: dict[str, str] = field(default_factory=dict)


class _Layer(TorchLayer):
    """Any differentiable layer of those arguments; keeps no gradients, which would fill the memory."""

    def __init__(self, tensors: LayerTensors, function: Callable[..., Tensor]) -> None:
        super().__init__(tensors, "eager")
        self.function = function

    def backward_and_release(self) -> None:
        self.run_backward()
        self.release()

    def step(self) -> dict[str, Tensor]:
        """Outputs of a forward and backward."""
        self.run_forward()
        self.run_backward()
        outputs = self.outputs()
        self.release()
        return outputs


def _gather(group: dist.ProcessGroup, value: Any) -> list[Any]:
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def slowest(ranks: Sequence[dict[str, Spread]]) -> dict[str, Spread]:
    """Of each call the spread of the rank whose median is largest."""
    return {name: max((spreads[name] for spreads in ranks), key=lambda s: s.median) for name in ranks[0]}


def _functions(groups: Groups, buffers: dict[str, SymmBuffer], who: str) -> dict[str, Any]:
    """The contender's layer in each place."""
    if who in KEEPS:
        return {place: partial(mega_moe, buffer=buffers[place], keep=KEEPS[who]) for place in PLACES}
    compiled = who == "torch compile"
    alone = torch.compile(torch_moe, fullgraph=True, dynamic=False) if compiled else torch_moe
    return {OVER_RANKS: AllToAllMoE(groups.everyone, compiled), ALONE: alone}


def _buffers(size: EpSize, groups: Groups) -> dict[str, SymmBuffer]:
    load = size.alone
    sizes = (load.tokens, load.topk, load.hidden, load.intermediate)
    before = runtime.get_pool_capacity_factor()
    runtime.set_pool_capacity_factor(CAPACITY_FACTOR)
    try:
        return {
            OVER_RANKS: SymmBuffer(groups.everyone, size.experts, *sizes, mma_type="bf16xbf16"),
            ALONE: SymmBuffer(groups.alone, load.experts, *sizes, mma_type="bf16xbf16"),
        }
    finally:
        runtime.set_pool_capacity_factor(before)


def _prepare(
    who: str,
    functions: dict[str, Any],
    tensors: EpTensors,
    buffers: dict[str, SymmBuffer],
    expected: dict[str, dict[str, Tensor]],
    group: dist.ProcessGroup,
) -> tuple[dict[str, _Layer], dict[str, float], str]:
    """The contender's layers by place, how far a first step is from ``expected``, and why it failed or "".

    A step of torch's that fails on one rank is left out on all; what else fails is raised.
    """
    layers: dict[str, _Layer] = {}
    differences: dict[str, float] = {}
    error = ""
    try:
        for place, inputs in ((OVER_RANKS, tensors.over_ranks), (ALONE, tensors.alone)):
            layers[place] = _Layer(inputs, functions[place])
            outputs = layers[place].step()
            buffers[place].check()
            for name, value in compare(outputs, expected[place]).items():
                differences[name] = max(value, differences.get(name, 0.0))
    except PEER_ERRORS as problem:
        if who not in PEERS:
            raise
        error = f"{type(problem).__name__}: {next(iter(str(problem).splitlines()), '')}"
    errors = [f"rank {rank}: {text}" for rank, text in enumerate(_gather(group, error)) if text]
    return layers, differences, min(errors, default="")


def measure(
    size: EpSize, routing: str, tensors: EpTensors, chosen: Sequence[str], groups: Groups, clock: Clock
) -> EpResult:
    """Time ``chosen`` (of ``CONTENDERS``). Collective: every rank calls it with its own ``tensors``.

    All calls alternate in the same rounds, and all ranks start each call together, so that nobody's time
    has another's lateness in it. Staging x, dy and the routing is part of the kernels' time.

    Raises:
        RuntimeError: a contender disagrees with torch eager, or the kernels recorded a fault.
    """
    device = tensors.alone.x.device
    token = torch.zeros(1, device=device)
    buffers = _buffers(size, groups)
    differences: dict[str, float] = {}
    failures, contenders = {}, []
    reference = _functions(groups, buffers, REFERENCE)
    expected = {
        OVER_RANKS: _Layer(tensors.over_ranks, reference[OVER_RANKS]).step(),
        ALONE: _Layer(tensors.alone, reference[ALONE]).step(),
    }
    for number, who in enumerate(chosen):
        functions = _functions(groups, buffers, who)
        layers, theirs, error = _prepare(who, functions, tensors, buffers, expected, groups.everyone)
        if error:
            failures[who] = error
            continue
        if who in KEEPS:
            for name, value in theirs.items():
                differences[name] = max(value, differences.get(name, 0.0))
        for place, layer in layers.items():
            contenders.append(_contender(number, who, place, layer, token, groups.everyone))
    del expected
    gc.collect()
    spreads = interleave(contenders, clock.repeats, clock.warmups, clock.new_event, clock.synchronize)
    for buffer in buffers.values():
        buffer.destroy()
    # Compiled for this load alone.
    torch.compiler.reset()
    everyone = _gather(groups.everyone, (spreads, differences))
    worst = {name: max(of_rank[name] for _, of_rank in everyone) for name in differences}
    times = _times(slowest([of_rank for of_rank, _ in everyone]))
    return EpResult(size, routing, times, worst, failures)


def _contender(
    number: int, who: str, place: str, layer: _Layer, token: Tensor, group: dist.ProcessGroup
) -> Contender:
    """Forward and backward, before each of which the ranks wait for each other on the GPU."""

    def align() -> None:
        dist.all_reduce(token, group=group)

    return Contender(
        (
            (f"align {number} {place} 1", align),
            (_key(who, place, "forward"), layer.run_forward),
            (f"align {number} {place} 2", align),
            (_key(who, place, "backward"), layer.backward_and_release),
        )
    )


def _key(who: str, place: str, direction: str) -> str:
    return f"{who}/{place}/{direction}"


def _times(spreads: dict[str, Spread]) -> Times:
    times: Times = {}
    for name, spread in spreads.items():
        who, *rest = name.split("/")
        if rest:
            place, direction = rest
            times.setdefault(who, {}).setdefault(place, {})[direction] = spread
    return times
