"""Expert parallelism of the reference: rows travel by point-to-point messages of torch.distributed.

Point-to-point rather than an all-to-all, so that a rank that waits in vain can name the peer it waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from .routing import RoutePlan, make_route_plan, pool_order
from .runtime import get_timeout_seconds

# The kernel's name for this run of this machine, the same in all containers on it.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# A rank whose routing is invalid sends this instead of row counts, so that its peers need not wait for it.
_NO_PLAN = -1


def resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """``group``; for None the default group, or None (one rank) where torch.distributed is not in use."""
    if group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return group


def group_size(group: dist.ProcessGroup | None) -> int:
    """Ranks in ``group``; None is one rank. RuntimeError for a group that was destroyed."""
    return 1 if group is None else _of_live_group(dist.get_world_size, group)


def group_rank(group: dist.ProcessGroup | None) -> int:
    """This process's rank in ``group``; None is one rank. RuntimeError for a group that was destroyed."""
    return 0 if group is None else _of_live_group(dist.get_rank, group)


def _of_live_group(question: Callable[[dist.ProcessGroup], int], group: dist.ProcessGroup) -> int:
    try:
        return question(group)
    except ValueError as error:  # torch no longer knows it
        raise RuntimeError(
            "the process group was destroyed; build the buffer anew over a live group (of a MegaMoE or "
            f"a dispatcher: set its group): {error}"
        ) from error


def nvlink_domain() -> str:
    """What ranks that reach each other's memory through NVLink have in common: the machine they run on."""
    return _BOOT_ID.read_text("ascii").strip()


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Device type -> backend name, as in {"cpu": "gloo", "cuda": "nccl"}."""
    return dict(part.split(":") for part in dist.get_backend_config(group).split(","))


def communicates_from_cuda(group: dist.ProcessGroup) -> bool:
    """Whether the group sends CUDA tensors; gloo claims them but has no messages for them."""
    return _backends(group).get("cuda", "gloo") != "gloo"


def communication_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Where messages live: on ``device`` if the group can send from there, else on the device it can."""
    if device.type == "cuda" and not communicates_from_cuda(group):
        return torch.device("cpu")
    if device.type == "cpu" and "cpu" not in _backends(group):
        return torch.device("cuda", torch.cuda.current_device())
    return device


def exchange(
    group: dist.ProcessGroup, rows: Tensor, send_counts: list[int], recv_counts: list[int], phase: str
) -> Tensor:
    """Send ``send_counts[p]`` consecutive rows to each peer p and receive ``recv_counts[p]`` from it.

    Args:
        group: the EP group.
        rows: [sum(send_counts), columns], any dtype, ordered by peer.
        send_counts, recv_counts: rows for and from each peer; the pair (p, q) agrees on them. A count of 0
            sends no message.
        phase: name of this exchange in error messages.

    Returns:
        [sum(recv_counts), columns] ordered by peer, on the device of ``rows``.

    Raises:
        RuntimeError: a peer did not arrive within ``get_timeout_seconds()``, or its connection broke.
    """
    rank = group_rank(group)
    device = communication_device(group, rows.device)
    # Bytes: some backends do not know bf16 or the fp8 types, and none has to.
    outgoing = rows.contiguous().view(torch.uint8).to(device)
    incoming = outgoing.new_empty(sum(recv_counts), outgoing.shape[1])
    receives = list(incoming.split(recv_counts))
    sends = list(outgoing.split(send_counts))
    receives[rank].copy_(sends[rank])
    peers = [peer for peer in range(len(sends)) if peer != rank]
    operations = [
        (peer, dist.P2POp(dist.irecv, receives[peer], group=group, group_peer=peer))
        for peer in peers
        if recv_counts[peer]
    ]
    operations += [
        (peer, dist.P2POp(dist.isend, sends[peer], group=group, group_peer=peer))
        for peer in peers
        if send_counts[peer]
    ]
    _complete(operations, rank, phase)
    return incoming.to(rows.device).view(rows.dtype)


def _complete(operations: list[tuple[int, dist.P2POp]], rank: int, phase: str) -> None:
    """Start all messages, then wait for each within the configured limit."""
    if not operations:
        return
    seconds = get_timeout_seconds()
    works = dist.batch_isend_irecv([operation for _, operation in operations])
    # A backend that coalesces (NCCL) returns one work for all; then no single peer can be named.
    names = [f"peer {peer}" for peer, _ in operations] if len(works) == len(operations) else ["its peers"]
    for name, work in zip(names, works, strict=False):
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {rank}: {name} did not complete phase '{phase}' within {seconds:g} s "
                f"(raise the limit with set_timeout_seconds; if the peer ended, see its own error): {error}"
            ) from error


class GroupTransport:
    """Dispatch and combine over an EP group; rank r owns experts [r * El, (r + 1) * El)."""

    def __init__(self, group: dist.ProcessGroup, counts: Tensor, received: Tensor) -> None:
        """``counts`` and ``received``: int64 [R, El], rows for and from each rank, by its or our experts."""
        self._group = group
        self._send = [int(count) for count in counts.sum(1).tolist()]
        self._recv = [int(count) for count in received.sum(1).tolist()]
        self._counts = [int(count) for count in received.sum(0).tolist()]
        self._order = pool_order(received)

    def local_counts(self) -> list[int]:
        return self._counts

    def dispatch(self, rows: Tensor, phase: str) -> Tensor:
        return exchange(self._group, rows, self._send, self._recv, phase)[self._order]

    def combine(self, rows: Tensor, phase: str) -> Tensor:
        by_rank = torch.empty_like(rows)
        by_rank[self._order] = rows
        return exchange(self._group, by_rank, self._recv, self._send, phase)


def plan_over_group(
    group: dist.ProcessGroup, topk_idx: Tensor, num_experts: int
) -> tuple[RoutePlan, GroupTransport]:
    """This rank's route plan and its transport. Collective over ``group``: the ranks exchange row counts.

    Raises:
        ValueError: this rank's ``topk_idx`` holds an id out of range.
        RuntimeError: a peer's does; a peer that does not arrive.
    """
    size, rank = group_size(group), group_rank(group)
    refusal: ValueError | None = None
    try:
        plan = make_route_plan(topk_idx, num_experts)
        counts = plan.counts.reshape(size, -1)
    except ValueError as error:
        refusal = error
        counts = torch.full((size, num_experts // size), _NO_PLAN, device=topk_idx.device)
    received = exchange(group, counts, [1] * size, [1] * size, "counts")
    if refusal is not None:
        raise refusal
    refused = [peer for peer in range(size) if bool((received[peer] == _NO_PLAN).any())]
    if refused:
        raise RuntimeError(f"rank {rank}: rank(s) {refused} refused the routing they staged; see their error")
    return plan, GroupTransport(group, counts, received)
