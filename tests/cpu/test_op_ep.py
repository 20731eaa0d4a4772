"""The op and the module over processes: autograd equals that of one process holding everything."""

from __future__ import annotations

import os
import random
import tempfile
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_world import GlooWorld
from op_helpers import (
    Inputs,
    Shape,
    assert_close,
    call,
    expected_forward,
    make_buffer,
    make_inputs,
)
from test_op_checkpoint import MODES
from test_op_compile import INDUCTOR
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from prime_kernels import MegaMoE
from prime_kernels.module import release_buffers

TOLERANCE = 1e-10
LOCAL_EXPERTS = 3
LAYERS = 2


def shape_of(size: int) -> Shape:
    return Shape(experts=LOCAL_EXPERTS * size, topk=2, hidden=6, inter=5, tokens=8, shared_inter=3)


def global_layers(size: int, num_tokens: int) -> list[Inputs]:
    """Layers as one process holds them, for all ranks' tokens; the model's x is the first layer's."""
    return [make_inputs(shape_of(size), num_tokens, shared=True, seed=seed) for seed in range(LAYERS)]


def local_part(layer: Inputs, rank: int, counts: tuple[int, ...]) -> Inputs:
    start = sum(counts[:rank])
    tokens = slice(start, start + counts[rank])
    experts = slice(rank * LOCAL_EXPERTS, (rank + 1) * LOCAL_EXPERTS)

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_()

    return Inputs(
        leaf(layer.x[tokens]), layer.topk_idx[tokens], leaf(layer.topk_weights[tokens]),
        leaf(layer.gate_up[experts]), leaf(layer.down[experts]),
        (leaf(layer.shared[0]), leaf(layer.shared[1])),
    )  # fmt: skip


def run_model(layers: list[Inputs], function: Any, mode: str | None = None) -> Tensor:
    def block(hidden: Tensor, layer: Inputs) -> Tensor:
        return hidden + function(replace(layer, x=hidden.tanh())).sin()

    hidden = layers[0].x
    for layer in layers:
        hidden = block(hidden, layer) if mode is None else checkpoint(block, hidden, layer, **MODES[mode])
    return hidden


def grads_of(layers: list[Inputs]) -> list[list[Tensor]]:
    """dx of the model, then dtopk, dgate_up, ddown and the shared expert's two of each layer."""
    return [[layers[0].x.grad]] + [[leaf.grad for leaf in layer.leaves()[1:]] for layer in layers]


def rank_step(
    rank: int, size: int, counts: tuple[int, ...], mode: str | None, backend: str | None,
    keep: str | None = None,
) -> tuple[Tensor, list[list[Tensor]]]:  # fmt: skip
    """One rank's part of the model: y, and what :func:`grads_of` gives."""
    layers = [local_part(layer, rank, counts) for layer in global_layers(size, sum(counts))]
    layer = partial(call, buffer=make_buffer(shape_of(size)), keep=keep)
    function = partial(run_model, function=layer, mode=mode)
    if backend is not None:
        torch._dynamo.reset()
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
        function = torch.compile(function, backend=backend, fullgraph=True)
    y = function(layers)
    y.square().sum().backward()
    return y.detach(), grads_of(layers)


def check(results: list[tuple[Tensor, list[list[Tensor]]]], counts: tuple[int, ...]) -> None:
    layers = global_layers(len(counts), sum(counts))
    y = run_model(layers, expected_forward)
    y.square().sum().backward()
    assert_close(torch.cat([y for y, _ in results]), y.detach(), TOLERANCE, "y")
    grads = [grads for _, grads in results]
    assert_close(torch.cat([grad[0][0] for grad in grads]), layers[0].x.grad, TOLERANCE, "dx")
    for index, layer in enumerate(layers, start=1):
        parts = list(zip(*(grad[index] for grad in grads), strict=True))
        for part, leaf in zip(parts[:3], layer.leaves()[1:4], strict=True):  # dtopk, dgate_up, ddown
            reference = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            assert_close(torch.cat(part), reference, TOLERANCE, f"layer {index}")
        for part, leaf in zip(parts[3:], layer.shared, strict=True):  # replicated: each rank has its tokens'
            assert_close(torch.stack(part).sum(0), leaf.grad, TOLERANCE, f"layer {index}, shared")


TWO_RANKS = pytest.mark.parametrize("world", [2], indirect=True, ids=["2ranks"])


@TWO_RANKS
@pytest.mark.parametrize("counts", [(5, 3), (0, 8), (8, 0), (0, 0), (1, 8)])
def test_two_ranks(world: GlooWorld, counts: tuple[int, ...]) -> None:
    check(world.run(rank_step, counts, None, None), counts)


@pytest.mark.parametrize("world", [4], indirect=True, ids=["4ranks"])
def test_four_ranks(world: GlooWorld) -> None:
    counts = (3, 0, 8, 1)
    check(world.run(rank_step, counts, None, None), counts)


@TWO_RANKS
@pytest.mark.parametrize("mode", list(MODES))
def test_checkpointing(world: GlooWorld, mode: str) -> None:
    check(world.run(rank_step, (7, 0), mode, None), (7, 0))


