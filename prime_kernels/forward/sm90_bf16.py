"""Host side of the SM90 BF16 forward kernel: sources, tensor maps and the launches of one rank."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ..exchange import (
    BLOCK_M,
    CLUSTER_SIZE,
    DEFAULT_TIMEOUT_SECONDS,
    MAX_RANKS,
    NO_CLAMP,
    Communicator,
    ExchangeShape,
    FaultBox,
    Pools,
    Problem,
    region,
)
from ..jit import KernelSource
from ..jit.launch import Kernel, load_kernel
from ..jit.tensormap import tensor_map

ARCH = "sm_90a"
FORWARD_THREADS = 384
PLAN_THREADS = 256
PLAN_ENTRIES_PER_CTA = 2048
PLAN_WARPS = 8
BLOCK_K = 64  # bf16 elements of a 128-byte swizzled row
SWIZZLE_BYTES = 128
OUTPUT_ROWS = 64  # rows of an activation tile one warpgroup writes
WEIGHT_BOX_ROWS = 128  # each CTA of a cluster loads this part of the weight tile for both
MAX_ROW_COUNTS = 480
MIN_WAVE_TASKS_PER_CLUSTER = 2
DISPATCH_LEAD_BYTES = 24 << 20
TRACE_EVENT_BYTES = 48
TRACE_CAPACITY = 512
FORWARD_SHARED_BYTES = 4 * (BLOCK_M * BLOCK_K * 2 + 256 * BLOCK_K * 2) + 2 * 16384 + MAX_ROW_COUNTS * 4 + 12 * 8


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
        ("epoch", ctypes.c_uint64),
        ("fault", ctypes.c_uint64),
    ]


class ForwardParams(ctypes.Structure):
    """Mirror of ``ForwardParams`` in params.cuh."""

    _fields_ = [
        ("comm", Communicator),
        ("problem", Problem),
        ("pool_x", ctypes.c_uint64),
        ("origins", ctypes.c_uint64),
        ("counters", ctypes.c_uint64),
        ("y", ctypes.c_uint64),
        ("fault", ctypes.c_uint64),
        ("recv_stats", ctypes.c_uint64),
        ("trace_events", ctypes.c_uint64),
        ("trace_counts", ctypes.c_uint64),
        ("trace_capacity", ctypes.c_uint64),
    ]


def plan_source(entry: str) -> KernelSource:
    return KernelSource(entry, "#include <prime_kernels/route_plan.cuh>\n", f"prime_kernels::{entry}", ARCH)


def forward_source(hidden: int, intermediate: int, trace: bool = False) -> KernelSource:
    """The forward kernel for one (H, I); everything else is an argument."""
    config = f"prime_kernels::ForwardConfig<{hidden}, {intermediate}, {str(trace).lower()}>"
    return KernelSource(
        "forward_sm90_bf16",
        "#include <prime_kernels/forward_sm90_bf16.cuh>\n",
        f"prime_kernels::forward_sm90_bf16<{config}>",
        ARCH,
    )


class Sm90Rank:
    """One rank: its symmetric memory, pools and launches. Real ranks and virtual ranks on one GPU use the same code."""

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
    ) -> None:
        self.shape, self.rank, self.storage = shape, rank, storage
        self.num_ctas = num_sms // CLUSTER_SIZE * CLUSTER_SIZE
        offsets, _ = shape.symmetric_layout()
        self.device = storage.device
        chunks = max(1, -(-shape.tokens * shape.topk // PLAN_ENTRIES_PER_CTA))
        blocks = shape.worst_case_pool_blocks() if pool_blocks is None else pool_blocks
        self.pools = Pools(shape, blocks, chunks, self.device)
        self.fault = FaultBox()
        self.comm = Communicator(
            peers=(ctypes.c_uint64 * MAX_RANKS)(*peers),
            at=offsets,
            timeout_ns=int(timeout_seconds * 1e9),
            rank=rank,
            num_ranks=shape.ranks,
        )
        self.x = region(storage, offsets.x, (shape.tokens, shape.hidden), torch.bfloat16)
        self.dy = region(storage, offsets.dy, (shape.tokens, shape.hidden), torch.bfloat16)
        self.topk_idx = region(storage, offsets.topk_idx, (shape.tokens, shape.topk), torch.int64)
        self.topk_weights = region(storage, offsets.topk_weights, (shape.tokens, shape.topk), torch.float32)
        self._count: Kernel = load_kernel(plan_source("route_plan_count"), self.device)
        self._place: Kernel = load_kernel(plan_source("route_plan_place"), self.device)
        self._forward: Kernel = load_kernel(forward_source(shape.hidden, shape.intermediate, trace), self.device)
        self.trace_events = torch.zeros(self.num_ctas * 2, TRACE_CAPACITY, TRACE_EVENT_BYTES if trace else 0, dtype=torch.uint8, device=self.device)
        self.trace_counts = torch.zeros(self.num_ctas * 2, dtype=torch.int32, device=self.device)
        self.dispatch_lead = max(self.num_ctas, DISPATCH_LEAD_BYTES // (BLOCK_M * shape.hidden * 2))
        self.min_wave_tasks = MIN_WAVE_TASKS_PER_CLUSTER * self.num_ctas // CLUSTER_SIZE

    def route_plan(self, num_tokens: int) -> None:
        """Sort this rank's (token, slot) entries by expert, and zero the counters of the coming launch."""
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
            epoch=base + at.epoch,
            fault=self.fault.address,
        )
        grid = max(1, -(-params.num_entries // PLAN_ENTRIES_PER_CTA))
        self._count.launch(grid, PLAN_THREADS, (params,), smem=4 * shape.experts)
        self._place.launch(grid, PLAN_THREADS, (params,), smem=4 * ((PLAN_WARPS + 1) * shape.experts + PLAN_WARPS))

    def forward(self, y: Tensor, l1: Tensor, l2: Tensor, clamp: float | None = None, recv_stats: Tensor | None = None) -> None:
        """y[t] = sum_k w[t, k] * expert(x[t]); see contract. Asynchronous; faults surface in :meth:`check`."""
        shape, pools = self.shape, self.pools
        self.route_plan(y.shape[0])
        params = ForwardParams(
            comm=self.comm,
            problem=Problem(
                num_tokens=y.shape[0],
                num_topk=shape.topk,
                num_local_experts=shape.local_experts,
                pool_blocks=pools.blocks,
                min_wave_tasks=self.min_wave_tasks,
                dispatch_lead=self.dispatch_lead,
                clamp=NO_CLAMP if clamp is None else clamp,
            ),
            pool_x=pools.x.data_ptr(),
            origins=pools.origins.data_ptr(),
            counters=pools.counters.data_ptr(),
            y=y.data_ptr(),
            fault=self.fault.address,
            recv_stats=0 if recv_stats is None else recv_stats.data_ptr(),
            trace_events=self.trace_events.data_ptr(),
            trace_counts=self.trace_counts.data_ptr(),
            trace_capacity=TRACE_CAPACITY,
        )
        maps = (
            tensor_map(pools.x, (BLOCK_M, BLOCK_K), swizzle=SWIZZLE_BYTES),
            tensor_map(l1, (1, WEIGHT_BOX_ROWS, BLOCK_K), swizzle=SWIZZLE_BYTES),
            tensor_map(pools.activations, (BLOCK_M, BLOCK_K), swizzle=SWIZZLE_BYTES),
            tensor_map(pools.activations, (OUTPUT_ROWS, BLOCK_K), swizzle=SWIZZLE_BYTES),
            tensor_map(l2, (1, WEIGHT_BOX_ROWS, BLOCK_K), swizzle=SWIZZLE_BYTES),
        )
        self._forward.launch(self.num_ctas, FORWARD_THREADS, (params, *maps), cluster=CLUSTER_SIZE, smem=FORWARD_SHARED_BYTES)

    def check(self) -> None:
        """Raise what the kernels recorded (after the stream has been synchronised)."""
        self.fault.raise_if_set(self.pools.blocks * BLOCK_M)


def make_virtual_ranks(shape: ExchangeShape, device: torch.device, num_sms: int, **options: object) -> list[Sm90Rank]:
    """R ranks on one GPU, each with its share of the SMs; every flag, pull and push is real."""
    _, size = shape.symmetric_layout()
    storages = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(shape.ranks)]
    peers = [storage.data_ptr() for storage in storages]
    share = num_sms // shape.ranks
    return [Sm90Rank(shape, rank, storages[rank], peers, share, **options) for rank in range(shape.ranks)]  # type: ignore[arg-type]
