"""FSDP2 with expert parallelism over 4 processes: losses, gradients and weights are those of one process."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsdp_cases import (
    EP1,
    EP2,
    EP4,
    NODES,
    RANKS,
    Batch,
    Layout,
    Model,
    Setup,
    Sizes,
    Trace,
    build,
    expert_parameters,
    load,
    loss_of,
    make_batches,
    optimizer_of,
    single_model,
    state_of,
    tokens_of,
    train,
    train_single,
    weights_of,
    whole,
)
from gloo_world import GlooWorld
from op_helpers import assert_close, relative_error
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from prime_kernels import MegaMoE
from prime_kernels.integrations.expert_sharding import (
    clip_grad_norm_,
    distribute_experts,
    fully_shard_experts,
    local_part,
)
from prime_kernels.module import release_buffers

EXACT = 1e-10
BF16_TOLERANCE = 3e-2  # of a whole model that computes in bf16, against one in float64

four_ranks = pytest.mark.parametrize("world", [RANKS], indirect=True, ids=["4ranks"])


def check(results: list[Trace], expected: Trace) -> None:
    """The ranks' losses, and rank 0's whole gradients and weights."""
    for rank, trace in enumerate(results):
        assert trace.losses == pytest.approx(expected.losses[rank :: len(results)], rel=EXACT)
        assert trace.norms == pytest.approx(expected.norms, rel=EXACT)
    for step, grads in enumerate(expected.grads):
        assert list(results[0].grads[step]) == list(grads)
        for name, grad in grads.items():
            assert_close(results[0].grads[step][name], grad, EXACT, f"gradient of {name}, step {step}")
    for name, weight in expected.weights.items():
        assert_close(results[0].weights[name], weight, EXACT, name)


def _train(rank: int, size: int, setup: Setup, weights: dict[str, Tensor], micro_batches: int) -> Trace:
    model = build(setup, weights)
    trace = train(model, optimizer_of(model), setup, rank, range(2), micro_batches)
    release_buffers()
    return trace


def check_training(world: GlooWorld, setup: Setup, micro_batches: int = 1) -> None:
    single = single_model(setup.sizes)
    results = world.run(_train, setup, weights_of(single), micro_batches)
    check(results, train_single(single, optimizer_of(single), setup.sizes, range(2), micro_batches))


HSDP_EXPERTS, HSDP_EXPERTS_EP1 = Layout((2, 1, 2), "hsdp"), Layout((2, 2, 1))
BY_ROWS = Sizes(experts=6, idle_experts=1)  # FSDP cuts rows of each: the experts don't divide


@four_ranks
@pytest.mark.parametrize(
    "setup",
    [
        pytest.param(Setup(EP4), id="EP4"),
        pytest.param(Setup(EP2), id="EP2 x FSDP2"),
        pytest.param(Setup(EP1), id="FSDP4"),
        pytest.param(Setup(NODES), id="EP2 in a node, HSDP across two"),
        pytest.param(Setup(HSDP_EXPERTS), id="EP2 x two replicas"),
        pytest.param(Setup(HSDP_EXPERTS_EP1), id="FSDP2 x two replicas"),
        pytest.param(Setup(EP2, BY_ROWS), id="EP2 x FSDP2 by rows"),
        pytest.param(Setup(EP1, BY_ROWS), id="FSDP4 by rows"),
        pytest.param(Setup(EP4, mode="full"), id="EP4 checkpointed"),
        pytest.param(Setup(NODES, mode="full"), id="two nodes checkpointed"),
        pytest.param(Setup(EP2, mode="selective"), id="EP2 x FSDP2 checkpointed but for y"),
        pytest.param(Setup(EP2, keep="z"), id="EP2 x FSDP2 z kept"),
        pytest.param(Setup(NODES, mode="full", keep="z"), id="two nodes checkpointed z kept"),
        pytest.param(Setup(EP2, compiled=True), id="EP2 x FSDP2 compiled"),
    ],
)
def test_training_equals_a_single_process(world: GlooWorld, setup: Setup) -> None:
    """Two clipped steps of AdamW; ranks and a whole EP group without tokens, experts that nothing chooses."""
    check_training(world, setup)


ROUTED_ONLY = Sizes(shared_experts=0)


@four_ranks
@pytest.mark.parametrize(
    ("layout", "mode"),
    [(EP4, None), (EP2, None), (EP1, None), (NODES, None), (EP2, "full"), (NODES, "full")],
    ids=str,
)
@pytest.mark.parametrize("accumulate", [False, True], ids=["returned", "accumulators"])
def test_gradient_accumulation(world: GlooWorld, layout: Layout, mode: str | None, accumulate: bool) -> None:
    """Three micro-batches of which the last reduces; gradients returned, or added to FSDP's accumulators."""
    check_training(world, Setup(layout, ROUTED_ONLY, mode=mode, accumulate=accumulate), 3)


