"""What ``bench end-to-end`` trains: the sizes of the model, its variants, the text and the model itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..symm import SymmBuffer
from ..train.config import LIMITS, MAX_TOP_K
from ..train.corpus import VOCABULARY, load_corpus, sample_windows

# As in Qwen3-30B-A3B: heads of 128, queries twice as wide as the residual stream, eight query heads for each
# key and value head.
HEAD_DIM = 128
QUERY_EXPANSION = 2
QUERIES_PER_KEY = 8

DTYPE = torch.bfloat16
ATTENTION = "sdpa"
LIBRARY = "library"


@dataclass(frozen=True)
class Variant:
    """What computes the experts, and whether ``torch.compile`` compiles each decoder layer.

    keep: None where the backward recomputes z or the library computes, "z" where the forward keeps it.
    """

    ours: bool
    keep: str | None
    compiled: bool


# The library comes first: the losses of the others are compared with its.
VARIANTS = {
    f"{name}{'-compile' if compiled else ''}": Variant(ours, keep, compiled)
    for compiled in (False, True)
    for name, ours, keep in ((LIBRARY, False, None), ("recompute", True, None), ("kept-z", True, "z"))
}


@dataclass(frozen=True)
class EndToEndCase:
    """A Qwen3-MoE-shaped model and how it is trained. The defaults halve the widths of Qwen3-30B-A3B.

    hidden: H. intermediate: I of one expert. batch: sequences of one step. warmup: first steps that are not
    timed. experts_implementation: of the library, by its name there.
    """

    layers: int = 6
    hidden: int = 1024
    intermediate: int = 384
    experts: int = 128
    topk: int = 8
    batch: int = 4
    sequence: int = 4096
    steps: int = 30
    warmup: int = 8
    learning_rate: float = 3e-4
    seed: int = 0
    experts_implementation: str = "grouped_mm"

    def __post_init__(self) -> None:
        """Raises ValueError that names the argument, the limit and the fix."""
        for name in ("layers", "experts", "topk", "batch", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} is {getattr(self, name)}; needs at least 1")
        if self.sequence < 2:
            raise ValueError(f"--sequence is {self.sequence}; needs at least 2, one byte and the next")
        for name, limit in (("hidden", LIMITS.hidden), ("intermediate", LIMITS.intermediate)):
            value = getattr(self, name)
            if not limit.takes(value):
                raise ValueError(
                    f"--{name} is {value}; the kernels need {limit}, the next is {limit.nearest(value)[-1]}"
                )
        if self.topk > min(self.experts, MAX_TOP_K):
            raise ValueError(
                f"--topk is {self.topk}; needs at most {MAX_TOP_K} and at most --experts {self.experts}"
            )
        if not 0 <= self.warmup < self.steps:
            raise ValueError(f"--warmup is {self.warmup}; needs 0 to {self.steps - 1}, one less than --steps")
        if not 0 < self.learning_rate < float("inf"):
            raise ValueError(f"--learning-rate is {self.learning_rate}; needs a positive number")

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.batch * self.sequence


def make_batches(case: EndToEndCase, device: torch.device) -> tuple[str, Tensor]:
    """The name of the text, and int64 [steps, batch, sequence] of it: bytes, the same at every call.

    Raises:
        CorpusError: the text is shorter than a sequence, or missing.
    """
    corpus = load_corpus(None, case.sequence + 1)
    generator = torch.Generator().manual_seed(case.seed)
    ids, _ = sample_windows(corpus.train, case.steps * case.batch, case.sequence, generator)
    return corpus.name, ids.view(case.steps, case.batch, case.sequence).to(device)


def build_model(case: EndToEndCase, device: torch.device) -> Any:
    """The library's model with its own experts: random weights, the same at every call on one device."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    heads = case.hidden * QUERY_EXPANSION // HEAD_DIM
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // QUERIES_PER_KEY),
        head_dim=HEAD_DIM,
        moe_intermediate_size=case.intermediate,
        num_experts=case.experts,
        num_experts_per_tok=case.topk,
        norm_topk_prob=True,
        max_position_embeddings=case.sequence,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(case.seed)
    with device:
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=DTYPE,
            attn_implementation=ATTENTION,
            experts_implementation=case.experts_implementation,
        )
    return model.train()


def prepare(model: Any, case: EndToEndCase, variant: Variant) -> list[SymmBuffer]:
    """Let ``variant`` compute the experts of a new model, and compile it where it says so.

    Returns:
        The staging buffers; none where the library computes.
    """
    buffers = []
    if variant.ours:
        from ..integrations.transformers import apply, build_buffers

        apply(model, keep=variant.keep, max_tokens_per_rank=case.tokens)
        buffers = build_buffers(model)
    if variant.compiled:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    return buffers


def count_parameters(model: nn.Module, case: EndToEndCase) -> dict[str, int]:
    """All parameters, and those that one token passes."""
    total = sum(parameter.numel() for parameter in model.parameters())
    expert = 3 * case.hidden * case.intermediate
    unused = case.layers * (case.experts - case.topk) * expert
    return {"total": total, "active": total - unused}


def step_loss(model: Callable[..., Any], ids: Tensor) -> Tensor:
    """The mean loss in nats per byte of predicting each byte of [batch, sequence] from those before it."""
    return model(input_ids=ids, labels=ids, use_cache=False).loss
