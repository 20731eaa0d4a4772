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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from prime_kernels.integrations.grouped_experts import allocate_main_grads
from prime_kernels.module import release_buffers

EXACT = 1e-10

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
