"""What the prime-rl tests share: experts by that framework's names, a loop over tokens as the reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from prime_kernels.integrations.prime_rl_dispatcher import DispatchSettings, MegaMoEDispatcher

EXPERTS, TOPK, HIDDEN, INTER, TOKENS = 4, 2, 6, 5, 8


class Experts(nn.Module):
    """w1 gate, w2 down, w3 up, experts first."""

    def __init__(
        self, experts: int = EXPERTS, hidden: int = HIDDEN, inter: int = INTER,
        dtype: torch.dtype = torch.float64, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def parameter(*shape: int) -> nn.Parameter:
            values = torch.randn(shape, generator=generator, dtype=torch.float64) * 2 * shape[-1] ** -0.5
            return nn.Parameter(values.to(dtype))

        self.w1 = parameter(experts, inter, hidden)
        self.w2 = parameter(experts, hidden, inter)
        self.w3 = parameter(experts, inter, hidden)


class FusedExperts(nn.Module):
    """The same weights, gate and up in one parameter."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        split = Experts(**kwargs)
        self.gate_up = nn.Parameter(torch.cat((split.w1, split.w3), dim=1).detach())
        self.down = nn.Parameter(split.w2.detach())


class Layer(nn.Module):
    """A MoE layer of the framework after its router."""

    def __init__(self, experts: nn.Module, dispatcher: MegaMoEDispatcher) -> None:
        super().__init__()
        self.experts = experts
        self.dispatcher = dispatcher

    def forward(self, x: Tensor, top_scores: Tensor, indices: Tensor) -> Tensor:
        y = self.dispatcher.run(x, top_scores, indices, self.experts, score_before_experts=False)
        self.dispatcher.synchronize()
        return y


def make_config(**fields: Any) -> Any:
    """The framework's config, which needs pydantic."""
    from prime_kernels.integrations.prime_rl import MegaMoEDispatchConfig

    return MegaMoEDispatchConfig(**fields)


def make_dispatcher(config: DispatchSettings | None = None, **kwargs: Any) -> MegaMoEDispatcher:
    kwargs = {"num_experts": EXPERTS, "top_k": TOPK, "sequence_length": TOKENS, **kwargs}
    return MegaMoEDispatcher(config or make_config(), **kwargs)


def make_tokens(
    *leading: int, hidden: int = HIDDEN, experts: int = EXPERTS, dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """x, scores that require gradients, and indices; a slot may have no expert."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*leading, hidden, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    scores = torch.rand(*leading, TOPK, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return x, scores, torch.randint(-1, experts, (*leading, TOPK), generator=generator)


def split_weights(experts: nn.Module) -> list[Tensor]:
    """gate, down, up of a module of either layout."""
    if isinstance(experts, FusedExperts):
        gate, up = experts.gate_up.chunk(2, dim=1)
        return [gate, experts.down, up]
    return [experts.w1, experts.w2, experts.w3]


def loop_over_tokens(
    weights: list[Tensor], x: Tensor, scores: Tensor, indices: Tensor, clamp: float | None = None
) -> Tensor:
    """What the layer means: each token through each of its experts, times the score."""
    gate, down, up = weights
    rows = []
    for token, token_scores, chosen in zip(
        x.reshape(-1, x.shape[-1]), scores.reshape(-1, TOPK), indices.reshape(-1, TOPK).tolist(), strict=True
    ):
        row = torch.zeros_like(token)
        for score, expert in zip(token_scores, chosen, strict=True):
            if expert >= 0:
                g, u = gate[expert] @ token, up[expert] @ token
                if clamp is not None:
                    g, u = g.clamp(max=clamp), u.clamp(-clamp, clamp)
                row = row + score * (down[expert] @ (nn.functional.silu(g) * u))
        rows.append(row)
    return torch.stack(rows).reshape(x.shape) if rows else x * 0


def expected(
    experts: nn.Module, x: Tensor, scores: Tensor, indices: Tensor, dy: Tensor, clamp: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """y in float64, and the gradients of x, scores, w1, w2, w3, gate_up and down."""
    leaves = [
        leaf.detach().double().requires_grad_() for leaf in (x, scores, *split_weights(experts))
    ]
    y = loop_over_tokens(leaves[2:], leaves[0], leaves[1], indices, clamp)
    grads = torch.autograd.grad(y, leaves, dy.double(), allow_unused=True)
    names = ("x", "scores", "w1", "w2", "w3")
    named = {
        name: torch.zeros_like(leaf) if grad is None else grad
        for name, leaf, grad in zip(names, leaves, grads, strict=True)
    }
    named["gate_up"], named["down"] = torch.cat((named["w1"], named["w3"]), dim=1), named["w2"]
    return y.detach(), named


def weight_grads(experts: nn.Module) -> dict[str, Tensor | None]:
    return {name: weight.grad for name, weight in experts.named_parameters()}
