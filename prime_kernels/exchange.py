"""What one rank of the SM90 kernels holds: symmetric memory, local pools, flags and the fault record.

The byte offsets and structures here are the host's side of ``include/prime_kernels/params.cuh``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_RANKS = 32
BLOCK_M = 128
CLUSTER_SIZE = 2
GRAD_COLUMNS = 128  # columns of I in one backward tile
COUNTER_HEADER = 32  # uint32 words before the per-block counters
REGION_ALIGNMENT = 1024
NO_CLAMP = float("inf")
DEFAULT_TIMEOUT_SECONDS = 60.0

_FAULT_SITES = {
    1: "waiting for the peer to stage its tokens",
    2: "waiting for the peer to finish pulling and pushing",
    3: "the peer gave up",
    4: "waiting for dispatched rows",
    5: "waiting for activation tiles",
    6: "waiting for this rank's own tasks",
    7: "pool overflow",
    8: "expert index out of range",
}
_PEER_SITES = (1, 2, 3)
_OVERFLOW_SITE = 7
_EXPERT_SITE = 8


class SymmetricOffsets(ctypes.Structure):
    """Byte offsets into every rank's symmetric buffer."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "x",
            "dy",
            "topk_idx",
            "topk_weights",
            "route_count",
            "route_begin",
            "route_list",
            "slots",
            "dtopk_slots",
            "ready_flags",
            "done_flags",
            "epoch",
        )
    ]


class Communicator(ctypes.Structure):
    """Where the peers are, and which launch this is."""

    _fields_ = [
        ("peers", ctypes.c_uint64 * MAX_RANKS),
        ("at", SymmetricOffsets),
        ("timeout_ns", ctypes.c_uint64),
        ("rank", ctypes.c_uint32),
        ("num_ranks", ctypes.c_uint32),
    ]


class Problem(ctypes.Structure):
    """Sizes that may change from call to call."""

    _fields_ = [
        ("num_tokens", ctypes.c_uint32),
        ("num_topk", ctypes.c_uint32),
        ("num_local_experts", ctypes.c_uint32),
        ("pool_blocks", ctypes.c_uint32),
        ("min_wave_tasks", ctypes.c_uint32),
        ("dispatch_lead", ctypes.c_uint32),
        ("clamp", ctypes.c_float),
    ]


class Trace(ctypes.Structure):
    """Where a kernel compiled with tracing writes its timeline."""

    _fields_ = [("events", ctypes.c_uint64), ("counts", ctypes.c_uint64), ("capacity", ctypes.c_uint64)]


class LaunchParams(ctypes.Structure):
    """What both directions need."""

    _fields_ = [
        ("comm", Communicator),
        ("problem", Problem),
        ("origins", ctypes.c_uint64),
        ("counters", ctypes.c_uint64),
        ("fault", ctypes.c_uint64),
        ("trace", Trace),
    ]


