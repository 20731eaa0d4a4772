"""Save a model with MegaMoE and its optimizer, load both elsewhere, and go on as if nothing had happened.

python examples/save_and_load.py [--folder FOLDER]

Both ways of torch: a state dict in a file, and a distributed checkpoint (DCP). The staging buffer is not in
them: it belongs to the process. Checkpoints of sharded experts, and loading them with other numbers of ranks,
are in fsdp2_expert_parallel.py. One process, on an SM90 GPU when there is one, else on the CPU.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from prime_kernels import MegaMoE

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS = 256, 128, 8, 2, 64
STEPS = 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False, dtype=torch.bfloat16)
        self.experts = MegaMoE(EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, max_tokens_per_rank=TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        topk_weights, topk_idx = self.router(x).float().softmax(-1).topk(TOP_K)
        return self.experts(x, topk_idx, topk_weights)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> list[float]:
    """Some steps on the data of steps ``first`` and following; the losses."""
    device = next(model.parameters()).device
    losses = []
    for step in range(first, first + STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(TOKENS, HIDDEN, generator=generator).to(device, torch.bfloat16)
        loss = (model(x) - x.roll(1, 1)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def make(seed: int, device: str) -> tuple[Layer, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Layer().to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, save, load both ways, train on; returns the losses after loading."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="keep the checkpoints here")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        model, optimizer = make(0, device)
        train(model, optimizer, 0)

        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, folder / "checkpoint.pt")
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / "dcp")

        from_file, file_optimizer = make(1, device)
        loaded = torch.load(folder / "checkpoint.pt", map_location=device, weights_only=True)
        from_file.load_state_dict(loaded["model"])
        file_optimizer.load_state_dict(loaded["optimizer"])

        from_dcp, dcp_optimizer = make(2, device)
        model_state, optimizer_state = get_state_dict(from_dcp, dcp_optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=folder / "dcp")  # into the tensors of the new model and optimizer
        set_state_dict(
            from_dcp, dcp_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    expected = train(model, optimizer, STEPS)
    found = {
        "state dict": train(from_file, file_optimizer, STEPS),
        "distributed checkpoint": train(from_dcp, dcp_optimizer, STEPS),
    }
    for name, losses in found.items():
        print(f"{name}: losses {losses}")
        if losses != expected:
            raise SystemExit(f"{name}: losses {losses} after loading, {expected} without")
    return expected


if __name__ == "__main__":
    main()
