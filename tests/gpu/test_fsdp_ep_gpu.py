"""FSDP2 with expert parallelism over the SM90 kernels on one GPU: groups of one rank, everything else as in
tests/cpu/test_fsdp_ep.py, of which this is the counterpart."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_cases import (
    Batch,
    Layout,
    Model,
    Setup,
    Sizes,
    build,
    expert_parameters,
    load,
    loss_of,
    optimizer_of,
    single_model,
    state_of,
    tokens_of,
    weights_of,
    whole,
)
from sm90_cases import BF16, DEVICE, SHAPES, compile_all, relative_error
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from prime_kernels import MegaMoE, custom_ops, runtime
from prime_kernels.integrations.expert_sharding import clip_grad_norm_, local_part
from prime_kernels.module import release_buffers

pytestmark = pytest.mark.gpu

SECONDS = 60.0  # of every wait: for a peer of the group, and of a kernel
ALONE = Layout((1, 1))
POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
HIDDEN, INTER = SHAPES[0]
SIZES = Sizes(vocab=64, hidden=HIDDEN, inter=INTER, topk=4, heads=4, idle_experts=1, tokens=160)
ROUTED_ONLY = Sizes(**{**vars(SIZES), "shared_experts": 0})
MICRO_BATCHES = ((4, 33), (0, 7), (1, 1), (5, 32))

# Of a model in bf16 against float64, relative Frobenius norm: no more than this; and no more than this many
# times that of the same model with the reference backend.
BF16_TOLERANCE = 3e-2
REFERENCE_FACTOR = 1.5


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    compile_all()
    store = dist.HashStore()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, timeout=timedelta(seconds=SECONDS)
    )
    yield
    release_buffers()
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test sets is undone."""
    monkeypatch.setattr(runtime, "_backend", None)
    monkeypatch.setattr(runtime, "_timeout_seconds", SECONDS)


def make_batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(1)

    def draw(shape: tuple[int, int]) -> Tensor:
        return torch.randint(SIZES.vocab, shape, generator=generator)

    return [Batch(draw(shape), draw(shape)) for shape in MICRO_BATCHES]


def make_weights(sizes: Sizes) -> dict[str, Tensor]:
    """fp32 values that bf16 holds."""
    return {name: weight.to(DEVICE, BF16).float() for name, weight in weights_of(single_model(sizes)).items()}


def grads_with_routing(model: Model, batches: list[Batch], choices: list[list[Tensor]]) -> dict[str, Tensor]:
    """The gradients of all batches, added up in fp32 or wider, with the experts that another model chose."""
    totals: dict[str, Tensor] = {}
    for batch, chosen in zip(batches, choices, strict=True):
        for block, topk_idx in zip(model.blocks, chosen, strict=True):
            block.forced = topk_idx
        model.zero_grad()
        loss_of(model, batch, tokens_of(batches), ranks=1).backward()
        for name, weight in model.named_parameters():
            wide = weight.grad.to(torch.promote_types(weight.dtype, torch.float32))
            totals[name] = totals.get(name, 0) + wide
    return totals


def in_float64(sizes: Sizes, weights: dict[str, Tensor], *routed: Any) -> dict[str, Tensor]:
    model = single_model(sizes).to(DEVICE)
    model.load_state_dict(weights)
    return grads_with_routing(model, *routed)


def on_the_reference(sizes: Sizes, weights: dict[str, Tensor], *routed: Any) -> dict[str, Tensor]:
    """Unwrapped, in bf16, with the reference backend."""
    runtime.set_backend("reference")
    model = unwrapped(sizes, BF16)
    model.load_state_dict(weights)
    grads = grads_with_routing(model, *routed)
    assert model.blocks[0].experts.buffer.backend == "reference"
    return grads


def unwrapped(sizes: Sizes, dtype: torch.dtype) -> Model:
    with torch.device(DEVICE):
        return Model(
            sizes,
            lambda: MegaMoE(
                sizes.experts, sizes.topk, sizes.hidden, sizes.inter, max_tokens_per_rank=sizes.tokens,
                num_shared_experts=sizes.shared_experts, dtype=dtype,
            ),
            dtype,
        )  # fmt: skip


