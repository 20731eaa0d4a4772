"""`prime_kernels.integrations.transformers` over the SM90 kernels, on tiny random models of the real library.

The library's own experts are the reference: in fp32, and in bf16 for how large a rounding error may be.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from sm90_cases import BF16, DEVICE, SHAPES
from torch import Tensor, nn
from transformers_cases import (
    BATCH,
    BF16_ERROR_RATIO,
    CONFIGS,
    LAYERS,
    CountedCalls,
    assert_as_near_as_the_library,
    choosing_all,
    distance,
    experts_of,
    make_batch,
    make_model,
    run,
)

from prime_kernels.integrations.transformers import apply, build_buffers, revert

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("sm90_kernels", "no_shared_buffers")]

EXPERTS, SEQUENCE = 8, 65
TOKENS = BATCH * SEQUENCE
# The library's loop over experts, in plain torch.
LOOP, FASTEST = "eager", "grouped_mm"
SHAPE_OF_FAMILY = dict(zip(CONFIGS, (SHAPES[0], SHAPES[1], SHAPES[0]), strict=True))

# Relative Frobenius norms of a bf16 model with our experts from the same model with the library's in fp32:
# what one rounding of y, and those of the bf16 layers that it passes, make of it.
FIRST_LOSS_TOLERANCE, LOGITS_TOLERANCE, GRADIENT_TOLERANCE = 2e-3, 1e-2, 3e-2
# Of two bf16 trainings of four steps, in which rounding adds up.
LOSS_TOLERANCE = 5e-2


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> CountedCalls:
    return CountedCalls(monkeypatch)


def sizes(family: str) -> dict[str, int]:
    hidden, inter = SHAPE_OF_FAMILY[family]
    count, width = {
        "qwen3": ("num_experts", "moe_intermediate_size"),
        "mixtral": ("num_local_experts", "intermediate_size"),
        "deepseek_v3": ("n_routed_experts", "moe_intermediate_size"),
    }[family]
    # Values in the range of what larger models have: outputs of the wider layers of these would be larger.
    scale = {"initializer_range": 0.04}
    return {"hidden_size": hidden, width: inter, count: EXPERTS, "max_position_embeddings": 256, **scale}


def one_expert_layer(family: str) -> Any:
    """A config in which no expert layer follows another: rounding in one moves no token in the next."""
    return CONFIGS[family](num_hidden_layers=2 if family == "deepseek_v3" else 1, **sizes(family))


def all_chosen(family: str, **changes: Any) -> Any:
    return choosing_all(family, num_experts_per_tok=EXPERTS, **sizes(family), **changes)


def make_library(config: Any) -> Any:
    model = make_model(config, BF16).to(DEVICE)
    model.set_experts_implementation(FASTEST)
    return model


def make_pair(config: Any, **settings: Any) -> tuple[Any, Any]:
    """The library's bf16 model, and its copy with our experts."""
    library = make_library(config)
    model = copy.deepcopy(library)
    apply(model, max_tokens_per_rank=TOKENS, **settings)
    return library, model


def batch_of(seed: int = 1) -> dict[str, Tensor]:
    return {name: value.to(DEVICE) for name, value in make_batch(seed, sequence=SEQUENCE).items()}


class InFp32(nn.Module):
    """The library's experts in fp32, of bf16 weights, x and scores; y in bf16."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.experts = experts.float()

    def forward(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        return self.experts(x.float(), topk_idx, topk_weights.float()).to(x.dtype)


def with_experts_in_fp32(library: Any) -> Any:
    """A copy whose experts, and they alone, compute in fp32."""
    model = copy.deepcopy(library)
    model.set_experts_implementation(LOOP)
    for block in [module for module in model.modules() if hasattr(module, "experts")]:
        block.experts = InFp32(block.experts)
    return model


def whole_in_fp32(library: Any) -> Any:
    model = copy.deepcopy(library).float()
    model.set_experts_implementation(LOOP)
    return model


@pytest.mark.parametrize("keep", [None, "z"])
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_loss_and_every_gradient(family: str, keep: str | None, calls: CountedCalls) -> None:
    library, model = make_pair(one_expert_layer(family), keep=keep)
    exact = with_experts_in_fp32(library)
    output, expected = run(model, batch_of()), run(exact, batch_of())
    assert calls.count == 1
    assert distance(output.loss, expected.loss) < FIRST_LOSS_TOLERANCE
    assert distance(output.logits, expected.logits) < LOGITS_TOLERANCE
    wanted = {name.replace("experts.experts.", "experts."): p.grad for name, p in exact.named_parameters()}
    assert len(wanted) > 10
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == parameter.dtype
        error = distance(parameter.grad, wanted[name])
        assert error < GRADIENT_TOLERANCE, (name, error)


@pytest.mark.parametrize("family", CONFIGS)
def test_as_near_to_fp32_as_the_library(family: str) -> None:
    """Two layers, all of the model in fp32; every expert is chosen."""
    library, model = make_pair(all_chosen(family))
    models = (model, library, whole_in_fp32(library))
    assert_as_near_as_the_library(models, tuple(run(each, batch_of()) for each in models))


@pytest.mark.parametrize("keep", [None, "z"])
def test_training(keep: str | None) -> None:
    """AdamW learns a batch by heart, as with the library's experts."""
    losses = []
    for model in make_pair(one_expert_layer("qwen3"), keep=keep):
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        steps = []
        for _ in range(4):
            steps.append(run(model, batch_of()).loss.item())
            optimizer.step()
            optimizer.zero_grad()
        losses.append(steps)
    theirs, ours = losses
    assert ours == pytest.approx(theirs, rel=LOSS_TOLERANCE)
    assert ours[-1] < 0.5 * ours[0]


