"""How ranks find each other's memory, with a stand-in for torch's symmetric memory."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_world import GlooWorld

from prime_kernels import sm90_memory

CPU = torch.device("cpu")
SIZE = 64
MAPPED = 1 << 40  # where the stand-in maps a peer's allocation


def _storage(rank: int, size: int, offsets: list[int]) -> dict[str, Any]:
    """This rank's memory lies ``offsets[rank]`` bytes into its allocation; peers' are mapped elsewhere."""
    allocation = torch.full((SIZE + max(offsets),), 255, dtype=torch.uint8)
    seen: dict[str, Any] = {}

    def empty(count: int, **options: Any) -> torch.Tensor:
        seen["multicast off"] = os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST")
        return allocation[offsets[rank] : offsets[rank] + count]

    def rendezvous(tensor: torch.Tensor, name: str) -> SimpleNamespace:
        seen["group"] = name
        addresses = [MAPPED * (peer + 1) for peer in range(size)]
        addresses[rank] = allocation.data_ptr()
        return SimpleNamespace(buffer_ptrs=addresses)

    memory = SimpleNamespace(
        set_group_info=lambda name, rank, size, store: seen.update(info=(name, rank, size)),
        rendezvous=rendezvous,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed._symmetric_memory.empty", empty)
        patch.setattr("torch._C._distributed_c10d._SymmetricMemory", memory)
        patch.setattr("torch.cuda.device", lambda device: contextlib.nullcontext())
        patch.setattr(sm90_memory, "synchronize", lambda device: None)
        storage, peers, handle = sm90_memory.symmetric_storage(SIZE, dist.group.WORLD, CPU)
        first = seen["group"]
        sm90_memory.symmetric_storage(SIZE, dist.group.WORLD, CPU)
    assert handle is not None
    assert seen["info"] == (seen["group"], rank, size)
    assert storage.tolist() == [0] * SIZE
    assert peers[rank] == storage.data_ptr()
    return {
        "peers": [address - MAPPED * (peer + 1) for peer, address in enumerate(peers) if peer != rank],
        "names": (first, seen["group"]),
        "multicast off": (seen["multicast off"], os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST")),
    }


def test_addresses_are_those_of_each_ranks_part() -> None:
    """Also where torch's pool gave the ranks different places in their allocations."""
    with GlooWorld(3) as world:
        ranks = world.run(_storage, [0, 512, 1024])
    assert [rank["peers"] for rank in ranks] == [[512, 1024], [0, 1024], [0, 512]]


def test_every_rendezvous_has_a_name_of_its_own_and_no_multicast() -> None:
    with GlooWorld(2) as world:
        first, second = world.run(_storage, [0, 0])
    assert first["names"] == second["names"]
    assert len(set(first["names"])) == 2
    assert first["multicast off"] == ("1", None)


def test_one_rank_has_plain_memory() -> None:
    storage, peers, mapping = sm90_memory.symmetric_storage(SIZE, None, CPU)
    assert (peers, mapping) == ([storage.data_ptr()], None)
    assert storage.tolist() == [0] * SIZE
