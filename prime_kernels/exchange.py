"""What one rank of the SM90 kernels holds: symmetric memory, local pools, flags and the fault record.

The byte offsets and structures here are the host's side of ``include/prime_kernels/params.cuh``.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

MAX_RANKS = 32
MAX_ROUNDS = 4
MIN_ROWS_PER_GROUP = 4096  # of a (round, local expert)
MAX_ROW_COUNTS = 600  # rounds x E: the table of rows in shared memory
MAX_EXPERTS = 384  # over all ranks: the table of rows in shared memory
BLOCK_M = 128
CLUSTER_SIZE = 2
GRAD_COLUMNS = 128  # columns of I in one backward tile
COUNTER_HEADER = 32  # uint32 words before the per-block counters
FLAG_BYTES = 8
REGION_ALIGNMENT = 1024
PLAN_ENTRIES_PER_CTA = 2048  # (token, slot) entries one CTA of the route plan sorts
NO_CLAMP = float("inf")
DEFAULT_TIMEOUT_SECONDS = 60.0

_FAULT_SITES = {
    1: "waiting for the peer to stage its tokens",
    2: "waiting for the peer to finish pulling and pushing",
    3: "the peer gave up",
    4: "waiting for dispatched rows",
    5: "waiting for activation tiles",
    7: "pool overflow",
    8: "expert index out of range",
}
_PEER_SITES = (1, 2)
_ABORT_SITE = 3
_OVERFLOW_SITE = 7
_EXPERT_SITE = 8

_fault_memory: list[Tensor] = []


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
        ("max_entries", ctypes.c_uint32),
        ("num_local_experts", ctypes.c_uint32),
        ("pool_blocks", ctypes.c_uint32),
        ("min_wave_tasks", ctypes.c_uint32),
        ("num_rounds", ctypes.c_uint32),
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


# Where the flags and the epoch of every shape's layout end.
FLAGS_BYTES = 3 * REGION_ALIGNMENT


def aligned(size: int) -> int:
    """``size`` bytes, rounded up to where a region may start."""
    return -(-size // REGION_ALIGNMENT) * REGION_ALIGNMENT


def capturing(device: torch.device) -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True)
class ExchangeShape:
    """Sizes that are the same on all ranks.

    T tokens per rank, top-K, H hidden, I intermediate, E experts, R ranks.
    """

    tokens: int
    topk: int
    hidden: int
    intermediate: int
    experts: int
    ranks: int

    @property
    def local_experts(self) -> int:
        """Experts of one rank."""
        return self.experts // self.ranks

    @property
    def forward_rounds(self) -> int:
        """In how many parts the forward works on each rank's tokens; from what is equal on all ranks.

        All parts but the last are combined while the next is computed. A part must leave each expert enough
        rows that rounding them up to blocks costs little.
        """
        rows_per_expert = self.tokens * self.topk * self.ranks // self.experts
        rounds = 1
        while (
            rounds < MAX_ROUNDS
            and rows_per_expert // (2 * rounds) >= MIN_ROWS_PER_GROUP
            and 2 * rounds * self.experts <= MAX_ROW_COUNTS
        ):
            rounds *= 2
        return rounds

    def symmetric_layout(self) -> tuple[SymmetricOffsets, int]:
        """Offsets of every region and the total bytes of a rank's symmetric buffer.

        Flags and epoch come first, at the same place for every shape over the same ranks: peers write flags
        of the next call, which may be of another shape, while this rank is still in the present one.
        """
        entries = self.tokens * self.topk
        regions = {
            "ready_flags": MAX_RANKS * FLAG_BYTES,
            "done_flags": MAX_ROUNDS * MAX_RANKS * FLAG_BYTES,
            "epoch": FLAG_BYTES,
            "x": self.tokens * self.hidden * 2,
            "dy": self.tokens * self.hidden * 2,
            "topk_idx": entries * 8,
            "topk_weights": entries * 4,
            "route_count": MAX_ROUNDS * self.experts * 4,
            "route_begin": MAX_ROUNDS * self.experts * 4,
            "route_list": entries * 4,
            "slots": entries * self.hidden * 2,
            "dtopk_slots": entries * 4,
        }
        offsets, end = SymmetricOffsets(), 0
        for name, size in regions.items():
            setattr(offsets, name, end)
            end += aligned(size)
        return offsets, end

    def worst_case_pool_blocks(self) -> int:
        """Row blocks that hold any routing.

        Every slot of every token of every rank to this rank, in any split over experts.
        """
        rows = self.ranks * self.tokens * self.topk
        return -(-rows // BLOCK_M) + self.forward_rounds * self.local_experts

    def pool_blocks(self, capacity_factor: float | None) -> int:
        """Row blocks for ``capacity_factor`` times the rows of even routing, T K per rank; None: any routing.

        Each group's last block may be partly filled, so there is one more block for each.
        """
        worst = self.worst_case_pool_blocks()
        if capacity_factor is None:
            return worst
        rows = math.ceil(capacity_factor * self.tokens * self.topk)
        return min(worst, -(-rows // BLOCK_M) + self.forward_rounds * self.local_experts)


class FaultBox:
    """Host memory the kernels write a :class:`FaultRecord` to.

    Attributes:
        address: where the record is, for host and device.
        timeout_seconds: how long the kernels wait, for messages.
    """

    def __init__(self, pinned: bool = True) -> None:
        memory = torch.zeros(ctypes.sizeof(FaultRecord), dtype=torch.uint8, pin_memory=pinned)
        # Never given back: a kernel that outlives its buffer may still write here.
        _fault_memory.append(memory)
        self.address = memory.data_ptr()
        self.timeout_seconds = DEFAULT_TIMEOUT_SECONDS
        self._record = FaultRecord.from_address(self.address)

    def clear(self) -> None:
        """Forget what was recorded."""
        ctypes.memset(self.address, 0, ctypes.sizeof(FaultRecord))

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
        self.clear()
        what = _FAULT_SITES.get(site, f"site {site}")
        step = f"rank {rank}, step {epoch}"
        if site == _OVERFLOW_SITE:
            raise RuntimeError(
                f"{step}: the routing needs {expected} pool rows and {seen} are allocated; build the buffer "
                f"with room for at least {expected} rows: set_pool_capacity_factor(f) gives about f * T * K "
                "rows, and set_pool_capacity_factor(None) as many as any routing needs"
            )
        if site == _EXPERT_SITE:
            value = ctypes.c_int64(seen).value
            raise ValueError(
                f"{step}: topk_idx entry {peer} holds expert {value}, the limit is 0 <= expert < {expected}, "
                "or -1 for none; the results of that call are not valid"
            )
        if site == _ABORT_SITE:
            raise RuntimeError(f"{step}: {what}: peer {peer}; see that rank's own error")
        within = f"did not come within {self.timeout_seconds:g} s (expected {expected}, seen {seen})"
        fix = "raise the limit with set_timeout_seconds, or see the peer's own error if it ended"
        if site in _PEER_SITES:
            raise RuntimeError(f"{step}: peer {peer} {within}: {what}; {fix}")
        raise RuntimeError(f"{step}: {what}: what was waited for {within}; {fix}")


Regions: TypeAlias = "dict[str, tuple[tuple[int, ...], torch.dtype]]"


def _regions_bytes(regions: Regions) -> int:
    return sum(aligned(math.prod(extents) * dtype.itemsize) for extents, dtype in regions.values())


@dataclass(frozen=True)
class PoolLayout:
    """What the pools of one shape hold: tensors that both directions use, and those of the backward alone."""

    both: Regions
    backward: Regions

    @property
    def both_bytes(self) -> int:
        """Bytes of the parts that both directions use."""
        return _regions_bytes(self.both)

    @property
    def backward_bytes(self) -> int:
        """Bytes of the parts that the backward uses alone."""
        return _regions_bytes(self.backward)


def pool_layout(shape: ExchangeShape, blocks: int) -> PoolLayout:
    """The pools of ``shape`` with ``blocks`` row blocks of 128."""
    rows = blocks * BLOCK_M
    chunks = max(1, -(-shape.tokens * shape.topk // PLAN_ENTRIES_PER_CTA))
    bf16, int32, fp32 = torch.bfloat16, torch.int32, torch.float32
    return PoolLayout(
        both={
            "x": ((rows, shape.hidden), bf16),
            "activations": ((rows, shape.intermediate), bf16),
            "origins": ((rows, 2), int32),
            "counters": ((COUNTER_HEADER + 2 * blocks + shape.local_experts,), int32),
            "plan_counts": ((chunks, MAX_ROUNDS * shape.experts), int32),
        },
        backward={
            "dy": ((rows, shape.hidden), bf16),
            "dz": ((rows, 2 * shape.intermediate), bf16),
            "weights": ((rows,), fp32),
            "dtopk_parts": ((rows, -(-shape.intermediate // GRAD_COLUMNS)), fp32),
        },
    )


class PoolMemory:
    """The bytes behind pools, which all layers share. Each part is allocated at its first use."""

    def __init__(self, layout: PoolLayout, device: torch.device) -> None:
        self._sizes = {"both": layout.both_bytes, "backward": layout.backward_bytes}
        self._device = device
        self._parts: dict[str, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts, allocated yet or not."""
        return sum(self._sizes.values())

    def sizes(self) -> dict[str, int]:
        """Bytes of each part."""
        return dict(self._sizes)

    def part(self, name: str) -> Tensor:
        """uint8 memory of one part.

        Raises:
            RuntimeError: it would have to be allocated while a CUDA graph is being captured.
        """
        if name not in self._parts:
            if capturing(self._device):
                raise RuntimeError(
                    "the pools of this buffer are not allocated yet; run the captured calls once before the "
                    "capture"
                )
            self._parts[name] = torch.empty(self._sizes[name], dtype=torch.uint8, device=self._device)
        return self._parts[name]


