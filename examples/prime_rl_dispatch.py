"""A mixture-of-experts layer as prime-rl builds it, with Mega MoE as the dispatch backend of its TOML file.

Runs anywhere, on a CPU with the reference backend:

    python examples/prime_rl_dispatch.py --steps 20
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from prime_kernels.integrations.grouped_experts import allocate_main_grads
from prime_kernels.integrations.prime_rl import MegaMoEDispatcher, dispatch_config

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG = Path(__file__).with_suffix(".toml")
EXPERTS, TOP_K, HIDDEN, INTER, TOKENS = 8, 2, 256, 128, 64
LEARNING_RATE = 2.0
STEPS = 20  # after which the loss has to be a tenth lower


class GroupedExperts(nn.Module):
    """Weights by TorchTitan's names: w1 gate, w2 down, w3 up."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, INTER, HIDDEN) * HIDDEN**-0.5)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INTER) * INTER**-0.5)
        self.w3 = nn.Parameter(torch.randn(EXPERTS, INTER, HIDDEN) * HIDDEN**-0.5)


class MoE(nn.Module):
    """Router, then dispatch, experts and combine in the dispatcher."""

    def __init__(self, dispatcher: MegaMoEDispatcher) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = GroupedExperts()
        self.dispatcher = dispatcher

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).float().softmax(dim=-1)
        top_scores, selected = scores.topk(TOP_K, dim=-1)
        y = self.dispatcher.run(x, top_scores, selected, self.experts, score_before_experts=False)
        self.dispatcher.synchronize()
        return y


def main() -> None:
    """Train the layer to a fixed target and print the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of two micro-batches")
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = dispatch_config(tomllib.loads(CONFIG.read_text()))
    dispatcher = MegaMoEDispatcher(config, num_experts=EXPERTS, top_k=TOP_K)
    layer = MoE(dispatcher).to(device, torch.bfloat16)
    # The backward adds the experts' gradients here, in fp32, over the micro-batches of a step.
    allocate_main_grads(layer.experts)
    x, target = torch.randn(2, TOKENS, HIDDEN, device=device, dtype=torch.bfloat16).unbind()
    losses = []
    for step in range(steps):
        loss = torch.zeros((), device=device)
        for half in range(2):
            rows = slice(half * TOKENS // 2, (half + 1) * TOKENS // 2)
            part = (layer(x[rows]).float() - target[rows].float()).square().mean() / 2
            part.backward()
            loss += part.detach()
        with torch.no_grad():
            for weight in layer.parameters():
                gradient = getattr(weight, "main_grad", None)
                if gradient is None:
                    gradient = weight.grad
                weight -= LEARNING_RATE * gradient.to(weight.dtype)
                gradient.zero_()
        losses.append(loss.item())
        print(f"step {step} loss {losses[-1]:.4f}")
    if steps >= STEPS and not losses[-1] < 0.9 * losses[0]:
        raise SystemExit(f"the loss did not fall: {losses[0]:.4f} to {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
