"""Whether the GPUs of a group's ranks can reach each other's memory, asked before any is mapped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class GpuView:
    """A rank's GPU, and what it reaches. GPUs by their UUID, which is the same in all processes.

    reaches: for each other GPU that this process sees, whether its memory can be mapped. A process that sees
    its own GPU alone (CUDA_VISIBLE_DEVICES) knows of none.
    """

    gpu: str
    reaches: Mapping[str, bool]


def gpu_view(device: torch.device) -> GpuView:
    """Of ``device`` in this process."""
    own = torch.cuda.current_device() if device.index is None else device.index
    others = [index for index in range(torch.cuda.device_count()) if index != own]
    return GpuView(
        _uuid(own), {_uuid(index): torch.cuda.can_device_access_peer(own, index) for index in others}
    )


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def check_peer_access(group: dist.ProcessGroup, view: GpuView) -> None:
    """Compare the ranks' views; collective over ``group``.

    Raises:
        RuntimeError: two ranks with one GPU, or GPUs without peer access; on all ranks, with their names.
    """
    everyone: list[GpuView] = [view] * dist.get_world_size(group)
    dist.all_gather_object(everyone, view, group=group)
    _check_one_gpu_each(everyone)
    cut_off = [
        f"rank {rank} to rank {peer}"
        for rank, mine in enumerate(everyone)
        for peer, theirs in enumerate(everyone)
        if not mine.reaches.get(theirs.gpu, True)
    ]
    if cut_off:
        raise RuntimeError(
            f"no peer access between GPUs of the group: {', '.join(cut_off)}; the kernels read and write "
            "peers' memory through NVLink, so make expert-parallel groups of GPUs that it connects "
            '(nvidia-smi topo -m), or run plain torch with set_backend("reference")'
        )


def _check_one_gpu_each(everyone: Sequence[GpuView]) -> None:
    ranks_of: dict[str, list[int]] = {}
    for rank, view in enumerate(everyone):
        ranks_of.setdefault(view.gpu, []).append(rank)
    shared = {gpu: ranks for gpu, ranks in ranks_of.items() if len(ranks) > 1}
    if shared:
        names = ", ".join(f"ranks {ranks} use {gpu}" for gpu, ranks in shared.items())
        raise RuntimeError(
            f"several ranks on one GPU: {names}; their kernels would wait for each other, so give each rank "
            "a GPU of its own: torch.cuda.set_device(LOCAL_RANK) before the buffer is built"
        )
