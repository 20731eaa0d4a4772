"""Ranks whose GPUs cannot reach each other are told so, all of them, before any memory is mapped."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from gloo_world import GlooWorld

from prime_kernels import SymmBuffer, runtime, sm90_memory, symm
from prime_kernels.peer_access import GpuView, check_peer_access, gpu_view


def _check(rank: int, size: int, views: list[GpuView]) -> str:
    assert dist.group.WORLD is not None
    try:
        check_peer_access(dist.group.WORLD, views[rank])
    except RuntimeError as error:
        return str(error)
    return ""


def _connected(size: int) -> list[GpuView]:
    gpus = [f"GPU-{index}" for index in range(size)]
    return [GpuView(gpu, {other: True for other in gpus if other != gpu}) for gpu in gpus]


def test_gpus_that_reach_each_other(world: GlooWorld) -> None:
    assert world.run(_check, _connected(world.size)) == [""] * world.size


def test_processes_that_see_their_own_gpu_alone(world: GlooWorld) -> None:
    """Nobody can tell before; the rendezvous will."""
    views = [GpuView(view.gpu, {}) for view in _connected(world.size)]
    assert world.run(_check, views) == [""] * world.size


def test_no_peer_access_names_the_ranks_on_all_of_them() -> None:
    views = _connected(4)
    views[3] = GpuView("GPU-3", {"GPU-0": True, "GPU-1": False, "GPU-2": True})
    with GlooWorld(4) as four:
        messages = four.run(_check, views)
    assert len(set(messages)) == 1
    assert messages[0].startswith("no peer access between GPUs of the group: rank 3 to rank 1; ")
    assert 'set_backend("reference")' in messages[0]


def test_two_ranks_on_one_gpu() -> None:
    with GlooWorld(2) as two:
        messages = two.run(_check, [GpuView("GPU-0", {"GPU-1": True})] * 2)
    assert messages[0] == messages[1]
    assert messages[0].startswith("several ranks on one GPU: ranks [0, 1] use GPU-0; ")
    assert "torch.cuda.set_device(LOCAL_RANK)" in messages[0]


def test_view_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 2)
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda index: SimpleNamespace(uuid=f"uuid {index}")
    )
    monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda device, peer: (device, peer) != (1, 2))
    assert gpu_view(torch.device("cuda", 1)) == GpuView("uuid 1", {"uuid 0": True, "uuid 2": False})
    assert gpu_view(torch.device("cuda")).gpu == "uuid 2"


def _buffer(rank: int, size: int) -> str:
    """Of the kernels, on GPUs that do not reach each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "resolve_backend", lambda device, mma_type: "sm90")
        patch.setattr(symm, "gpu_view", lambda device: GpuView(str(rank), {str(1 - rank): False}))
        patch.setattr(sm90_memory, "Sm90Memory", None)  # nothing is allocated
        with pytest.raises(RuntimeError) as error:
            SymmBuffer(None, 2 * size, 8, 2, 256, 128, mma_type="bf16xbf16")
    return str(error.value)


def test_a_buffer_is_refused_before_its_memory_is_allocated() -> None:
    with GlooWorld(2) as two:
        for message in two.run(_buffer):
            assert "rank 0 to rank 1, rank 1 to rank 0" in message