class FaultRecord(ctypes.Structure):
    """The first wait that expired or check that failed on this rank; ``site`` 0 means none."""

    _fields_ = [
        ("site", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("peer", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("epoch", ctypes.c_uint64),
        ("expected", ctypes.c_uint64),
        ("seen", ctypes.c_uint64),
    ]


@dataclass(frozen=True)
class ExchangeShape:
    """Sizes that are the same on all ranks: T tokens per rank, top-K, H hidden, I intermediate, E experts, R ranks."""

    tokens: int
    topk: int
    hidden: int
    intermediate: int
    experts: int
    ranks: int

    @property
    def local_experts(self) -> int:
        return self.experts // self.ranks

    def symmetric_layout(self) -> tuple[SymmetricOffsets, int]:
        """Offsets of every region and the total bytes of a rank's symmetric buffer."""
        entries = self.tokens * self.topk
        regions = {
            "x": self.tokens * self.hidden * 2,
            "dy": self.tokens * self.hidden * 2,
            "topk_idx": entries * 8,
            "topk_weights": entries * 4,
            "route_count": self.experts * 4,
            "route_begin": self.experts * 4,
            "route_list": entries * 4,
            "slots": entries * self.hidden * 2,
            "dtopk_slots": entries * 4,
            "ready_flags": self.ranks * 8,
            "done_flags": self.ranks * 8,
            "epoch": 8,
        }
        offsets, end = SymmetricOffsets(), 0
        for name, size in regions.items():
            setattr(offsets, name, end)
            end += -(-size // REGION_ALIGNMENT) * REGION_ALIGNMENT
        return offsets, end

    def worst_case_pool_blocks(self) -> int:
        """Row blocks that hold any routing: every slot of every token of every rank to this rank, in any split over experts."""
        rows = self.ranks * self.tokens * self.topk
        return -(-rows // BLOCK_M) + self.local_experts


class FaultBox:
    """Host memory the kernels write a :class:`FaultRecord` to."""

    def __init__(self) -> None:
        self._memory = torch.zeros(ctypes.sizeof(FaultRecord), dtype=torch.uint8, pin_memory=True)
        self.address = self._memory.data_ptr()
        self._record = FaultRecord.from_address(self.address)

    def raise_if_set(self) -> None:
        """Turn a recorded fault into an exception, once.

        Raises:
            RuntimeError: a peer that did not arrive (rank, peer, phase, seconds) or a pool that is too small.
            ValueError: an expert index out of range.
        """
        record = self._record
        if record.site == 0:
            return
        site, rank, peer, epoch = record.site, record.rank, record.peer, record.epoch
        expected, seen = record.expected, record.seen
        ctypes.memset(self.address, 0, ctypes.sizeof(FaultRecord))
        what = _FAULT_SITES.get(site, f"site {site}")
        if site == _OVERFLOW_SITE:
            raise RuntimeError(
                f"rank {rank}: {expected} pool rows are needed and {seen} are allocated; build the buffer with a pool "
                f"capacity of at least {expected} rows (step {epoch})"
            )
        if site == _EXPERT_SITE:
            value = ctypes.c_int64(seen).value
            raise ValueError(
                f"rank {rank}: topk_idx entry {peer} holds expert {value}, the limit is 0 <= expert < {expected}, or -1 "
                f"for none (step {epoch})"
            )
        if site in _PEER_SITES:
            raise RuntimeError(
                f"rank {rank}, step {epoch}: {what}: peer {peer} (expected {expected}, seen {seen})"
            )
        raise RuntimeError(f"rank {rank}, step {epoch}: {what} timed out (expected {expected}, seen {seen})")


class Pools:
    """Local memory of one rank for one call, shared by all layers and both directions.

    Attributes:
        x, dy: bf16 [C, H] dispatched rows.
        activations: bf16 [C, I]: a in the forward, w * a in the backward.
        dz: bf16 [C, 2I].
        weights: fp32 [C] routing weight of each row.
        dtopk_parts: fp32 [C, I / 128].
        origins: int32 [C, 2] (rank, token * K + slot).
        counters: zeroed by each call's route plan.
        plan_counts: int32 [chunks, E], scratch of the route plan.
    """

    def __init__(self, shape: ExchangeShape, blocks: int, plan_chunks: int, device: torch.device, backward: bool) -> None:
        rows = blocks * BLOCK_M
        self.blocks = blocks

        def bf16(columns: int, wanted: bool = True) -> Tensor:
            return torch.empty(rows if wanted else 0, columns, dtype=torch.bfloat16, device=device)

        self.x = bf16(shape.hidden)
        self.activations = bf16(shape.intermediate)
        self.dy = bf16(shape.hidden, backward)
        self.dz = bf16(2 * shape.intermediate, backward)
        self.weights = torch.empty(rows if backward else 0, dtype=torch.float32, device=device)
        self.dtopk_parts = torch.empty(
            rows if backward else 0, shape.intermediate // GRAD_COLUMNS, dtype=torch.float32, device=device
        )
        self.origins = torch.empty(rows, 2, dtype=torch.int32, device=device)
        self.counters = torch.zeros(COUNTER_HEADER + 2 * blocks + shape.local_experts, dtype=torch.int32, device=device)
        self.plan_counts = torch.empty(plan_chunks, shape.experts, dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in vars(self).values() if isinstance(t, Tensor))


def region(storage: Tensor, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A typed view of ``storage`` (uint8) from byte ``offset`` on."""
    count = 1
    for extent in shape:
        count *= extent
    return storage[offset : offset + count * dtype.itemsize].view(dtype).view(*shape)
