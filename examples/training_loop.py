"""Train a small mixture-of-experts model with MegaMoE under torch.compile.

python examples/training_loop.py [--steps N] [--backend inductor|aot_eager|eager]

One process, on an SM90 GPU when there is one, else on the CPU. The task: the letter of a fixed cipher.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prime_kernels import MegaMoE

LETTERS, TOKENS = 26, 96
# Sizes the kernels take: both a multiple of 64, hidden 256 at least.
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 256, 128, 8, 2
STEPS = 40  # after which the loss has to be a tenth


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, HIDDEN)
        self.norm = nn.RMSNorm(HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = MegaMoE(EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, max_tokens_per_rank=TOKENS)
        self.head = nn.Linear(HIDDEN, LETTERS, bias=False)

    def forward(self, letters: Tensor) -> Tensor:
        x = self.embedding(letters)
        tokens = self.norm(x)
        # Weights are used as given: normalise them here where the model does.
        topk_weights, topk_idx = self.router(tokens).float().softmax(-1).topk(TOP_K)
        return self.head(x + self.experts(tokens, topk_idx, topk_weights))


def main(arguments: list[str] | None = None) -> list[float]:
    """Train; returns the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--backend", default="inductor", help="of torch.compile (default %(default)s)")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Model().to(device, torch.bfloat16)
    # torch.compile cannot build the staging buffer while it traces.
    model.experts.build_buffer()
    compiled = torch.compile(model, fullgraph=True, backend=options.backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(options.steps):
        letters = torch.randint(LETTERS, (TOKENS,), device=device)
        loss = F.cross_entropy(compiled(letters).float(), (5 * letters + 3) % LETTERS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step:3d}  loss {losses[-1]:.3f}")
    if options.steps >= STEPS and not losses[-1] < 0.1 * losses[0]:
        raise SystemExit(f"the loss did not fall: {losses[0]:.3f} to {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
