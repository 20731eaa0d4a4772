"""The prime-rl dispatcher on two ranks: experts as DTensors, FSDP2 around them, accumulators in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_world import GlooWorld
from op_helpers import assert_close
from prime_rl_cases import (
    EXPERTS,
    HIDDEN,
    Experts,
    FusedExperts,
    Layer,
    expected,
    make_dispatcher,
    make_tokens,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from prime_kernels.integrations.fsdp_accumulators import accumulate_in_fsdp
from prime_kernels.integrations.grouped_experts import allocate_main_grads
from prime_kernels.module import release_buffers

EXACT = 1e-10
BF16_TOLERANCE = 1e-2  # of a loop in float64 that rounds nothing

two_ranks = pytest.mark.parametrize("world", [2], indirect=True, ids=["2ranks"])


def make_mesh(size: int) -> DeviceMesh:
    return DeviceMesh("cpu", list(range(size)))


def distribute_experts(experts: nn.Module, mesh: DeviceMesh, placement: Any = None) -> nn.Module:
    """Parameters become DTensors split over experts, as an expert-parallel plan makes them."""
    for name, weight in list(experts.named_parameters()):
        placements = [placement or Shard(0)]
        setattr(experts, name, nn.Parameter(distribute_tensor(weight.detach(), mesh, placements)))
    return experts


def global_expectation(
    experts: nn.Module, batches: list[tuple[Tensor, Tensor, Tensor]]
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """y and the gradients of each rank's batch, on one process that has all experts."""
    results = [expected(experts, *batch, torch.ones_like(batch[0])) for batch in batches]
    return [y for y, _ in results], [grads for _, grads in results]


def own(rank: int, size: int, grad: Tensor) -> Tensor:
    """The experts of one rank."""
    return grad.chunk(size)[rank]


def _dtensor_experts(rank: int, size: int, kind: type[nn.Module], accumulate: bool, compiled: bool) -> None:
    mesh = make_mesh(size)
    whole = kind()
    layer = Layer(distribute_experts(kind(), mesh), make_dispatcher())
    if accumulate:
        allocate_main_grads(layer.experts, torch.float64)
    call: Any = layer
    if compiled:
        torch._dynamo.reset()
        layer.dispatcher.build_buffer(layer.experts)
        call = torch.compile(layer, backend="aot_eager", fullgraph=True)
    totals: dict[str, Tensor] = {}
    for step in range(2):
        batches = [
            make_tokens((5, 0, 8)[(member + step) % 3], seed=member + 10 * step) for member in range(size)
        ]
        x, scores, indices = batches[rank]
        y = call(x, scores, indices)
        assert not isinstance(y, DTensor)
        y.sum().backward()
        ys, grads = global_expectation(whole, batches)
        assert_close(y.detach(), ys[rank], EXACT)
        assert_close(x.grad, grads[rank]["x"], EXACT)
        assert_close(scores.grad, grads[rank]["scores"], EXACT)
        for name, _ in whole.named_parameters():
            totals[name] = totals.get(name, 0) + sum(grad[name] for grad in grads)
    for name, weight in layer.experts.named_parameters():
        if accumulate:
            assert weight.grad is None
            got = weight.main_grad
        else:
            assert isinstance(weight.grad, DTensor)
            assert weight.grad.placements == (Shard(0),)
            got = weight.grad.to_local()
        assert_close(got, own(rank, size, totals[name]), EXACT, name)
    release_buffers()


@two_ranks
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("accumulate", [False, True], ids=["returned", "main_grad"])
@pytest.mark.parametrize("kind", [Experts, FusedExperts])
def test_experts_as_dtensors(
    world: GlooWorld, kind: type[nn.Module], accumulate: bool, compiled: bool
) -> None:
    """Tokens of both ranks, in unequal numbers, through experts that are split over them."""
    world.run(_dtensor_experts, kind, accumulate, compiled)


def _dtensor_tokens(rank: int, size: int, leading: tuple[int, ...], split: int) -> None:
    mesh = make_mesh(size)
    whole = Experts()
    layer = Layer(distribute_experts(Experts(), mesh), make_dispatcher())
    tensors = [tensor.detach() for tensor in make_tokens(*leading)]
    x, scores, indices = (distribute_tensor(tensor, mesh, [Shard(split)]) for tensor in tensors)
    x.requires_grad_()
    y = layer(x, scores, indices)
    assert isinstance(y, DTensor)
    assert (y.shape, y.placements) == (x.shape, x.placements)
    y.sum().backward()
    wanted_y, wanted = expected(whole, *tensors, torch.ones(*leading, HIDDEN))
    assert_close(y.full_tensor().detach(), wanted_y, EXACT)
    assert_close(x.grad.full_tensor(), wanted["x"], EXACT)
    assert_close(layer.experts.w3.grad.full_tensor(), wanted["w3"], EXACT)
    release_buffers()


