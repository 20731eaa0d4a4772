"""What the Transformers tests share: tiny configs of the library's families, and how models are compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", minversion="5", reason="needs Transformers 5")

from prime_kernels.integrations import transformers as integration  # noqa: E402

VOCABULARY, HIDDEN, INTER, EXPERTS, TOP_K, LAYERS = 48, 64, 128, 4, 2, 2
BATCH, SEQUENCE = 2, 9

# Relative Frobenius norms of bf16 models against fp32: how much larger than with the library's own experts
# (over seeds 0.9 to 1.4 times as large).
BF16_ERROR_RATIO = 1.6

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,  # far from linear: the default of 0.02 makes small models of small values
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def qwen3(**changes: Any) -> Any:
    settings = {**COMMON, "intermediate_size": 96, "moe_intermediate_size": INTER, "num_experts": EXPERTS}
    settings |= {"head_dim": 16, "norm_topk_prob": True, "output_router_logits": True, **changes}
    return transformers.Qwen3MoeConfig(**settings)


def mixtral(**changes: Any) -> Any:
    settings = {**COMMON, "intermediate_size": INTER, "num_local_experts": EXPERTS, **changes}
    return transformers.MixtralConfig(**settings, output_router_logits=True)


def deepseek_v3(**changes: Any) -> Any:
    """One dense layer, then expert layers with a shared expert and two groups of experts."""
    settings = {
        **COMMON, "num_key_value_heads": 4, "intermediate_size": 96, "moe_intermediate_size": INTER,
        "n_routed_experts": EXPERTS, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1, "routed_scaling_factor": 1.7, "norm_topk_prob": True,
        "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    }  # fmt: skip
    return transformers.DeepseekV3Config(**(settings | changes))


def gpt_oss(**changes: Any) -> Any:
    settings = {**COMMON, "intermediate_size": INTER, "num_local_experts": EXPERTS, "head_dim": 16}
    return transformers.GptOssConfig(**settings | changes)


CONFIGS = {"qwen3": qwen3, "mixtral": mixtral, "deepseek_v3": deepseek_v3}


def choosing_all(family: str, **changes: Any) -> Any:
    """A config whose tokens pass every expert, so that rounding moves none to another one."""
    groups = {"n_group": 1, "topk_group": 1} if family == "deepseek_v3" else {}
    return CONFIGS[family](**{"num_experts_per_tok": EXPERTS, **groups, **changes})


def make_model(config: Any, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def make_batch(seed: int = 1, batch: int = BATCH, sequence: int = SEQUENCE) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCABULARY, (batch, sequence), generator=generator)
    return {"input_ids": ids, "labels": ids}


def run(model: Any, batch: dict[str, Tensor] | None = None, **changes: Any) -> Any:
    """The model's output, after its backward."""
    output = model(**(batch or make_batch()), **changes)
    output.loss.backward()
    return output


def distance(value: Tensor, expected: Tensor) -> float:
    value, expected = value.detach().double(), expected.detach().double()
    return ((value - expected).norm() / expected.norm().clamp_min(1e-12)).item()


def assert_as_near_as_the_library(
    models: tuple[Any, Any, Any], outputs: tuple[Any, Any, Any], ratio: float = BF16_ERROR_RATIO
) -> None:
    """Logits and every gradient of ours, the library's and the fp32 model, in this order."""
    model, library, exact = models
    near, library_near = (distance(output.logits, outputs[2].logits) for output in outputs[:2])
    assert near < ratio * library_near, (near, library_near)
    ours, theirs = dict(model.named_parameters()), dict(library.named_parameters())
    for name, parameter in exact.named_parameters():
        assert ours[name].grad.dtype == ours[name].dtype
        near = distance(ours[name].grad, parameter.grad)
        library_near = distance(theirs[name].grad, parameter.grad)
        assert near < ratio * library_near, (name, near, library_near)


def experts_of(model: nn.Module) -> list[Any]:
    return [module for name, module in model.named_modules() if name.endswith(".experts")]


class CountedCalls:
    """How often the experts modules' forward was ours."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        compute = integration._Experts.compute

        def counted(*args: Any) -> Tensor:
            self.count += 1
            return compute(*args)

        monkeypatch.setattr(integration._Experts, "compute", counted)
