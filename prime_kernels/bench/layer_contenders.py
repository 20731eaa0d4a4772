"""What ``bench layer`` times against each other: the kernels, DeepGEMM's products and torch's layers."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from .. import gemm, sm90
from ..backward import sm90_bf16 as backward_kernel
from ..exchange import ExchangeShape
from ..forward import sm90_bf16 as forward_kernel
from ..jit import KernelSource, compile_kernel
from ..sm90 import Sm90Rank, make_virtual_ranks
from .gemm import check_case, gemm_cases
from .layer_bars import Pass, pass_pairs
from .layer_case import LayerSize, LayerTensors
from .rounds import Captured, Contender
from .torch_moe import torch_moe

PEERS = ("eager", "compile")
DW_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GRAPH, LAUNCH = "kernel graph", "kernel launch"


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
        self.stage_forward()
        self.stage_backward()
        self.y, self.dx = torch.empty_like(tensors.x), torch.empty_like(tensors.x)
        self.dtopk = torch.empty_like(tensors.topk_weights)
        self.dw13 = torch.empty_like(tensors.gate_up, dtype=dw_dtype)
        self.dw2 = torch.empty_like(tensors.down, dtype=dw_dtype)
        self.z: Tensor | None = None

    def stage_forward(self) -> None:
        """Copy x and the routing into symmetric memory, where the kernels find them."""
        self.rank.x.copy_(self.tensors.x)
        self.rank.topk_idx.copy_(self.tensors.topk_idx)
        self.rank.topk_weights.copy_(self.tensors.topk_weights)

    def stage_backward(self) -> None:
        """Copy dy into symmetric memory."""
        self.rank.dy.copy_(self.tensors.dy)

    def make_room_for_z(self) -> None:
        """Needed by the passes that keep z."""
        if self.z is None:
            self.z = self.rank.empty_z()

    def route_plan(self) -> None:
        """The small kernels in front of the forward, alone."""
        self.rank.route_plan(self.tensors.x.shape[0], self.rank.forward_rounds)

    def run(self, what: Pass) -> None:
        """One pass over the staged tokens, route plan included; asynchronous."""
        weights = (self.tensors.gate_up, self.tensors.down)
        if what.keeps_z and self.z is None:
            raise RuntimeError(f"{what.name} needs z; call make_room_for_z first")
        z = self.z if what.keeps_z else None
        if what.direction == "forward":
            self.rank.forward(self.y, *weights, z=z)
        else:
            self.rank.backward(self.dx, self.dw13, self.dw2, self.dtopk, *weights, z=z)

    def memory(self) -> dict[str, int]:
        """Bytes of what the rank holds: symmetric memory, each pool, and z where it was kept."""
        parts = {"symmetric": self.rank.storage}
        pools = vars(self.rank.pools).items()
        parts |= {f"pool {name}": value for name, value in pools if isinstance(value, Tensor)}
        if self.z is not None:
            parts["z, of each layer"] = self.z
        return {name: value.numel() * value.element_size() for name, value in parts.items()}

    def outputs(self) -> dict[str, Tensor]:
        """What the last calls wrote, by name."""
        return {"y": self.y, "dx": self.dx, "dtopk": self.dtopk, "dW13": self.dw13, "dW2": self.dw2}

    def spoil(self) -> None:
        """NaN in every output, so that what a pass does not write is seen."""
        for output in self.outputs().values():
            output.fill_(float("nan"))


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


def kernel_sources(
    size: LayerSize, backwards: Sequence[str], num_sms: int, trace: bool
) -> list[KernelSource]:
    """Every kernel of ours and DeepGEMM's that a measurement launches."""
    sources = [sm90.plan_source(entry) for entry in sm90.PLAN_ENTRIES]
    modules = {"forward": forward_kernel, "backward": backward_kernel}
    for traced, pair in itertools.product((False, True) if trace else (False,), pass_pairs(backwards)):
        sources += [
            modules[item.direction].source(size.hidden, size.intermediate, False, item.keeps_z, traced)
            for item in pair
        ]
    return sources + gemm.kernel_sources(size.hidden, size.intermediate, size.experts, num_sms)


def compile_all(sources: Sequence[KernelSource]) -> None:
    """Fill the kernel cache, all cores at once."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_kernel, sources))


def gemm_contender(size: LayerSize, device: torch.device) -> Contender:
    """DeepGEMM's products, each in a graph of its own, after a look at their results."""
    calls = []
    for case in gemm_cases(size.gemm_load(), device):
        case.run()
        check_case(case)
        calls.append((case.name, Captured(case.run)))
    return Contender(tuple(calls))


def kernel_contenders(
    layer: KernelLayer, backwards: Sequence[str]
) -> tuple[list[Contender], list[Contender]]:
    """The kernels in CUDA graphs (and what is timed alone), and the same launched from Python."""
    graphs, launches = [], []
    for pair in pass_pairs(backwards):
        calls = [(item.name, functools.partial(layer.run, item)) for item in pair]
        graphs.append(Contender(tuple((f"{GRAPH} {name}", Captured(call)) for name, call in calls)))
        launches.append(Contender(tuple((f"{LAUNCH} {name}", call) for name, call in calls)))
    alone = (
        ("route plan", layer.route_plan),
        ("staging x", layer.stage_forward),
        ("staging dy", layer.stage_backward),
    )
    graphs.append(Contender(tuple((name, Captured(call)) for name, call in alone)))
    return graphs, launches
