"""Runs one layer in every way that ``bench layer`` compares, on one GPU, in one process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..exchange import ExchangeShape
from ..sm90 import Sm90Rank, make_virtual_ranks
from .gemm import BACKWARD, FORWARD, check_case, gemm_cases, measure_ceilings, relative_error
from .layer_case import LayerSize, LayerTensors
from .rounds import Captured, Contender, Spread, interleave
from .timing import host_us
from .torch_moe import torch_moe

DIRECTIONS = ("forward", "backward")
PEERS = ("eager", "compile")
# This torch lacks grouped_mm, cannot compile it, or has no memory left: reported in the table, exit code 1.
PEER_ERRORS = (RuntimeError, AttributeError, TypeError)
DW_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Two BF16 implementations that round at different places differ by about 5e-3; more than this is wrong.
MAX_DIFFERENCE = 2e-2
HOST_ROUNDS, HOST_CALLS = 5, 10


class KernelLayer:
    """The kernels on one rank that holds all experts of ``tensors``.

    Args:
        size, tensors: the layer.
        dw_dtype: of the weight gradients, which every backward overwrites.
        trace: build the kernels with their timeline.
    """

    def __init__(
        self, size: LayerSize, tensors: LayerTensors, dw_dtype: torch.dtype, trace: bool = False
    ) -> None:
        device = tensors.x.device
        shape = ExchangeShape(size.tokens, size.topk, size.hidden, size.intermediate, size.experts, ranks=1)
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.rank: Sm90Rank = make_virtual_ranks(shape, device, num_sms, trace=trace)[0]
        self.tensors = tensors
        self.rank.x.copy_(tensors.x)
        self.rank.dy.copy_(tensors.dy)
        self.rank.topk_idx.copy_(tensors.topk_idx)
        self.rank.topk_weights.copy_(tensors.topk_weights)
        self.y, self.dx = torch.empty_like(tensors.x), torch.empty_like(tensors.x)
        self.dtopk = torch.empty_like(tensors.topk_weights)
        self.dw13 = torch.empty_like(tensors.gate_up, dtype=dw_dtype)
        self.dw2 = torch.empty_like(tensors.down, dtype=dw_dtype)

    def route_plan(self) -> None:
        """The small kernels in front of the forward, alone."""
        self.rank.route_plan(self.tensors.x.shape[0], self.rank.forward_rounds)

    def run_forward(self) -> None:
        """y of the staged tokens, route plan included; asynchronous."""
        self.rank.forward(self.y, self.tensors.gate_up, self.tensors.down)

    def run_backward(self) -> None:
        """All gradients, z recomputed, route plan included; asynchronous."""
        self.rank.backward(self.dx, self.dw13, self.dw2, self.dtopk, self.tensors.gate_up, self.tensors.down)

    def memory(self) -> dict[str, int]:
        """Bytes of what the rank holds: symmetric memory, then each pool."""
        pools = {
            name: value.numel() * value.element_size()
            for name, value in vars(self.rank.pools).items()
            if isinstance(value, Tensor)
        }
        return {
            "symmetric": self.rank.storage.numel(),
            **{f"pool {name}": size for name, size in pools.items()},
        }

    def outputs(self) -> dict[str, Tensor]:
        """What the last calls wrote, by name."""
        return {"y": self.y, "dx": self.dx, "dtopk": self.dtopk, "dW13": self.dw13, "dW2": self.dw2}


class TorchLayer:
    """:func:`torch_moe` with autograd, eager or compiled."""

    def __init__(self, tensors: LayerTensors, kind: str) -> None:
        self.tensors = tensors
        self.leaves = [
            tensor.detach().requires_grad_()
            for tensor in (tensors.x, tensors.topk_weights, tensors.gate_up, tensors.down)
        ]
        self.function = (
            torch.compile(torch_moe, fullgraph=True, dynamic=False) if kind == "compile" else torch_moe
        )
        self.y: Tensor | None = None
        self.gradients: Sequence[Tensor] = ()

    def run_forward(self) -> None:
        """y, with all that its backward needs."""
        self.gradients = ()
        x, weights, gate_up, down = self.leaves
        self.y = self.function(x, self.tensors.topk_idx, weights, gate_up, down)

    def run_backward(self) -> None:
        """All gradients; consumes the last forward."""
        assert self.y is not None, "run_forward comes first"
        self.gradients = torch.autograd.grad(self.y, self.leaves, self.tensors.dy)
        self.y = self.y.detach()

    def outputs(self) -> dict[str, Tensor]:
        """What the last calls returned, by name."""
        assert self.y is not None
        return {"y": self.y, **dict(zip(("dx", "dtopk", "dW13", "dW2"), self.gradients, strict=True))}

    def release(self) -> None:
        """Drop outputs and whatever autograd holds."""
        self.y, self.gradients = None, ()


@dataclass(frozen=True)
class LayerResult:
    """Everything one run measured.

    Attributes:
        spreads: milliseconds, by "<who> <direction>" (who: "kernel graph", "kernel launch", "torch eager",
            "torch compile"), by the names of the GEMMs, and "route plan" alone.
        ceilings: of this GPU in the same run, see ``measure_ceilings``.
        host_us: host time of one call, by direction.
        peak_bytes: most memory that one forward and backward added to weights and inputs, outputs included.
        memory: bytes of each part of a rank.
        differences: relative difference of the kernels' outputs from torch eager.
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
    failures: dict[str, str] = field(default_factory=dict)

    def gemm_sum(self, direction: str) -> float:
        """Milliseconds of DeepGEMM's products of a direction, one after the other."""
        return sum(self.spreads[name].median for name in (FORWARD if direction == "forward" else BACKWARD))

    def ratio(self, who: str, direction: str) -> float:
        """Median time of ``who`` in units of :meth:`gemm_sum`."""
        return self.spreads[f"{who} {direction}"].median / self.gemm_sum(direction)

    def tflops(self, milliseconds: float, direction: str) -> float:
        """TFLOP/s of a direction, see ``FLOP_CONVENTION``."""
        flops = self.size.forward_flops if direction == "forward" else self.size.backward_flops
        return flops / milliseconds / 1e9


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