class Pools:
    """Local memory of one rank for one call, shared by all layers and both directions.

    Attributes:
        x, dy: bf16 [C, H] dispatched rows.
        activations: bf16 [C, I]: a in the forward, w * a in the backward.
        dz: bf16 [C, 2I].
        weights: fp32 [C] routing weight of each row.
        dtopk_parts: fp32 [C, ceil(I / 128)].
        origins: int32 [C, 2] (rank, token * K + slot).
        counters: zeroed by each call's route plan.
        plan_counts: int32 [chunks, rounds * E], scratch of the route plan.

    dy, dz, weights and dtopk_parts are there after :meth:`add_backward`.
    """

    x: Tensor
    activations: Tensor
    origins: Tensor
    counters: Tensor
    plan_counts: Tensor
    dy: Tensor
    dz: Tensor
    weights: Tensor
    dtopk_parts: Tensor

    def __init__(self, shape: ExchangeShape, blocks: int, memory: PoolMemory) -> None:
        self.blocks = blocks
        self._layout = pool_layout(shape, blocks)
        self._memory = memory
        self._has_backward = False
        self._carve(self._layout.both, memory.part("both"))

    def add_backward(self) -> None:
        """Make room for what only the backward needs; a second call does nothing."""
        if not self._has_backward:
            self._carve(self._layout.backward, self._memory.part("backward"))
            self._has_backward = True

    def _carve(self, regions: Regions, memory: Tensor) -> None:
        offset = 0
        for name, (extents, dtype) in regions.items():
            setattr(self, name, region(memory, offset, extents, dtype))
            offset += aligned(math.prod(extents) * dtype.itemsize)

    @property
    def num_bytes(self) -> int:
        """Bytes of this shape's pools, those of the backward among them."""
        return self._layout.both_bytes + self._layout.backward_bytes


def region(storage: Tensor, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A typed view of ``storage`` (uint8) from byte ``offset`` on."""
    count = 1
    for extent in shape:
        count *= extent
    return storage[offset : offset + count * dtype.itemsize].view(dtype).view(*shape)
