"""Runs one layer in every way that ``bench layer`` compares, on one GPU, in one process."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .gemm import BACKWARD, FORWARD, relative_error
from .layer_bars import PASSES, Pass, pass_pairs
from .layer_case import LayerSize, LayerTensors
from .layer_contenders import (
    DW_DTYPES,
    GRAPH,
    PEERS,
    KernelLayer,
    TorchLayer,
    gemm_contender,
    kernel_contenders,
)
from .rounds import Contender, Spread, host_times, interleave

# This torch lacks grouped_mm, cannot compile it, or has no memory left: reported in the table, exit code 1.
PEER_ERRORS = (RuntimeError, AttributeError, TypeError)
# Two BF16 implementations that round at different places differ by about 5e-3; more than this is wrong.
MAX_DIFFERENCE = 2e-2
SETTLE = 2  # untimed runs in front of each timed one
HOST_ROUNDS, HOST_CALLS = 5, 4


@dataclass(frozen=True)
class LayerResult:
    """Everything one run measured.

    Attributes:
        spreads: milliseconds, by "<who> <pass>" for the kernels ("kernel graph", "kernel launch"), by
            "<who> <direction>" for the peers ("torch eager", "torch compile"), by the names of the GEMMs, and
            "route plan", "staging x" and "staging dy" alone.
        ceilings: of this GPU in the same process, see ``measure_ceilings``.
        host_us: host time of one call, by the names of the calls that are not in a graph.
        peak_bytes: most memory that one forward and backward added to weights and inputs, outputs included.
        memory: bytes of each part of a rank.
        differences: relative difference of the kernels' outputs from torch eager.
        seconds: how long each stage of the measurement took.
        failures: why a peer could not be measured, by its name.
    """

    size: LayerSize
    dw_dtype: str
    spreads: dict[str, Spread]
    ceilings: dict[str, float]
    host_us: dict[str, float]
    peak_bytes: dict[str, int]
    memory: dict[str, int]
    differences: dict[str, float]
    seconds: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def passes(self) -> list[Pass]:
        """Those of the kernels that were measured."""
        return [item for item in PASSES if f"{GRAPH} {item.name}" in self.spreads]

    @property
    def peers(self) -> list[str]:
        """Torch's layers that were measured."""
        return [f"torch {name}" for name in PEERS if f"torch {name} forward" in self.spreads]

    def ms(self, who: str, what: str) -> float:
        """Median time of ``who`` in a pass (the kernels) or direction (the peers)."""
        return self.spreads[f"{who} {what}"].median

    def gemm_sum(self, direction: str) -> float:
        """Milliseconds of DeepGEMM's products of a direction, one after the other."""
        return sum(self.spreads[name].median for name in (FORWARD if direction == "forward" else BACKWARD))

    def ratio(self, what: Pass, who: str = GRAPH) -> float:
        """Median time of the kernels in units of :meth:`gemm_sum`."""
        return self.ms(who, what.name) / self.gemm_sum(what.direction)

    def ratio_to(self, peer: str, what: Pass) -> float | None:
        """Median time of the kernels in units of a peer's; None for a peer that was not measured."""
        return self.ms(GRAPH, what.name) / self.ms(peer, what.direction) if peer in self.peers else None

    def verdict(self, what: Pass) -> str | None:
        """The bar that the kernels reach; None for a pass without one."""
        return None if what.bars is None else what.bars.verdict(self.ratio(what))

    def tflops(self, milliseconds: float, direction: str) -> float:
        """TFLOP/s of a direction, see ``FLOP_CONVENTION``."""
        flops = self.size.forward_flops if direction == "forward" else self.size.backward_flops
        return flops / milliseconds / 1e9


class Stopwatch:
    """Seconds of the stages of a measurement, by their names."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the time of the block, in which the GPU is waited for."""
        start = time.perf_counter()
        yield
        torch.cuda.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def peak_growth(device: torch.device, action: Callable[[], object]) -> int:
    """Bytes of torch's allocator that ``action`` needs at most on top of what is allocated before it."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    action()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def compare(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Relative difference of each output in Frobenius norm.

    Raises:
        RuntimeError: one of them is wrong; the time of a wrong result says nothing.
    """
    differences = {name: relative_error(actual[name], expected[name].float()) for name in expected}
    wrong = {name: f"{value:.2e}" for name, value in differences.items() if not value <= MAX_DIFFERENCE}
    if wrong:
        raise RuntimeError(f"outputs differ from torch eager by {wrong}, the limit is {MAX_DIFFERENCE:.0e}")
    return differences


