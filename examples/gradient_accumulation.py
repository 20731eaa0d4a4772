"""Accumulate the experts' gradients over micro-batches in fp32, where the backward kernel adds to them.

python examples/gradient_accumulation.py [--micro-batches N]

A weight with an fp32 `main_grad` has its gradient added there, inside the kernel: no bf16 gradient exists,
none is rounded on its way into the sum. The optimizer works on fp32 masters. One process, on an SM90 GPU when
there is one, else on the CPU.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from prime_kernels import MegaMoE
from prime_kernels.reference import moe_backward

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS = 256, 128, 8, 2, 64
LEARNING_RATE = 1e-2
LIMIT = 5e-3  # relative Frobenius norm, of BF16 arithmetic against float64


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """One optimizer step over several micro-batches; returns the error of each accumulated gradient."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--micro-batches", type=int, default=16)
    count = parser.parse_args(arguments).micro_batches
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    experts = MegaMoE(EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, max_tokens_per_rank=TOKENS, device=device)

    masters = [weight.detach().float() for weight in experts.parameters()]
    for weight in experts.parameters():
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE)

    x = torch.randn(count, TOKENS, HIDDEN, device=device, dtype=torch.bfloat16)
    dy = torch.randn_like(x)  # of some loss
    topk_weights, topk_idx = torch.rand(count, TOKENS, EXPERTS, device=device).topk(TOP_K)
    for micro_batch in range(count):
        y = experts(x[micro_batch], topk_idx[micro_batch], topk_weights[micro_batch])
        y.backward(dy[micro_batch])

    # What a single backward over all tokens gives in float64.
    want = moe_backward(
        dy.flatten(0, 1).double(),
        x.flatten(0, 1).double(),
        topk_idx.flatten(0, 1),
        topk_weights.flatten(0, 1).double(),
        *(weight.detach().double() for weight in experts.parameters()),
    )
    errors = {
        "gate_up": relative_error(experts.gate_up.main_grad, want.dgate_up),
        "down": relative_error(experts.down.main_grad, want.ddown),
    }
    print(", ".join(f"{name}: relative error {error:.1e}" for name, error in errors.items()))
    if experts.gate_up.grad is not None or not max(errors.values()) < LIMIT:
        raise SystemExit(f"the accumulated gradients are wrong: {errors}, the limit is {LIMIT}")

    with torch.no_grad():
        for master, weight in zip(masters, experts.parameters(), strict=True):
            master.grad = weight.main_grad
        optimizer.step()
        for master, weight in zip(masters, experts.parameters(), strict=True):
            weight.copy_(master)
            weight.main_grad.zero_()
    return errors


if __name__ == "__main__":
    main()
