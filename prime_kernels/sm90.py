"""One rank of the SM90 BF16 kernels: symmetric memory, pools, route plan, the launches of both directions."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from .backward import sm90_bf16 as backward_kernel
from .exchange import (
    BLOCK_M,
    CLUSTER_SIZE,
    DEFAULT_TIMEOUT_SECONDS,
    MAX_RANKS,
    NO_CLAMP,
    PLAN_ENTRIES_PER_CTA,
    Communicator,
    ExchangeShape,
    FaultBox,
    LaunchParams,
    PoolMemory,
    Pools,
    Problem,
    Trace,
    pool_layout,
    region,
)
from .forward import sm90_bf16 as forward_kernel
from .jit import KernelSource
from .jit.launch import Kernel, load_kernel

PLAN_THREADS = 256
PLAN_WARPS = 8
MIN_WAVE_TASKS_PER_CLUSTER = 2
# Dispatch runs ahead by about this much of pool rows, so that they are still in L2 when they are read.
DISPATCH_LEAD_BYTES = 24 << 20
TRACE_EVENT_BYTES = 48
TRACE_CAPACITY = 1024
MATH_WARPGROUPS = 2
NANOSECONDS = 1e9


class PlanParams(ctypes.Structure):
    """Mirror of ``PlanParams`` in route_plan.cuh."""

    _fields_ = [
        ("topk_idx", ctypes.c_uint64),
        ("num_entries", ctypes.c_uint32),
        ("num_experts", ctypes.c_uint32),
        ("chunk_counts", ctypes.c_uint64),
        ("route_count", ctypes.c_uint64),
        ("route_begin", ctypes.c_uint64),
        ("route_list", ctypes.c_uint64),
        ("counters", ctypes.c_uint64),
        ("num_counters", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("num_rounds", ctypes.c_uint32),
        ("entries_per_round", ctypes.c_uint32),
        ("epoch", ctypes.c_uint64),
        ("fault", ctypes.c_uint64),
    ]


PLAN_ENTRIES = ("route_plan_count", "route_plan_place")


def plan_source(entry: str) -> KernelSource:
    """``route_plan_count`` or ``route_plan_place``."""
    include = "#include <prime_kernels/route_plan.cuh>\n"
    return KernelSource(entry, include, f"prime_kernels::{entry}", forward_kernel.ARCH)


class Sm90Rank:
    """One rank. Real ranks and virtual ranks on one GPU use the same code.

    Args:
        shape: sizes, equal on all ranks.
        rank: this rank.
        storage: uint8, this rank's symmetric memory (``shape.symmetric_layout()`` gives its size), zeroed.
        peers: address of every rank's symmetric memory as mapped on this device.
        num_sms: SMs the persistent kernels may use.
        pool_blocks: capacity of the pools in blocks of 128 rows; default: enough for any routing.
        timeout_seconds: how long a kernel waits for a peer.
        trace: compile the kernels with their timeline.
        pool_memory: where the pools lie; None: memory of their own, allocated now.
        fault: where faults are recorded; None: a box of its own.
    """

    def __init__(
        self,
        shape: ExchangeShape,
        rank: int,
        storage: Tensor,
        peers: Sequence[int],
        num_sms: int,
        pool_blocks: int | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        trace: bool = False,
        pool_memory: PoolMemory | None = None,
        fault: FaultBox | None = None,
    ) -> None:
        self.shape, self.rank, self.storage = shape, rank, storage
        self.device = storage.device
        self.pool_blocks = shape.worst_case_pool_blocks() if pool_blocks is None else pool_blocks
        self._pool_memory = pool_memory or PoolMemory(pool_layout(shape, self.pool_blocks), self.device)
        self._pools: Pools | None = None
        if pool_memory is None:
            self.pools.add_backward()
        self.fault = fault or FaultBox()
        offsets, _ = shape.symmetric_layout()
        self.comm = Communicator(
            peers=(ctypes.c_uint64 * MAX_RANKS)(*peers),
            at=offsets,
            rank=rank,
            num_ranks=shape.ranks,
        )
        self.set_timeout(timeout_seconds)
        self.x = region(storage, offsets.x, (shape.tokens, shape.hidden), torch.bfloat16)
        self.dy = region(storage, offsets.dy, (shape.tokens, shape.hidden), torch.bfloat16)
        self.topk_idx = region(storage, offsets.topk_idx, (shape.tokens, shape.topk), torch.int64)
        self.topk_weights = region(storage, offsets.topk_weights, (shape.tokens, shape.topk), torch.float32)
        self.use_sms(num_sms)
        lines = self.num_ctas * MATH_WARPGROUPS if trace else 0
        self.trace_events = torch.zeros(
            lines, TRACE_CAPACITY, TRACE_EVENT_BYTES, dtype=torch.uint8, device=self.device
        )
        self.trace_counts = torch.zeros(lines, dtype=torch.int32, device=self.device)
        self._count = load_kernel(plan_source("route_plan_count"), self.device)
        self._place = load_kernel(plan_source("route_plan_place"), self.device)
        self._trace = trace
        self.forward_rounds = shape.forward_rounds

    @property
    def pools(self) -> Pools:
        """Allocated at the first use."""
        if self._pools is None:
            self._pools = Pools(self.shape, self.pool_blocks, self._pool_memory)
        return self._pools

    def use_sms(self, num_sms: int) -> None:
        """The SMs of the launches from now on."""
        self.num_ctas = num_sms // CLUSTER_SIZE * CLUSTER_SIZE
        self.min_wave_tasks = MIN_WAVE_TASKS_PER_CLUSTER * self.num_ctas // CLUSTER_SIZE
        self.dispatch_lead = max(self.num_ctas, DISPATCH_LEAD_BYTES // (BLOCK_M * self.shape.hidden * 2))

    def set_timeout(self, seconds: float) -> None:
        """How long the launches from now on wait for a peer."""
        self.comm.timeout_ns = int(seconds * NANOSECONDS)
        self.fault.timeout_seconds = seconds

    def forward_kernel(self, clamped: bool, keep_z: bool = False) -> Kernel:
        """The forward kernel with or without a limit in SwiGLU; compiled at the first call."""
        source = forward_kernel.source(
            self.shape.hidden, self.shape.intermediate, clamped, keep_z, self._trace
        )
        return load_kernel(source, self.device)

    def backward_kernel(self, clamped: bool, kept_z: bool = False) -> Kernel:
        """The backward kernel with or without a limit in SwiGLU; compiled at the first call."""
        source = backward_kernel.source(
            self.shape.hidden, self.shape.intermediate, clamped, kept_z, self._trace
        )
        return load_kernel(source, self.device)

    def route_plan(self, num_tokens: int, rounds: int = 1) -> None:
        """Sort (token, slot) entries by expert, count the call, zero the counters of the coming launch."""
        shape, at, base = self.shape, self.comm.at, self.storage.data_ptr()
        params = PlanParams(
            topk_idx=base + at.topk_idx,
            num_entries=num_tokens * shape.topk,
            num_experts=shape.experts,
            chunk_counts=self.pools.plan_counts.data_ptr(),
            route_count=base + at.route_count,
            route_begin=base + at.route_begin,
            route_list=base + at.route_list,
            counters=self.pools.counters.data_ptr(),
            num_counters=self.pools.counters.numel(),
            rank=self.rank,
            num_rounds=rounds,
            entries_per_round=max(1, -(-num_tokens // rounds) * shape.topk),
            epoch=base + at.epoch,
            fault=self.fault.address,
        )
        grid = max(1, -(-params.num_entries // PLAN_ENTRIES_PER_CTA))
        self._count.launch(grid, PLAN_THREADS, (params,), smem=4 * rounds * shape.experts)
        self._place.launch(
            grid, PLAN_THREADS, (params,), smem=4 * ((PLAN_WARPS + 1) * rounds * shape.experts + PLAN_WARPS)
        )

    def launch_params(self, num_tokens: int, clamp: float | None, rounds: int = 1) -> LaunchParams:
        """The part of the parameters that both directions share."""
        return LaunchParams(
            comm=self.comm,
            problem=Problem(
                num_tokens=num_tokens,
                num_topk=self.shape.topk,
                max_entries=self.shape.tokens * self.shape.topk,
                num_local_experts=self.shape.local_experts,
                pool_blocks=self.pools.blocks,
                min_wave_tasks=self.min_wave_tasks,
                num_rounds=rounds,
                dispatch_lead=self.dispatch_lead,
                clamp=NO_CLAMP if clamp is None else clamp,
            ),
            origins=self.pools.origins.data_ptr(),
            counters=self.pools.counters.data_ptr(),
            fault=self.fault.address,
            trace=Trace(self.trace_events.data_ptr(), self.trace_counts.data_ptr(), TRACE_CAPACITY),
        )

    def forward(
        self,
        y: Tensor,
        l1: Tensor,
        l2: Tensor,
        clamp: float | None = None,
        recv_stats: Tensor | None = None,
        z: Tensor | None = None,
    ) -> None:
        """y of the staged tokens; asynchronous. Faults surface in :meth:`check`.

        ``z`` (:meth:`empty_z`) takes gate and up for a backward over the same routing, which has one round.
        """
        rounds = self.forward_rounds if z is None else 1
        forward_kernel.launch(self, y, l1, l2, clamp, recv_stats, z, rounds)

    def empty_z(self) -> Tensor:
        """Memory for gate and up of every pool row: bf16 [C, 2I]."""
        rows = self.pool_blocks * BLOCK_M
        return torch.empty(rows, 2 * self.shape.intermediate, dtype=torch.bfloat16, device=self.device)

    def backward(
        self,
        dx: Tensor,
        dw1: Tensor | None,
        dw2: Tensor | None,
        dtopk: Tensor,
        l1: Tensor,
        l2: Tensor,
        clamp: float | None = None,
        accumulate: bool = False,
        z: Tensor | None = None,
    ) -> None:
        """Gradients of the staged tokens and dy; asynchronous. Faults surface in :meth:`check`."""
        self.pools.add_backward()
        backward_kernel.launch(self, dx, dw1, dw2, dtopk, l1, l2, clamp, accumulate, z)

    def check(self) -> None:
        """Raise what the kernels recorded (after the stream has been synchronised)."""
        self.fault.raise_if_set()


def make_virtual_ranks(
    shape: ExchangeShape, device: torch.device, num_sms: int, **options: object
) -> list[Sm90Rank]:
    """R ranks on one GPU, each with its share of the SMs; every flag, pull and push is real.

    Launch each rank on a stream of its own: their kernels wait for each other.
    """
    _, size = shape.symmetric_layout()
    storages = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(shape.ranks)]
    peers = [storage.data_ptr() for storage in storages]
    share = num_sms // shape.ranks
    return [Sm90Rank(shape, rank, storages[rank], peers, share, **options) for rank in range(shape.ranks)]  # type: ignore[arg-type]
