"""Train a small Qwen3-MoE of Hugging Face Transformers with its experts on mega_moe, and generate with it.

python examples/transformers_qwen3_moe.py [--steps N] [--save FOLDER]

One process, on an SM90 GPU when there is one, else on the CPU. Random weights; the text is the alphabet.
"""

from __future__ import annotations

import argparse
import string

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from prime_kernels.integrations.transformers import apply, revert

LETTERS = string.ascii_lowercase
BATCH, SEQUENCE = 8, 24
PROMPT = "hijkl"
STEPS = 60  # after which the loss has to be a fifth


def make_config() -> Qwen3MoeConfig:
    """Sizes the kernels take: both a multiple of 64, hidden 256 at least."""
    return Qwen3MoeConfig(
        vocab_size=len(LETTERS), hidden_size=256, moe_intermediate_size=128, num_experts=8,
        num_experts_per_tok=2, norm_topk_prob=True, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, generate, switch back; returns the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--save", metavar="FOLDER", help="write the model as the library does")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Qwen3MoeForCausalLM(make_config()).to(device, torch.bfloat16)

    names = apply(model, max_tokens_per_rank=BATCH * SEQUENCE)
    print(f"computed by mega_moe: {', '.join(names)}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(options.steps):
        starts = torch.randint(len(LETTERS), (BATCH, 1), device=device)
        ids = (starts + torch.arange(SEQUENCE, device=device)) % len(LETTERS)
        loss = model(input_ids=ids, labels=ids, output_router_logits=True).loss  # with the auxiliary loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step:3d}  loss {losses[-1]:.3f}")

    if options.steps >= STEPS and not losses[-1] < 0.2 * losses[0]:
        raise SystemExit(f"the loss did not fall: {losses[0]:.3f} to {losses[-1]:.3f}")

    model.eval()
    prompt = torch.tensor([[LETTERS.index(letter) for letter in PROMPT]], device=device)
    everything = torch.ones_like(prompt)
    generated = model.generate(prompt, attention_mask=everything, max_new_tokens=8, do_sample=False)
    print("".join(LETTERS[token] for token in generated[0].tolist()))
    if options.save is not None:
        model.save_pretrained(options.save)
    revert(model)
    return losses


if __name__ == "__main__":
    main()
