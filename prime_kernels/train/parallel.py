"""Processes: attention is data parallel, experts are sharded. One process unless torchrun started several."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Parallel:
    """This process among its peers. `group` is None in a run of one process."""

    rank: int
    size: int
    group: dist.ProcessGroup | None
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this rank prints and writes files."""
        return self.rank == 0

    def sum_(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replace every tensor by its sum over the ranks, in one collective of fp32."""
        tensors = list(tensors)
        if self.group is None or not tensors:
            return
        flat = torch.cat([tensor.detach().float().reshape(-1) for tensor in tensors])
        dist.all_reduce(flat, group=self.group)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.detach().copy_(part.view_as(tensor))

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate the ranks' tensors (equal shapes) along the first dimension, in rank order."""
        if self.group is None:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.cat(parts)

    def broadcast_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Overwrite `tensor` with rank 0's."""
        if self.group is not None:
            dist.broadcast(tensor, src=0, group=self.group)
        return tensor

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.group is not None:
            dist.barrier(group=self.group)

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace `tensor` by its maximum over the ranks."""
        if self.group is not None:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return tensor


def environment_rank() -> int:
    """The rank torchrun gave this process, 0 without it."""
    return int(os.environ.get("RANK", "0"))


def environment_ranks() -> int:
    """How many processes torchrun started, 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def choose_device(name: str) -> torch.device:
    """`auto`, `cpu` or `cuda` to this process's device. Raises ValueError when there is no such GPU."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(
            "--device cuda, but torch finds no CUDA GPU; use --device cpu, or a CUDA build of torch"
        )
    local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= count:
        raise ValueError(
            f"local rank {local_rank} has no GPU: {count} on this machine; start at most {count} processes "
            "(--nproc-per-node) or use --device cpu"
        )
    return torch.device("cuda", local_rank)


def start(device: torch.device) -> Parallel:
    """Join the process group that torchrun describes, if it does."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "WORLD_SIZE" not in os.environ or "RANK" not in os.environ:
        return Parallel(0, 1, None, device)
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    return Parallel(dist.get_rank(), dist.get_world_size(), group, device)


def stop(parallel: Parallel) -> None:
    """Leave the process group, if there is one."""
    if parallel.group is not None:
        dist.destroy_process_group()
