"""Train an MoE layer of TorchTitan with its routed experts on mega_moe, beside a copy on its own experts.

python examples/torchtitan_moe.py [--steps N]

Needs TorchTitan 0.3 and what its MoE module imports. One process, on an SM90 GPU when there is one, else
on the CPU.
"""

from __future__ import annotations

import argparse
import copy

import torch
from torch import nn
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

from prime_kernels.integrations.torchtitan import apply

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, BATCH, SEQUENCE = 4, 2, 256, 128, 2, 32
STEPS = 20  # after which the loss has to be half
# Both compute in bf16 and round at different places.
LIMIT = 2e-2


def make_layer() -> nn.Module:
    experts = RoutedExperts.Config(
        inner_experts=GroupedExperts.Config(dim=HIDDEN, hidden_dim=INTERMEDIATE, num_experts=EXPERTS),
        token_dispatcher=LocalTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K),
    )
    gate = Linear.Config(in_features=HIDDEN, out_features=EXPERTS)
    router = TokenChoiceTopKRouter.Config(num_experts=EXPERTS, top_k=TOP_K, gate=gate)
    layer = MoE.Config(num_experts=EXPERTS, routed_experts=experts, router=router).build()
    for weight in layer.parameters():
        nn.init.normal_(weight, std=HIDDEN**-0.5)
    return layer


def train(layer: nn.Module, steps: int, device: str) -> list[float]:
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, SEQUENCE, HIDDEN, generator=generator).to(device)
    losses = []
    for _ in range(steps):
        loss = (layer(x) - x.roll(1, 2)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(arguments: list[str] | None = None) -> list[float]:
    """Train both; returns the losses with mega_moe."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    steps = parser.parse_args(arguments).steps
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = make_layer().to(device)
    own = copy.deepcopy(layer)
    print(f"computed by mega_moe: {', '.join(apply(layer, max_tokens_per_rank=BATCH * SEQUENCE))}")
    losses, theirs = train(layer, steps, device), train(own, steps, device)
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}; with the library's experts {theirs[-1]:.4f}")
    apart = abs(losses[-1] - theirs[-1]) / theirs[-1]
    falls = steps < STEPS or losses[-1] < 0.5 * losses[0]
    if not (falls and apart < LIMIT):
        raise SystemExit(f"losses {losses} and {theirs}: not falling, or {apart:.1e} apart at the end")
    return losses


if __name__ == "__main__":
    main()