@two_ranks
@pytest.mark.parametrize(("leading", "split"), [((6,), 0), ((5,), 0), ((2, 3), 0), ((2, 4), 1)])
def test_tokens_as_dtensors(world: GlooWorld, leading: tuple[int, ...], split: int) -> None:
    """Even and uneven splits over the batch and over the sequence."""
    world.run(_dtensor_tokens, leading, split)


def _refusals(rank: int, size: int) -> None:
    mesh = make_mesh(size)
    tokens = make_tokens(4)

    def run(experts: nn.Module, x: Tensor = tokens[0], **kwargs: Any) -> Tensor:
        return make_dispatcher(**kwargs).run(x, *tokens[1:], experts, score_before_experts=False)

    sharded = distribute_experts(Experts(), mesh)
    for placement in (Shard(1), Replicate()):
        with pytest.raises(ValueError, match=r"w1 is .* mesh dim 0 of 2 ranks.*whole experts.*Shard\(0\)"):
            run(distribute_experts(Experts(), mesh, placement))
    for placement in (Shard(1), Replicate()):
        x = distribute_tensor(tokens[0].detach(), mesh, [placement])
        with pytest.raises(ValueError, match=r"x is .* over mesh dim 0 of 2 ranks.*whole tokens.*Shard\(0\)"):
            run(sharded, x)
    with pytest.raises(ValueError, match="this rank holds 4 experts, 4 over 2 ranks are 2 each"):
        run(Experts())
    with pytest.raises(ValueError, match="num_experts is 5, needs a multiple of the group's 2 ranks"):
        run(sharded, num_experts=EXPERTS + 1)
    alone = [dist.new_group([member]) for member in range(size)][rank]
    with pytest.raises(ValueError, match="this rank holds 2 experts, 4 over 1 ranks are 4 each"):
        run(sharded, group=alone)
    release_buffers()


@two_ranks
def test_what_is_not_whole_experts_or_tokens_is_refused(world: GlooWorld) -> None:
    world.run(_refusals)


# ---- FSDP2