def measure_kernels(
    layer: KernelLayer, size: LayerSize, device: torch.device
) -> tuple[dict[str, Spread], dict[str, float]]:
    """Spreads of the kernels and of DeepGEMM's products, in the same rounds, and host time per call."""
    gemms = []
    for case in gemm_cases(size.gemm_load(), device):
        case.run()
        check_case(case)
        gemms.append((case.name, Captured(case.run)))
    contenders = [
        Contender(
            (
                ("kernel graph forward", Captured(layer.run_forward)),
                ("kernel graph backward", Captured(layer.run_backward)),
            )
        ),
        Contender(tuple(gemms)),
        Contender(
            (("kernel launch forward", layer.run_forward), ("kernel launch backward", layer.run_backward))
        ),
        Contender((("route plan", Captured(layer.route_plan)),)),
    ]
    spreads = interleave(contenders)
    layer.rank.check()
    calls = {"forward": layer.run_forward, "backward": layer.run_backward}
    return spreads, {name: host_us(call, HOST_ROUNDS, HOST_CALLS) for name, call in calls.items()}


def _step(layer: KernelLayer | TorchLayer) -> None:
    layer.run_forward()
    layer.run_backward()


def measure_layer(size: LayerSize, tensors: LayerTensors, dw_dtype: str, peers: Sequence[str]) -> LayerResult:
    """Measure the kernels, DeepGEMM's products and ``peers`` (of ``PEERS``) on the GPU of ``tensors``.

    Raises:
        RuntimeError: the kernels disagree with torch, or recorded a fault.
    """
    device = tensors.x.device
    ceilings = measure_ceilings(device)
    peak_bytes, failures, spreads = {}, {}, {}

    # The reference comes first: it needs a lot of memory, and leaves before anything is timed.
    eager = TorchLayer(tensors, "eager")
    _step(eager)
    expected = eager.outputs()
    del eager

    held: list[KernelLayer] = []

    def build_and_step() -> None:
        held.append(KernelLayer(size, tensors, DW_DTYPES[dw_dtype]))
        _step(held[0])

    peak_bytes["kernel"] = peak_growth(device, build_and_step)
    layer = held.pop()
    layer.rank.check()
    differences = compare(layer.outputs(), expected)
    del expected
    gc.collect()

    own_spreads, host = measure_kernels(layer, size, device)
    spreads.update(own_spreads)
    memory = layer.memory()
    del layer
    gc.collect()
    torch.cuda.empty_cache()

    contenders = []
    for name in peers:
        try:
            peer = TorchLayer(tensors, name)
            _step(peer)  # compiles
        except PEER_ERRORS as error:
            message = next(iter(str(error).splitlines()), "")
            failures[f"torch {name}"] = f"{type(error).__name__}: {message}"
            continue
        peer.release()
        peak_bytes[f"torch {name}"] = peak_growth(device, lambda peer=peer: _step(peer))  # type: ignore[misc]
        peer.release()
        calls = ((f"torch {name} forward", peer.run_forward), (f"torch {name} backward", peer.run_backward))
        contenders.append(Contender(calls))
    if contenders:
        spreads.update(interleave(contenders))
    return LayerResult(size, dw_dtype, spreads, ceilings, host, peak_bytes, memory, differences, failures)
