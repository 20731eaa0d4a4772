"""The processes of ``bench ep``: the ones torchrun started, or this one alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from ..train.parallel import environment_ranks
from .ep_run import Groups

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Objects travel over gloo and rows over NCCL.
BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}
# Multicast over NVLink cannot be set up on every host, and nothing here needs it.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0"}


def local_ranks() -> int:
    """Processes that torchrun started on this machine, 1 without it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def check_machine(gpus: int) -> None:
    """Raise RuntimeError where the ranks do not fit this machine's GPUs.

    Args:
        gpus: that torch sees.
    """
    ranks, local = environment_ranks(), local_ranks()
    if ranks > local:
        raise RuntimeError(
            f"torchrun started {ranks} ranks, {local} of them on this machine: a group wider than one NVLink "
            "domain has no kernel; start all ranks on one machine (--nnodes 1)"
        )
    if local > gpus:
        raise RuntimeError(
            f"{local} ranks need as many GPUs and this machine has {gpus}; start at most {gpus} "
            f"(torchrun --nproc-per-node {gpus})"
        )


@contextmanager
def process_groups(device: torch.device) -> Iterator[Groups]:
    """The group of all ranks, and one of this rank alone; left at the end."""
    for name, value in NO_MULTICAST.items():
        os.environ.setdefault(name, value)
    backend = BACKENDS[device.type]
    if all(name in os.environ for name in TORCHRUN):
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        everyone = dist.group.WORLD
        assert everyone is not None
        alone, _ = dist.new_subgroups(group_size=1)
        assert alone is not None
        yield Groups(everyone, alone)
    finally:
        dist.destroy_process_group()