# ---- mixed precision

SMALL_SCALE = 2.0**-10


def micro_batches_that_cancel(sizes: Sizes) -> tuple[list[Batch], list[Batch]]:
    """Large gradients that two pairs of ranks have with opposite signs; then small ones, which remain.

    A sum in bf16 has lost the small ones, whether over micro-batches or over ranks.
    """
    large, small = make_batches(sizes, 2)[:2], make_batches(sizes, 0)
    opposite = [replace(batch, scale=-1.0) for batch in large]
    return [*large, *opposite], [replace(batch, scale=SMALL_SCALE) for batch in small]


def sums_are_rounded(model: Model) -> bool:
    """Whether what FSDP holds after one backward are bf16 gradients, not sums of the kernels in fp32."""
    held = [local_part(parameter.unsharded_accumulated_grad) for parameter in expert_parameters(model)]
    assert {grad.dtype for grad in held} == {torch.float32}
    return all(torch.equal(grad, grad.bfloat16().float()) for grad in held)


def _mixed_precision(
    rank: int, size: int, setup: Setup, weights: dict[str, Tensor]
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The gradients, and the experts that this rank's tokens of the second micro-batch went to."""
    model = build(setup, weights)
    for last, batches in enumerate(micro_batches_that_cancel(setup.sizes)):
        model.set_requires_gradient_sync(bool(last))
        loss_of(model, batches[rank], tokens_of(batches)).backward()
        if not last and setup.policy.reduce_dtype == torch.float32 and setup.layout != EP4:
            assert sums_are_rounded(model) == (not setup.accumulate)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    grads = {name: whole(weight.grad) for name, weight in model.named_parameters()}
    for block in model.blocks:
        assert list(block.experts._placement.built) == ["bf16xbf16"]
    release_buffers()
    return grads, [block.chosen for block in model.blocks]


@four_ranks
@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        *((layout, "returned") for layout in (EP4, EP2, EP1, NODES)),
        *((layout, "accumulators") for layout in (EP4, EP2, EP1)),
        *((layout, "checkpointed") for layout in (EP2, NODES)),
        (EP2, "compiled"),
    ],
    ids=str,
)
def test_mixed_precision(world: GlooWorld, layout: Layout, kind: str) -> None:
    """fp32 weights, bf16 compute, fp32 sums over micro-batches and ranks."""
    accumulate = kind == "accumulators"
    sizes = Sizes(hidden=64, inter=128, shared_experts=0 if accumulate else 1)
    single = single_model(sizes)
    weights = {name: weight.bfloat16().float() for name, weight in weights_of(single).items()}
    single.load_state_dict(weights)
    errors = {}
    for reduce_dtype in (torch.float32, torch.bfloat16):
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)
        mode = "full" if kind == "checkpointed" else None
        setup = Setup(
            layout,
            sizes,
            torch.float32,
            mode,
            compiled=kind == "compiled",
            accumulate=accumulate,
            policy=policy,
        )
        results = world.run(_mixed_precision, setup, weights)
        single.zero_grad()
        _, batches = micro_batches_that_cancel(sizes)
        for batch, (_, chosen) in zip(batches, results, strict=True):
            for block, topk_idx in zip(single.blocks, chosen, strict=True):
                block.forced = topk_idx  # bf16 may choose another expert than float64
            (loss_of(single, batch, tokens_of(batches)) / RANKS).backward()
        errors[reduce_dtype] = {
            name: relative_error(results[0][0][name], weight.grad)
            for name, weight in single.named_parameters()
        }
    assert max(errors[torch.float32].values()) < BF16_TOLERANCE
    # The test can tell. Not by routed experts where opposite gradients meet in one GEMM, or the kernels add
    # to accumulators, which are fp32 whatever the policy.
    routed = () if layout.mesh[0] > 1 and not accumulate else ("experts.gate_up", "experts.down")
    lost = [error for name, error in errors[torch.bfloat16].items() if not name.endswith(routed)]
    assert min(lost) > 10 * BF16_TOLERANCE


