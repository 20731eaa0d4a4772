"""Train a mixture-of-experts model with FSDP2 and expert parallelism, save it, and go on with another layout.

torchrun --nproc-per-node 4 examples/fsdp2_expert_parallel.py [--expert-parallel R] [--steps N]

A device mesh of (data, expert): R ranks hold all experts, E/R each; on GPUs they lie in one NVLink domain, a
node. FSDP shards the experts over the data dim, and everything else over all ranks; with --hsdp inside each
EP group, which then has a replica of it. The checkpoint is loaded with half the EP size. Runs on the SM90
kernels where each process has a GPU, else on the CPU. The text is the alphabet, the model tiny.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from prime_kernels import MegaMoE
from prime_kernels.integrations.expert_sharding import clip_grad_norm_, fully_shard_experts

LETTERS, SEQUENCE = 26, 12
# Sizes the kernels take: both a multiple of 64, hidden 256 at least.
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, HEADS, LAYERS = 256, 128, 8, 2, 4, 2
BATCH, MICRO_BATCHES = 4, 2
LEARNING_RATE, MAX_NORM = 5e-4, 1.0
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    """Causal attention, then router and experts; recomputed in the backward."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.attention_norm, self.moe_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.output = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        # fp32 weights, of which FSDP makes bf16 ones for the kernels.
        self.experts = MegaMoE(
            EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, max_tokens_per_rank=BATCH * SEQUENCE, group=group,
            dtype=torch.float32,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._forward, x, use_reentrant=False)

    def _forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, HEADS, HIDDEN // HEADS)
        mixed = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(x.shape))
        tokens = self.moe_norm(x)
        topk_weights, topk_idx = self.router(tokens).float().softmax(-1).topk(TOP_K)
        return x + self.experts(tokens, topk_idx, topk_weights / topk_weights.sum(-1, keepdim=True))


class Model(nn.Module):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, HIDDEN)
        self.blocks = nn.ModuleList(Block(group) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, LETTERS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(device_type: str, expert_parallel: int, hsdp: bool) -> Model:
    """The model of this rank, without values."""
    shape = (dist.get_world_size() // expert_parallel, expert_parallel)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=("data", "expert"))
    # HSDP: replicas over the first dim, shards over the second. FSDP: shards over all ranks.
    rest: DeviceMesh = mesh if hsdp else init_device_mesh(device_type, (mesh.size(),))
    with torch.device("meta"):
        model = Model(mesh["expert"].get_group())
    for block in model.blocks:
        fully_shard_experts(block.experts, mesh, mp_policy=POLICY)
        fully_shard(block, mesh=rest, mp_policy=POLICY)
    fully_shard(model, mesh=rest, mp_policy=POLICY)
    model.to_empty(device=device_type)
    return model


def initialize(model: Model) -> None:
    """Values that do not depend on the layout: every rank draws whole weights and keeps its parts."""
    generator = torch.Generator().manual_seed(0)
    whole = {
        name: torch.ones(weight.shape)  # of the norms
        if weight.dim() == 1
        else torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5
        for name, weight in model.named_parameters()
    }
    set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True))


def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> float:
    """One optimizer step over several micro-batches; the loss, a mean over the tokens of all ranks."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    total = torch.zeros((), device=device)
    for index in range(MICRO_BATCHES):
        model.set_requires_gradient_sync(index == MICRO_BATCHES - 1)  # earlier gradients are kept in fp32
        # The last rank has no text in the first micro-batch; it still has to take part in every call.
        texts = 0 if dist.get_rank() == dist.get_world_size() - 1 and index == 0 else BATCH
        starts = torch.randint(LETTERS, (texts, 1), generator=generator)
        text = ((starts + torch.arange(SEQUENCE + 1)) % LETTERS).to(device)
        logits = model(text[:, :-1]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten(), reduction="sum")
        # FSDP averages over the ranks, so each contributes its sum times the ranks over all tokens.
        all_tokens = (MICRO_BATCHES * dist.get_world_size() - 1) * BATCH * SEQUENCE
        (loss * dist.get_world_size() / all_tokens).backward()
        total += loss.detach() / all_tokens
    clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    return total.item()


def save_or_load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str, load: bool) -> None:
    """A checkpoint of whole experts: nothing in it depends on the layout."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    if not load:
        dcp.save(state, checkpoint_id=folder)
        return
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, save, load with half the EP size, train on; returns the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--expert-parallel", type=int, metavar="R", help="default: all ranks")
    parser.add_argument("--hsdp", action="store_true", help="not FSDP over all ranks for all but the experts")
    parser.add_argument("--steps", type=int, default=6, help="before the checkpoint, and after it")
    options = parser.parse_args(arguments)
    if "LOCAL_RANK" not in os.environ:
        parser.error("no process of torchrun; start it with torchrun --nproc-per-node 4")
    local_rank, local_size = (int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    device_type = "cuda" if torch.cuda.device_count() >= local_size else "cpu"
    if device_type == "cuda":
        torch.cuda.set_device(local_rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo")
    ranks = options.expert_parallel or dist.get_world_size()
    losses: list[float] = []

    def run(model: Model, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(options.steps):
            losses.append(step(model, optimizer, len(losses)))
        if dist.get_rank() == 0:
            print(f"EP {ranks}, {len(losses):3d} steps: loss {losses[-1]:.3f}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        everyones = [folder]
        dist.broadcast_object_list(everyones)  # rank 0's, on a disk that all of them see
        model = build(device_type, ranks, options.hsdp)
        initialize(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        run(model, optimizer)
        save_or_load(model, optimizer, everyones[0], load=False)
        ranks = max(1, ranks // 2)
        model = build(device_type, ranks, options.hsdp)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        save_or_load(model, optimizer, everyones[0], load=True)
        run(model, optimizer)
        dist.barrier()
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