def test_generate(calls: CountedCalls) -> None:
    """From a prompt on: batches of a few tokens, without gradients."""
    library, model = make_pair(all_chosen("qwen3", output_router_logits=False))
    prompt = batch_of()["input_ids"][:, :4]
    settings = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    settings |= {"output_logits": True, "return_dict_in_generate": True}
    exact = whole_in_fp32(library)
    generated = model.eval().generate(prompt, **settings)
    assert generated.sequences.shape == (BATCH, 4 + 5)
    assert calls.count == 5 * LAYERS
    # What each step saw, at once: logits of the last token of the prompt and of those after it.
    seen = generated.sequences[:, :-1]
    with torch.no_grad():
        expected, theirs = (each.eval()(seen).logits[:, 3:] for each in (exact, library))
    ours = torch.stack(generated.logits, dim=1)
    assert distance(ours, expected) < BF16_ERROR_RATIO * distance(theirs, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool, calls: CountedCalls) -> None:
    config = one_expert_layer("mixtral")
    library, model = make_pair(config)
    expected = run(model, batch_of(), output_router_logits=False)
    twin = copy.deepcopy(library)
    apply(twin, max_tokens_per_rank=TOKENS)
    twin.gradient_checkpointing_enable({"use_reentrant": reentrant})
    calls.count = 0
    output = run(twin, batch_of(), output_router_logits=False, use_cache=False)
    assert calls.count == 2
    assert torch.equal(output.logits, expected.logits)
    wanted = dict(model.named_parameters())
    for name, parameter in twin.named_parameters():
        assert distance(parameter.grad, wanted[name].grad) < GRADIENT_TOLERANCE, name


def test_compiled_layers() -> None:
    """Whole decoder layers as one graph each, of which the experts are one operator (`bench end-to-end` also
    lets inductor compile them)."""
    torch._dynamo.reset()
    library, model = make_pair(all_chosen("qwen3", output_router_logits=False))  # its hooks break graphs
    exact = whole_in_fp32(library)
    build_buffers(model)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    models = (model, library, exact)
    assert_as_near_as_the_library(models, tuple(run(each, batch_of()) for each in models))
    torch._dynamo.reset()


def test_two_models_and_back() -> None:
    """Buffers are shared, nothing in them is: F1 F2 B1 B2; then the library computes again."""
    pairs = [make_pair(one_expert_layer(family)) for family in ("qwen3", "deepseek_v3")]
    outputs = [model(**batch_of()) for _, model in pairs]
    for output in outputs:
        output.loss.backward()
    for (library, model), output in zip(pairs, outputs, strict=True):
        alone = copy.deepcopy(library)
        apply(alone, max_tokens_per_rank=TOKENS)
        expected = run(alone, batch_of())
        assert torch.equal(output.logits, expected.logits)
        ours, theirs = experts_of(model)[0], experts_of(alone)[0]
        for name in ("gate_up_proj", "down_proj"):
            assert distance(getattr(ours, name).grad, getattr(theirs, name).grad) < GRADIENT_TOLERANCE
        revert(model)
        assert torch.equal(model(**batch_of()).logits, library(**batch_of()).logits)


def test_fewer_tokens_than_the_buffer_holds_and_more() -> None:
    library, model = make_pair(one_expert_layer("qwen3"))
    exact = with_experts_in_fp32(library)
    for tokens in (1, 33, SEQUENCE):
        ids = batch_of()["input_ids"][:1, :tokens]
        with torch.no_grad():
            assert distance(model(ids).logits, exact(ids).logits) < LOGITS_TOLERANCE
    with pytest.raises(RuntimeError, match=f"sized for {TOKENS} tokens/rank, got {2 * TOKENS}"):
        model(torch.cat([batch_of()["input_ids"]] * 2))