@TWO_RANKS
@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
@pytest.mark.parametrize("mode", [None, "full"])
def test_compiled_with_a_rank_without_tokens(world: GlooWorld, mode: str | None, backend: str) -> None:
    """It hangs where the compiler drops or repeats calls on one rank only."""
    check(world.run(rank_step, (7, 0), mode, backend), (7, 0))


def _jittery_steps(rank: int, size: int, steps: int) -> float:
    """Random counts, delays and routings; the worst deviation from one process, looked at every 10 steps."""
    buffer = make_buffer(shape_of(size))
    counts_of = random.Random(0)
    delays = random.Random(rank)
    worst = 0.0
    for step in range(steps):
        counts = tuple(counts_of.choice([0, 1, 4, 8]) for _ in range(size))
        layer = make_inputs(shape_of(size), sum(counts), shared=True, seed=step)
        part = local_part(layer, rank, counts)
        if delays.random() < 0.2:
            time.sleep(0.01 * delays.random())
        y = call(part, buffer)
        if delays.random() < 0.2:
            time.sleep(0.01 * delays.random())
        y.sum().backward()
        if step % 10 == 0:
            reference = expected_forward(layer)
            reference.sum().backward()
            start = sum(counts[:rank])
            experts = slice(rank * LOCAL_EXPERTS, (rank + 1) * LOCAL_EXPERTS)
            worst = max(
                worst,
                (y - reference[start : start + counts[rank]]).abs().sum().item(),
                (part.gate_up.grad - layer.gate_up.grad[experts]).abs().max().item(),
            )
    return worst


@TWO_RANKS
def test_hundreds_of_steps_with_jitter(world: GlooWorld) -> None:
    assert max(world.run(_jittery_steps, 200)) < 1e-9


# ---- MegaMoE in a group


def _module(size: int, group: Any = None) -> MegaMoE:
    shape = shape_of(size)
    return MegaMoE(
        shape.experts, shape.topk, shape.hidden, shape.inter, max_tokens_per_rank=shape.tokens, group=group,
        dtype=torch.float64,
    )  # fmt: skip


def _two_groups(rank: int, size: int) -> tuple[float, int]:
    """Data parallel over expert-parallel pairs: ranks 0, 1 and ranks 2, 3."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair, member = divmod(rank, 2)
    experts = _module(2, groups[pair])
    counts = ((3, 5), (0, 4))[pair]
    layer = make_inputs(shape_of(2), sum(counts), seed=pair)
    part = local_part(replace(layer, shared=(layer.down[0], layer.down[0])), member, counts)
    with torch.no_grad():
        experts.gate_up.copy_(part.gate_up)
        experts.down.copy_(part.down)
    for _ in range(2):  # the buffer serves a second step
        experts.zero_grad()
        y = experts(part.x, part.topk_idx, part.topk_weights)
        y.sum().backward()
    reference = expected_forward(layer)
    reference.sum().backward()
    start = sum(counts[:member])
    mine = slice(member * LOCAL_EXPERTS, (member + 1) * LOCAL_EXPERTS)
    error = (y - reference[start : start + counts[member]]).abs().sum()
    error += (experts.gate_up.grad - layer.gate_up.grad[mine]).abs().sum()
    error += (experts.down.grad - layer.down.grad[mine]).abs().sum()
    release_buffers()
    return error.item(), experts.num_local_experts


@pytest.mark.parametrize("world", [4], indirect=True, ids=["4ranks"])
def test_module_in_two_groups(world: GlooWorld) -> None:
    for error, local_experts in world.run(_two_groups):
        assert error < 1e-9
        assert local_experts == LOCAL_EXPERTS


def _new_group(rank: int, size: int) -> bool:
    """The layer moves to a group made anew, and refuses one of another size."""
    group = dist.new_group([0, 1])
    experts = _module(size, group)
    layer = local_part(make_inputs(shape_of(size), 6, shared=True), rank, (4, 2))
    routed = (layer.x, layer.topk_idx, layer.topk_weights)
    y = experts(*routed)
    experts.buffer.destroy()
    dist.destroy_process_group(group)
    release_buffers()
    alone = [dist.new_group([0]), dist.new_group([1])]
    experts.group = alone[rank]
    with pytest.raises(
        ValueError, match=r"holds 3 of 6 experts, its group has 1 rank\(s\); set a group of 2"
    ):
        experts(*routed)
    experts.group = None  # the default group
    assert experts.group is None
    return torch.equal(experts(*routed), y)


@TWO_RANKS
def test_module_moves_to_a_new_group(world: GlooWorld) -> None:
    assert world.run(_new_group) == [True, True]


def _indivisible(rank: int, size: int) -> str:
    with pytest.raises(ValueError) as error:
        MegaMoE(3, 2, 6, 5, max_tokens_per_rank=8)
    return str(error.value)


@TWO_RANKS
def test_experts_that_do_not_divide(world: GlooWorld) -> None:
    for message in world.run(_indivisible):
        assert message.startswith("num_experts is 3, needs a multiple of the group's 2 ranks")