class Block(nn.Module):
    """Experts and another parameter, which FSDP reduces in the same group."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer
        self.scale = nn.Parameter(torch.ones(HIDDEN, dtype=torch.float64))

    def forward(self, x: Tensor, scores: Tensor, indices: Tensor) -> Tensor:
        return self.layer(x * self.scale, scores, indices)


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *inputs: Tensor) -> Tensor:
        return checkpoint(self.block, *inputs, use_reentrant=False)


def _fsdp_accumulators(rank: int, size: int, kind: type[nn.Module], mode: str) -> None:
    """Two data parallel ranks with all experts each; two micro-batches, of which the second reduces."""
    group = [dist.new_group([member]) for member in range(size)][rank]
    whole = kind()
    block = Block(Layer(kind(), make_dispatcher(group=group)))
    if mode == "compiled":
        torch._dynamo.reset()
        block.layer.dispatcher.build_buffer(block.layer.experts)
        block.layer.compile(backend="aot_eager", fullgraph=True)
    fully_shard(block, mesh=make_mesh(size))
    model = Checkpointed(block) if mode == "checkpointed" else block
    accumulate_in_fsdp(model, [block.layer.experts])
    totals: dict[str, Tensor] = {}
    for step in range(4):
        block.set_requires_gradient_sync(step % 2 == 1)
        batches = [make_tokens((5, 0, 8)[(member + step) % 3], seed=member + 10 * step) for member in (0, 1)]
        x, scores, indices = batches[rank]
        y = model(x, scores, indices)
        y.sum().backward()
        for batch in batches:
            grads = expected(whole, *batch, torch.ones_like(batch[0]))[1]
            grads["scale"] = (grads["x"] * batch[0].detach()).sum(0)
            for name in [name for name, _ in whole.named_parameters()] + ["scale"]:
                totals[name] = totals.get(name, 0) + grads[name] / size
        held = [p for p in fsdp_parameters(block) if p.unsharded_accumulated_grad is not None]
        assert bool(held) == (step % 2 == 0)  # FSDP holds them to the reduce and no longer
        assert not any(hasattr(p._unsharded_param, "main_grad") for p in fsdp_parameters(block))
    parameters = {"scale": block.scale, **dict(block.layer.experts.named_parameters())}
    for name, parameter in parameters.items():
        assert_close(parameter.grad.full_tensor(), totals[name], EXACT, name)
    release_buffers()


def fsdp_parameters(module: Any) -> list[Any]:
    return module._get_fsdp_state()._fsdp_param_group.fsdp_params


@two_ranks
@pytest.mark.parametrize("mode", ["plain", "checkpointed", "compiled"])
@pytest.mark.parametrize("kind", [Experts, FusedExperts])
def test_gradients_go_to_the_accumulators_of_fsdp(
    world: GlooWorld, kind: type[nn.Module], mode: str
) -> None:
    world.run(_fsdp_accumulators, kind, mode)


def _no_gradient_is_returned(rank: int, size: int) -> None:
    """fp32 parameters and bf16 compute: the gradients of four micro-batches are in FSDP's accumulators."""
    group = [dist.new_group([member]) for member in range(size)][rank]
    experts = Experts(hidden=64, inter=128, dtype=torch.float32)
    rounded = Experts(hidden=64, inter=128, dtype=torch.bfloat16)
    layer = Layer(experts, make_dispatcher(group=group))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    fully_shard(layer, mesh=make_mesh(size), mp_policy=policy)
    accumulate_in_fsdp(layer, [experts])
    layer.set_requires_gradient_sync(False)
    totals: dict[str, Tensor] = {}
    for step in range(4):
        x, scores, indices = make_tokens(5, hidden=64, dtype=torch.bfloat16, seed=step)
        layer(x, scores, indices).sum().backward()
        assert all(p._unsharded_param.grad is None for p in fsdp_parameters(layer))
        grads = expected(rounded, x, scores, indices, torch.ones_like(x))[1]
        for name in ("w1", "w2", "w3"):
            totals[name] = totals.get(name, 0) + grads[name]
    for parameter in fsdp_parameters(layer):
        accumulator = parameter.unsharded_accumulated_grad
        assert accumulator.dtype == torch.float32
        name = parameter._module_info.param_name
        assert_close(accumulator, totals[name], BF16_TOLERANCE, name)
    with torch.no_grad():
        layer(x, scores, indices)
    with pytest.raises(ValueError, match="no FSDP module of the model manages Experts"):
        accumulate_in_fsdp(layer, [Experts()])
    release_buffers()


@two_ranks
def test_accumulators_of_mixed_precision_are_fp32(world: GlooWorld) -> None:
    world.run(_no_gradient_is_returned)


def _expert_parallel_and_fsdp(rank: int, size: int, kind: type[nn.Module], accumulate: bool) -> None:
    """Two by two: experts split over the inner mesh dim, sharded by FSDP over the outer one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "experts"))
    whole = kind()
    layer = Layer(
        distribute_experts(kind(), mesh["experts"]), make_dispatcher(group=mesh.get_group("experts"))
    )
    fully_shard(layer, mesh=mesh["data"])
    if accumulate:
        accumulate_in_fsdp(layer, [layer.experts])
    batches = [make_tokens(3 + member, seed=member) for member in range(size)]
    x, scores, indices = batches[rank]
    for last in (False, True):
        layer.set_requires_gradient_sync(last)
        y = layer(x, scores, indices)
        y.sum().backward()
        returned = [parameter._unsharded_param.grad is not None for parameter in fsdp_parameters(layer)]
        assert last or returned == [not accumulate] * len(returned)
    ys, grads = global_expectation(whole, batches)
    assert_close(y.detach(), ys[rank], EXACT)
    assert_close(x.grad, 2 * grads[rank]["x"], EXACT)
    for name, weight in layer.experts.named_parameters():
        total = sum(grad[name] for grad in grads)  # twice, and FSDP averages over the two data ranks
        assert_close(weight.grad.full_tensor(), total, EXACT, name)
    release_buffers()


@pytest.mark.parametrize("world", [4], indirect=True, ids=["4ranks"])
@pytest.mark.parametrize("accumulate", [False, True], ids=["returned", "accumulated"])
@pytest.mark.parametrize("kind", [Experts, FusedExperts])
def test_expert_parallel_inside_fsdp(world: GlooWorld, kind: type[nn.Module], accumulate: bool) -> None:
    world.run(_expert_parallel_and_fsdp, kind, accumulate)