def _step(layer: TorchLayer) -> None:
    layer.run_forward()
    layer.run_backward()


def check_kernels(
    size: LayerSize, tensors: LayerTensors, dw_dtype: str, backwards: Sequence[str]
) -> tuple[KernelLayer, dict[str, int], dict[str, float]]:
    """The kernels, ready to be timed: their peaks of memory, and how far they are from torch eager."""
    device = tensors.x.device
    eager = TorchLayer(tensors, "eager")
    _step(eager)
    expected = eager.outputs()
    del eager
    held: list[KernelLayer] = []
    peaks: dict[str, int] = {}
    differences: dict[str, float] = {}
    base = peak_growth(device, lambda: held.append(KernelLayer(size, tensors, DW_DTYPES[dw_dtype])))
    layer = held.pop()

    def step(pair: tuple[Pass, Pass]) -> None:
        if pair[0].keeps_z:
            layer.make_room_for_z()
        for item in pair:
            layer.run(item)

    for pair in pass_pairs(backwards):
        layer.spoil()
        name = pair[1].name.partition(", ")[2]
        peaks[f"kernels, {name}"] = base + peak_growth(device, lambda pair=pair: step(pair))  # type: ignore[misc]
        layer.rank.check()
        for output, value in compare(layer.outputs(), expected).items():
            differences[f"{output} ({name})"] = value
    return layer, peaks, differences


def make_peers(
    tensors: LayerTensors, peers: Sequence[str], watch: Stopwatch
) -> tuple[list[Contender], dict[str, int], dict[str, str]]:
    """Torch's layers, compiled and run once; their peaks of memory; and why one of them is missing."""
    contenders, peaks, failures = [], {}, {}
    # Sizes are compiled in, and torch refuses to compile one function more than a few times.
    torch.compiler.reset()
    for name in peers:
        who = f"torch {name}"
        try:
            peer = TorchLayer(tensors, name)
            with watch.stage(who):
                _step(peer)
        except PEER_ERRORS as error:
            message = next(iter(str(error).splitlines()), "")
            failures[who] = f"{type(error).__name__}: {message}"
            continue
        peer.release()
        peaks[who] = peak_growth(tensors.x.device, lambda peer=peer: _step(peer))  # type: ignore[misc]
        peer.release()
        contenders.append(
            Contender(((f"{who} forward", peer.run_forward), (f"{who} backward", peer.run_backward)))
        )
    return contenders, peaks, failures


def measure_layer(
    size: LayerSize,
    tensors: LayerTensors,
    dw_dtype: str,
    *,
    backwards: Sequence[str],
    peers: Sequence[str],
    rounds: int,
    ceilings: dict[str, float],
) -> LayerResult:
    """Measure the kernels, DeepGEMM's products and ``peers`` (of ``PEERS``) on the GPU of ``tensors``.

    All are timed in the same rounds.

    Raises:
        RuntimeError: the kernels disagree with torch, or recorded a fault.
    """
    device, watch = tensors.x.device, Stopwatch()
    with watch.stage("check"):
        layer, peak_bytes, differences = check_kernels(size, tensors, dw_dtype, backwards)
    peer_contenders, peer_peaks, failures = make_peers(tensors, peers, watch)
    with watch.stage("capture"):
        graphs, launches = kernel_contenders(layer, backwards)
        products = gemm_contender(size, device)
    with watch.stage("rounds"):
        spreads = interleave([*graphs, products, *launches, *peer_contenders], repeats=rounds, settle=SETTLE)
    with watch.stage("host times"):
        host: dict[str, float] = {}
        for contender in (*launches, *peer_contenders):
            host |= host_times(contender, HOST_ROUNDS, HOST_CALLS)
    layer.rank.check()
    return LayerResult(
        size=size,
        dw_dtype=dw_dtype,
        spreads=spreads,
        ceilings=ceilings,
        host_us=host,
        peak_bytes=peak_bytes | peer_peaks,
        memory=layer.memory(),
        differences=differences,
        seconds=watch.seconds,
        failures=failures,
    )