def count_forwards(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each forward of the experts from now on."""
    calls: list[None] = []
    for name in ("bf16_mega_moe", "forward_keeping_z"):
        original = getattr(custom_ops, name)

        def counted(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            calls.append(None)
            return original(*args, **kwargs)

        monkeypatch.setattr(custom_ops, name, counted)
    return calls


@pytest.mark.parametrize(
    ("mode", "keep", "accumulate"),
    [
        (None, None, False),
        (None, "z", False),
        ("full", None, False),
        ("full", "z", True),
        ("selective", None, False),
        (None, None, True),
    ],
)
def test_gradients_of_micro_batches(
    mode: str | None, keep: str | None, accumulate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp32 weights, bf16 compute, fp32 sums over micro-batches, one of them without tokens."""
    sizes = ROUTED_ONLY if accumulate else SIZES
    weights, batches = make_weights(sizes), make_batches()
    setup = Setup(
        ALONE, sizes, torch.float32, mode, keep, accumulate=accumulate, policy=POLICY, device=DEVICE.type
    )
    model: Any = build(setup, weights)
    forwards = count_forwards(monkeypatch)
    choices = []
    for index, batch in enumerate(batches):
        model.set_requires_gradient_sync(index == len(batches) - 1)
        loss_of(model, batch, tokens_of(batches), ranks=1).backward()
        choices.append([block.chosen for block in model.blocks])
        if index == 0:
            for parameter in expert_parameters(model):
                held = local_part(parameter.unsharded_accumulated_grad)
                assert held.dtype == torch.float32
                # A gradient in bf16, or what the kernels added in fp32.
                assert torch.equal(held, held.to(BF16).float()) == (not accumulate)
    assert len(forwards) == len(batches) * sizes.layers * (2 if mode == "full" else 1)
    for block in model.blocks:
        built = block.experts._placement.built
        assert {mma_type: buffer.backend for mma_type, buffer in built.items()} == {"bf16xbf16": "sm90"}
        built["bf16xbf16"].check()
    routed = (sizes, weights, batches, choices)
    exact, reference = in_float64(*routed), on_the_reference(*routed)
    for name, weight in model.named_parameters():
        assert (weight.dtype, weight.grad.dtype) == (torch.float32, torch.float32)
        error = relative_error(whole(weight.grad), exact[name])
        usual = relative_error(reference[name], exact[name])
        assert error <= min(BF16_TOLERANCE, REFERENCE_FACTOR * usual), f"{name}: {error:.2e}, {usual:.2e}"


def step(model: Any, optimizer: torch.optim.Optimizer, batches: list[Batch]) -> list[float]:
    """One optimizer step; the loss of each micro-batch, then the norm of the gradients."""
    optimizer.zero_grad()
    losses = []
    for index, batch in enumerate(batches):
        model.set_requires_gradient_sync(index == len(batches) - 1)
        loss = loss_of(model, batch, tokens_of(batches), ranks=1)
        loss.backward()
        losses.append(loss.item())
    norm = clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return [*losses, norm.item()]


def test_checkpoint(tmp_path: Path) -> None:
    """Into a model without values, whose next step is then that of the saved one; into an unwrapped model."""
    batches = make_batches()
    setup = Setup(ALONE, SIZES, torch.float32, "full", policy=POLICY, device=DEVICE.type)
    model = build(setup, make_weights(SIZES))
    optimizer = optimizer_of(model)
    first = step(model, optimizer, batches)
    saved = {name: whole(weight) for name, weight in model.named_parameters()}
    dcp.save(state_of(model, optimizer), checkpoint_id=tmp_path)
    second = step(model, optimizer, batches)
    assert sum(second[:-1]) < sum(first[:-1])

    resumed = build(setup, None)
    resumed_optimizer = optimizer_of(resumed)
    load(resumed, resumed_optimizer, tmp_path)
    for name, weight in resumed.named_parameters():
        assert torch.equal(whole(weight), saved[name]), name
    # Not to the bit: torch's backward of attention adds in any order.
    assert step(resumed, resumed_optimizer, batches) == pytest.approx(second, rel=1e-2)
    for (name, weight), twin in zip(resumed.named_parameters(), model.parameters(), strict=True):
        assert relative_error(whole(weight), whole(twin)) < 1e-2, name

    plain = unwrapped(SIZES, torch.float32)
    load(plain, optimizer_of(plain), tmp_path)
    for name, weight in weights_of(plain).items():
        assert torch.equal(weight, saved[name]), name
