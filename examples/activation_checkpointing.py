"""Recompute a block's activations in the backward, all of them or all but what the experts returned.

python examples/activation_checkpointing.py

Full checkpointing runs dispatch, experts and combine twice. Selective checkpointing saves y of `mega_moe` and
recomputes the cheap rest. One process, on an SM90 GPU when there is one, else on the CPU.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from prime_kernels import MegaMoE
from prime_kernels.op import forward_keep_z_op, forward_op

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS, LAYERS = 256, 128, 8, 2, 64, 2


class Block(nn.Module):
    """Norm, router and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = MegaMoE(EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, max_tokens_per_rank=TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x)
        topk_weights, topk_idx = self.router(tokens).float().softmax(-1).topk(TOP_K)
        return x + self.experts(tokens, topk_idx, topk_weights)


def save_experts(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep y (and z, with keep="z"); recompute everything else."""
    kept = operator in (forward_op, forward_keep_z_op)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


selective = partial(create_selective_checkpoint_contexts, save_experts)
MODES: dict[str, Any] = {
    "none": lambda block, x: block(x),
    "full": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "selective": lambda block, x: checkpoint(block, x, use_reentrant=False, context_fn=selective),
}
# How often the experts of all layers run forward in one step.
RUNS = {"none": LAYERS, "full": 2 * LAYERS, "selective": LAYERS}


class CountExperts(TorchDispatchMode):
    """Counts the forward op's runs."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.runs += function is forward_op
        return function(*args, **(kwargs or {}))


def main() -> dict[str, int]:
    """A step in each mode; returns how often the experts ran in it."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    blocks = nn.ModuleList(Block() for _ in range(LAYERS)).to(device, torch.bfloat16)
    x = torch.randn(TOKENS, HIDDEN, device=device, dtype=torch.bfloat16)
    runs: dict[str, int] = {}
    gradients: dict[str, list[Tensor]] = {}
    for mode, call in MODES.items():
        with CountExperts() as counted:
            y = x
            for block in blocks:
                y = call(block, y)
            y.float().square().mean().backward()
        runs[mode] = counted.runs
        gradients[mode] = [weight.grad for weight in blocks.parameters()]
        blocks.zero_grad()
        print(f"{mode:10} experts ran forward {counted.runs} times")
    for mode, values in gradients.items():
        same = all(torch.equal(a, b) for a, b in zip(values, gradients["none"], strict=True))
        if not same or runs[mode] != RUNS[mode]:
            raise SystemExit(f"{mode}: gradients equal: {same}, runs {runs[mode]} of {RUNS[mode]}")
    return runs


if __name__ == "__main__":
    main()
