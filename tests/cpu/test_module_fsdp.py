"""FSDP2 (``fully_shard``) over `MegaMoE`, and over a module whose forward calls the op itself."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_world import GlooWorld
from op_helpers import BF16, SMALL, Inputs, Shape, assert_close, expected_forward, make_buffer, make_inputs
from test_op_checkpoint import MODES
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from prime_kernels import MegaMoE, SymmBuffer, mega_moe
from prime_kernels.module import release_buffers

TOLERANCE = 1e-10
LAYERS = 2
STEPS = 3


class CallsTheOp(nn.Module):
    """Experts of a framework: the weights are its own, the op is called inside its forward."""

    def __init__(self, gate_up: Tensor, down: Tensor, buffer: SymmBuffer) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(gate_up.detach().clone())
        self.down = nn.Parameter(down.detach().clone())
        self.buffer = buffer

    def forward(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        return mega_moe(x, topk_idx, topk_weights, self.gate_up, self.down, buffer=self.buffer)


def make_experts(kind: str, layer: Inputs, shape: Shape, buffer: SymmBuffer) -> nn.Module:
    if kind == "op":
        return CallsTheOp(layer.gate_up, layer.down, buffer)
    dtype = layer.down.dtype
    experts = MegaMoE(shape.experts, shape.topk, shape.hidden, shape.inter, buffer=buffer, dtype=dtype)
    with torch.no_grad():
        experts.gate_up.copy_(layer.gate_up)
        experts.down.copy_(layer.down)
    return experts


def expected_layer(weights: Inputs, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
    return expected_forward(Inputs(x, topk_idx, topk_weights, weights.gate_up, weights.down))


class Block(nn.Module):
    """What a framework checkpoints: the experts and the work around them."""

    def __init__(self, experts: Any, mode: str | None = None) -> None:
        super().__init__()
        self.experts = experts
        self.mode = mode

    def forward(self, hidden: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        def inner(hidden: Tensor) -> Tensor:
            return hidden + self.experts(hidden.tanh(), topk_idx, topk_weights).sin()

        return checkpoint(inner, hidden, **MODES[self.mode]) if self.mode in MODES else inner(hidden)


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, inputs: Inputs) -> Tensor:
        hidden = inputs.x
        for block in self.blocks:
            hidden = block(hidden, inputs.topk_idx, inputs.topk_weights)
        return hidden


def _sharded_steps(rank: int, size: int, kind: str, mode: str | None, unit: str) -> None:
    """Data parallel ranks, each with all experts (an EP group of one), parameters sharded over them."""
    group = [dist.new_group([member]) for member in range(size)][rank]
    shape = replace(SMALL, experts=4)
    buffer = make_buffer(shape, group=group)
    weights = [make_inputs(shape, 1, seed=seed) for seed in range(LAYERS)]
    reference_model = Stack([Block(partial(expected_layer, layer)) for layer in weights])
    model = Stack([Block(make_experts(kind, layer, shape, buffer), mode) for layer in weights])
    mesh = DeviceMesh("cpu", list(range(size)))
    for block in model.blocks:
        if mode == "compile":
            block.experts.compile(backend="aot_eager", fullgraph=True)
        fully_shard(block if unit == "block" else block.experts, mesh=mesh)
    fully_shard(model, mesh=mesh)
    totals = [[torch.zeros_like(w) for w in (layer.gate_up, layer.down)] for layer in weights]
    for step in range(STEPS):
        # Every rank computes the reference of all ranks' batches: FSDP averages their gradients.
        for member in range(size):
            num_tokens = (7, 0, 3, 8)[(member + step) % 4]
            batch = make_inputs(shape, num_tokens, seed=100 + 10 * step + member)
            if member == rank:
                y = model(batch)
                y.square().sum().backward()
            reference = replace(batch, x=batch.x.detach().clone().requires_grad_())
            expected = reference_model(reference)
            expected.square().sum().backward()
            if member == rank:
                assert_close(y.detach(), expected.detach(), TOLERANCE, "y")
                assert_close(batch.x.grad, reference.x.grad, TOLERANCE, "dx")
        for layer, total in zip(weights, totals, strict=True):
            for index, weight in enumerate((layer.gate_up, layer.down)):
                if weight.grad is not None:
                    total[index] += weight.grad / size
                    weight.grad = None
    for block, total in zip(model.blocks, totals, strict=True):
        for parameter, grad in zip(block.experts.parameters(), total, strict=True):
            assert_close(parameter.grad.full_tensor(), grad, TOLERANCE, "dW")
    release_buffers()


@pytest.mark.parametrize("world", [2], indirect=True, ids=["2ranks"])
@pytest.mark.parametrize("kind", ["op", "module"])
@pytest.mark.parametrize(
    ("mode", "unit"),
    [
        (None, "experts"),
        ("compile", "experts"),
        ("compile", "block"),
        ("full", "experts"),
        ("full", "block"),
        ("selective", "block"),
    ],
)
def test_sharded_over_data_parallel_ranks(world: GlooWorld, kind: str, mode: str | None, unit: str) -> None:
    """The hooks of FSDP on the experts, inside of a checkpointed region, and on a block that checkpoints."""
    world.run(_sharded_steps, kind, mode, unit)


def _mixed_precision(rank: int, size: int) -> list[str]:
    """fp32 parameters, bf16 compute: the op sees bf16 weights and the gradients are reduced in fp32."""
    group = [dist.new_group([member]) for member in range(size)][rank]
    buffer = make_buffer(BF16, torch.bfloat16, group=group)
    layer = make_inputs(BF16, 7, torch.float32)
    experts = make_experts("module", layer, BF16, buffer)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    fully_shard(experts, mesh=DeviceMesh("cpu", list(range(size))), mp_policy=policy)
    x = layer.x.detach().bfloat16().requires_grad_()
    y = experts(x, layer.topk_idx, layer.topk_weights)
    y.sum().backward()
    rounded = layer.map(lambda leaf: leaf.bfloat16().float())
    rounded.topk_weights = layer.topk_weights.detach()
    rounded = rounded.double()
    reference = expected_forward(rounded, bf16=True)
    reference.sum().backward()
    assert_close(y.detach(), reference.detach(), 5e-3, "y")
    assert_close(experts.gate_up.grad.full_tensor(), rounded.gate_up.grad, 5e-3, "dgate_up")
    assert_close(experts.down.grad.full_tensor(), rounded.down.grad, 5e-3, "ddown")
    return [str(y.dtype), str(experts.gate_up.dtype), str(experts.gate_up.grad.dtype)]


@pytest.mark.parametrize("world", [2], indirect=True, ids=["2ranks"])
def test_mixed_precision(world: GlooWorld) -> None:
    for dtypes in world.run(_mixed_precision):
        assert dtypes == ["torch.bfloat16", "torch.float32", "torch.float32"]


def _experts_and_data_parallel(rank: int, size: int) -> None:
    """Two pairs: experts over the ranks of a pair, parameters sharded over equal members of the pairs."""
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    data, member = mesh["data"].get_local_rank(), mesh["expert"].get_local_rank()
    buffer = make_buffer(SMALL, group=mesh["expert"].get_group())
    counts = ((3, 5), (0, 4))
    weights = make_inputs(SMALL, 1)
    mine = slice(2 * member, 2 * member + 2)
    local = replace(weights, gate_up=weights.gate_up[mine].detach(), down=weights.down[mine].detach())
    experts = make_experts("module", local, SMALL, buffer)
    fully_shard(experts, mesh=mesh["data"])
    for pair in range(2):
        batch = make_inputs(SMALL, sum(counts[pair]), seed=10 + pair)
        batch = replace(batch, gate_up=weights.gate_up, down=weights.down)
        reference = expected_forward(batch)
        reference.square().sum().backward()
        if pair == data:
            start = sum(counts[pair][:member])
            rows = slice(start, start + counts[pair][member])
            part = batch.tokens(rows)
            y = experts(part.x, part.topk_idx, part.topk_weights)
            y.square().sum().backward()
            assert_close(y.detach(), reference.detach()[rows], TOLERANCE, "y")
            assert_close(part.x.grad, batch.x.grad[rows], TOLERANCE, "dx")
    for parameter, weight in ((experts.gate_up, weights.gate_up), (experts.down, weights.down)):
        assert_close(parameter.grad.full_tensor(), weight.grad[mine] / 2, TOLERANCE, "dW")


@pytest.mark.parametrize("world", [4], indirect=True, ids=["4ranks"])
def test_experts_and_data_parallel(world: GlooWorld) -> None:
    world.run(_experts_and_data_parallel)