# ---- checkpoints


def single_mega_model(sizes: Sizes, seed: int = 0) -> Model:
    """One process and no group: all experts in one MegaMoE."""
    torch.manual_seed(seed)
    return Model(
        sizes,
        lambda: MegaMoE(
            sizes.experts, sizes.topk, sizes.hidden, sizes.inter, max_tokens_per_rank=sizes.tokens,
            num_shared_experts=sizes.shared_experts, dtype=torch.float64,
        ),
        torch.float64,
    )  # fmt: skip


def _save(rank: int, size: int, setup: Setup, weights: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Train one step and save."""
    model = build(setup, weights)
    optimizer = optimizer_of(model)
    trace = train(model, optimizer, setup, rank, range(1))
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    release_buffers()
    return trace.weights


def _resume(rank: int, size: int, setup: Setup, folder: Path) -> tuple[dict[str, Tensor], Trace]:
    """What a model without values loads, and its second step."""
    model = build(setup, None)
    optimizer = optimizer_of(model)
    load(model, optimizer, folder)
    loaded = {name: whole(weight) for name, weight in model.named_parameters()}
    trace = train(model, optimizer, setup, rank, range(1, 2))
    release_buffers()
    return loaded, trace


def assert_same(loaded: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    assert list(loaded) == list(saved)
    for name, weight in saved.items():
        assert torch.equal(loaded[name], weight), name


@four_ranks
@pytest.mark.parametrize(
    ("sizes", "saved_as", "loaded_as"),
    [
        pytest.param(Sizes(), EP4, [EP2, EP1, NODES, None], id="EP4"),
        pytest.param(Sizes(), EP2, [EP4, EP1, HSDP_EXPERTS, None], id="EP2 x FSDP2"),
        pytest.param(Sizes(), EP1, [EP4], id="FSDP4"),
        pytest.param(Sizes(), NODES, [EP4], id="EP2 in a node, HSDP across two"),
        pytest.param(BY_ROWS, EP2, [EP1, None], id="EP2 x FSDP2 by rows"),
        pytest.param(Sizes(), None, [EP4, NODES], id="one process"),
    ],
)
def test_checkpoints(
    world: GlooWorld, tmp_path: Path, sizes: Sizes, saved_as: Layout | None, loaded_as: list[Layout | None]
) -> None:
    """Saved with one EP size, loaded with others; None is one process without a group.

    Weights come back bit by bit; with the optimizer's state, the next step is that of a run without a break.
    """
    single = single_model(sizes)
    weights = weights_of(single)
    optimizer = optimizer_of(single)
    if saved_as is None:
        mega = single_mega_model(sizes)
        mega.load_state_dict(weights)
        mega_optimizer = optimizer_of(mega)
        train_single(mega, mega_optimizer, sizes, range(1))
        dcp.save(state_of(mega, mega_optimizer), checkpoint_id=tmp_path)
        saved = weights_of(mega)
    else:
        saved = world.run(_save, Setup(saved_as, sizes), weights, tmp_path)[0]
    train_single(single, optimizer, sizes, range(1))
    expected = train_single(single, optimizer, sizes, range(1, 2))
    for layout in loaded_as:
        if layout is None:
            mega = single_mega_model(sizes, seed=1)
            mega_optimizer = optimizer_of(mega)
            load(mega, mega_optimizer, tmp_path)
            assert_same(weights_of(mega), saved)
            trace = train_single(mega, mega_optimizer, sizes, range(1, 2))
            assert trace.losses == pytest.approx(expected.losses, rel=EXACT)
            for name, weight in expected.weights.items():
                assert_close(trace.weights[name], weight, EXACT, name)
            release_buffers()
        else:
            results = world.run(_resume, Setup(layout, sizes), tmp_path)
            assert_same(results[0][0], saved)
            check([trace for _, trace in results], expected)


# ---- a library's experts


def _transformers(rank: int, size: int) -> None:
    """Two pairs: the experts of a Mixtral over each, FSDP over everything."""
    import transformers

    from prime_kernels.integrations.transformers import apply

    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=8, num_local_experts=4, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    torch.manual_seed(0)
    reference = transformers.MixtralForCausalLM(config).double()
    model = copy.deepcopy(reference)
    reference.set_experts_implementation("eager")  # the one that takes float64
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    apply(model, mesh["expert"].get_group(), max_tokens_per_rank=8)
    for layer in model.model.layers:
        fully_shard_experts(layer.mlp.experts, mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    batches = torch.randint(32, (size, 1, 8)).unbind()
    model(input_ids=batches[rank], labels=batches[rank]).loss.backward()
    for batch in batches:
        (reference(input_ids=batch, labels=batch).loss / size).backward()
    for (name, weight), twin in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert_close(whole(weight.grad), twin.grad, EXACT, name)
    release_buffers()


@four_ranks
def test_experts_that_an_integration_sharded(world: GlooWorld) -> None:
    pytest.importorskip("transformers", minversion="5.17")
    world.run(_transformers)


# ---- the parts


def make_experts(rank: int, group: Any, **settings: Any) -> MegaMoE:
    torch.manual_seed(rank)
    fields = {"num_experts": 8, "top_k": 2, "hidden": 8, "intermediate": 6, **settings}
    return MegaMoE(**fields, max_tokens_per_rank=8, group=group, dtype=torch.float64)


def _without_fsdp(rank: int, size: int) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Experts as DTensors and nothing else: y and gradients as with plain tensors."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("expert",))
    experts = make_experts(rank, mesh.get_group(), num_shared_experts=1)
    plain = {name: weight.detach().clone() for name, weight in experts.named_parameters()}
    twin = make_experts(rank, mesh.get_group(), num_shared_experts=1)
    distribute_experts(experts, mesh)
    assert tuple(experts.state_dict()["gate_up"].shape) == (8, 12, 8)
    torch.manual_seed(10 + rank)
    tokens = 2 * rank  # none on the first rank
    inputs = torch.randn(tokens, 8), torch.randint(-1, 8, (tokens, 2)), torch.rand(tokens, 2)
    x, topk_idx, topk_weights = inputs[0].double(), inputs[1], inputs[2].double()
    ys = [module(x, topk_idx, topk_weights) for module in (experts, twin)]
    for y in ys:
        y.square().sum().backward()
    assert torch.equal(*ys)
    for name, weight in experts.named_parameters():
        assert isinstance(weight, DTensor)
        assert torch.equal(weight.to_local(), plain[name])
        twin_grad = getattr(twin, name).grad
        if name.startswith("shared"):
            torch.distributed.all_reduce(twin_grad)
            assert_close(weight.grad.full_tensor(), twin_grad, EXACT, name)
        else:
            assert torch.equal(weight.grad.to_local(), twin_grad)
    with pytest.raises(ValueError, match=r"shape \(12, 8\) is \(Partial\(sum\),\), still to be summed"):
        clip_grad_norm_(experts.parameters(), 1.0)
    release_buffers()


@four_ranks
def test_experts_as_dtensors_without_fsdp(world: GlooWorld) -> None:
    world.run(_without_fsdp)


def _refusals(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    group = mesh["expert"].get_group()
    experts = make_experts(rank, group)
    with pytest.raises(ValueError, match=r"mesh is .*, needs 2 or 3 named dims, expert parallel the last"):
        fully_shard_experts(experts, init_device_mesh("cpu", (2, 2)))
    with pytest.raises(ValueError, match="needs 2 or 3 named dims"):
        fully_shard_experts(experts, mesh["expert"])
    with pytest.raises(ValueError, match="mesh has 2 dims, needs the expert parallel one alone"):
        distribute_experts(experts, mesh)
    pair = [rank - rank % 2, rank - rank % 2 + 1]
    with pytest.raises(
        ValueError, match=rf"holds the ranks \[0, 1, 2, 3\], .* of the mesh \[{pair[0]}, {pair[1]}\]"
    ):
        fully_shard_experts(make_experts(rank, None), mesh)
    with pytest.raises(
        ValueError, match=r"Linear.weight is a plain tensor, needs a DTensor sharded on dim 0"
    ):
        fully_shard_experts(nn.Linear(4, 4), mesh)
    linear = nn.Linear(4, 4, bias=False)
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh["data"], [Shard(0)]))
    with pytest.raises(ValueError, match=r"Linear.weight is sharded over the ranks \[\d, \d\], the last dim"):
        fully_shard_experts(linear, mesh)
    uneven = make_experts(rank, group, num_experts=6, hidden=9)
    with pytest.raises(ValueError, match=r"'gate_up': \(3, 12, 9\).*FSDP over 2 ranks cuts experts or"):
        fully_shard_experts(uneven, mesh)
    assert not isinstance(uneven.gate_up, DTensor)
    distribute_experts(experts, mesh["expert"])
    with pytest.raises(ValueError, match="gate_up is a DTensor already"):
        distribute_experts(experts, mesh["expert"])
    with pytest.raises(ValueError, match="max_norm is 0, needs a positive number"):
        clip_grad_norm_(experts.parameters(), 0)
    inputs = torch.randn(3, 8).double(), torch.randint(8, (3, 2)), torch.rand(3, 2).double()
    misplaced = make_experts(rank, group, num_shared_experts=1)
    misplaced.shared_down = nn.Parameter(
        distribute_tensor(misplaced.shared_down.detach(), mesh["data"], [Shard(0)])
    )
    with pytest.raises(
        ValueError, match=r"shared_down is S.*whole shared experts on each rank: Replicate\(\)"
    ):
        misplaced(*inputs)
    misplaced = make_experts(rank, group)
    misplaced.down = nn.Parameter(distribute_tensor(misplaced.down.detach(), mesh["data"], [Replicate()]))
    with pytest.raises(
        ValueError, match=r"down is R.* over mesh dim 0 of 2 ranks; .*each of them once: Shard\(0\)"
    ):
        misplaced(*inputs)
    release_buffers()


@four_ranks
def test_what_does_not_fit_is_refused(world: GlooWorld) -> None:
    world.run(_refusals)


def test_clipping_one_tensor() -> None:
    """As torch's own, which takes a tensor in the place of several."""
    weight = nn.Parameter(torch.zeros(3, 4))
    weight.grad = torch.full((3, 4), 2.0)
    assert_close(clip_grad_norm_(weight, 1.0), torch.tensor(48.0).sqrt(), EXACT)
    assert_close(weight.grad.norm(), torch.tensor(1.0), 1e-6)
