"""Shapes of the expert layers of public models, by name: what `warmup` compiles for and `bench` measures.

The numbers come from each model's published `config.json` (hidden_size, moe_intermediate_size or
intermediate_size, num_experts or n_routed_experts, num_experts_per_tok, n_shared_experts, swiglu_limit).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """The expert layer of one model.

    hidden: H, width of a token. intermediate: I, width of one expert.
    num_experts: E, routed experts of a layer. top_k: K, experts per token.
    num_shared_experts: experts every token passes through, each of width I.
    activation_clamp: the limit of the model's SwiGLU (swiglu_limit), None without one.
    """

    name: str
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    num_shared_experts: int = 0
    activation_clamp: float | None = None

    def experts_per_rank(self, ep: int) -> int:
        """Experts on each of `ep` ranks. Raises ValueError when the ranks cannot share them equally."""
        if ep < 1 or self.num_experts % ep != 0:
            raise ValueError(
                f"{self.name} has {self.num_experts} experts, which {ep} ranks cannot share equally; "
                "choose a number of ranks that divides it"
            )
        return self.num_experts // ep


MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape("qwen3-30b-a3b", hidden=2048, intermediate=768, num_experts=128, top_k=8),
        ModelShape("qwen3-235b-a22b", hidden=4096, intermediate=1536, num_experts=128, top_k=8),
        ModelShape("deepseek-v2-lite", 2048, 1408, num_experts=64, top_k=6, num_shared_experts=2),
        ModelShape("deepseek-v3", 7168, 2048, num_experts=256, top_k=8, num_shared_experts=1),
        ModelShape("kimi-k2", 7168, 2048, num_experts=384, top_k=8, num_shared_experts=1),
        ModelShape("glm-4.5-air", 4096, 1408, num_experts=128, top_k=8, num_shared_experts=1),
        ModelShape("olmoe-1b-7b", hidden=2048, intermediate=1024, num_experts=64, top_k=8),
        ModelShape("mixtral-8x7b", hidden=4096, intermediate=14336, num_experts=8, top_k=2),
        ModelShape("mixtral-8x22b", hidden=6144, intermediate=16384, num_experts=8, top_k=2),
        ModelShape("gpt-oss-20b", 2880, 2880, num_experts=32, top_k=4, activation_clamp=7.0),
        ModelShape("gpt-oss-120b", 2880, 2880, num_experts=128, top_k=4, activation_clamp=7.0),
    )
}


def model_shape(name: str) -> ModelShape:
    """The shape called `name` (case is ignored). Raises ValueError that lists the known names."""
    shape = MODELS.get(name.lower())
    if shape is None:
        raise ValueError(f"unknown model {name!r}; known: {', '.join(sorted(MODELS))}")
    return shape
