"""The vendored Mega MoE forward kernels, as sources for the compiler.

In this version they are compiled, never run: the package has no launcher for them, and nothing reports them
as available. Each dataclass lists the template parameters of one kernel in the kernel's own order, and each
function chooses them for a model. A buffer's capacity (tokens per rank) is one of them; the tokens of a call
are not.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from .jit import KernelSource
from .models import ModelShape

SM90_NUM_SMS = 132
SM100_NUM_SMS = 148
# Dynamic shared memory one block can have on both architectures (227 KiB).
MAX_SHARED_MEMORY = 227 * 1024
SHARED_MEMORY_ALIGNMENT = 1024
# Barriers, scheduler slots and amax scratch beside the large arrays of the SM100 kernels.
SM100_SMALL_SHARED_ARRAYS = 8 * 1024
BARRIER_BYTES = 8
# A deeper pipeline than this gains nothing, since a stage is then refilled long before it is needed.
MAX_STAGES = 8
MIN_STAGES = 2
BF16_BYTES = 2
FLOAT_BYTES = 4

DEFAULT_TOKENS_PER_RANK = 8192
WARP_SIZE = 32
WARPGROUP_SIZE = 128


def _align(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def _cpp(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value}u"
    if isinstance(value, float):
        return "cute::numeric_limits<float>::infinity()" if math.isinf(value) else f"{value!r}f"
    return str(value)


def _instantiation(function: str, parameters: Sm90Fp8 | Sm100Bf16 | Sm100Mxfp8) -> str:
    arguments = (_cpp(getattr(parameters, field.name)) for field in dataclasses.fields(parameters))
    return f"&deep_gemm::{function}<{', '.join(arguments)}>"


def _pipeline_stages(kernel: str, shape: ModelShape, fixed_bytes: int, stage_bytes: int) -> int:
    stages = min(MAX_STAGES, (MAX_SHARED_MEMORY - fixed_bytes) // stage_bytes)
    if stages < MIN_STAGES:
        raise ValueError(
            f"{kernel} has no room for {MIN_STAGES} pipeline stages at hidden {shape.hidden}, intermediate "
            f"{shape.intermediate}: {fixed_bytes} + {MIN_STAGES} x {stage_bytes} bytes of shared memory, "
            f"the limit is {MAX_SHARED_MEMORY}"
        )
    return stages


def _check_multiple(kernel: str, what: str, value: int, multiple: int) -> None:
    if value % multiple != 0:
        raise ValueError(f"{kernel} takes {what} in multiples of {multiple}, got {value}")


def _pool_tokens(
    shape: ModelShape, ep: int, tokens_per_rank: int, padding_per_expert: int, alignment: int
) -> int:
    """Rows of a pool that holds every token any routing can send here, each expert padded to whole blocks."""
    experts = shape.experts_per_rank(ep)
    most = ep * tokens_per_rank * min(shape.top_k, experts)
    return _align(most + experts * padding_per_expert, alignment)


def _model_parameters(shape: ModelShape, ep: int, tokens_per_rank: int) -> dict[str, Any]:
    """What every kernel is told of the model and its ranks, by the names of the dataclasses' fields."""
    return {
        "max_tokens_per_rank": tokens_per_rank,
        "hidden": shape.hidden,
        "intermediate": shape.intermediate,
        "num_experts": shape.num_experts,
        "top_k": shape.top_k,
        "num_ranks": ep,
    }


@dataclass(frozen=True)
class Sm90Fp8:
    """Template parameters of `sm90_fp8_mega_moe_impl`: 1x128 activations, 128x128 weights, fp32 scales."""

    max_tokens_per_rank: int
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    experts_per_wave: int
    block_m: int
    block_n: int
    block_k: int
    max_pool_tokens: int
    padded_scale_pool_tokens: int
    ring_tokens: int
    stages: int
    dispatch_threads: int
    tma_threads: int
    math_threads: int
    num_sms: int
    num_ranks: int
    activation_clamp: float = math.inf
    fast_math: bool = True
    # 0 lets the kernel choose.
    math_registers: int = 0
    # The 128 x 256 tile keeps one accumulator set per thread and scales it in place.
    accumulate_in_place: bool = True
    # Counting arrivals instead of marking them needs a ring that covers the whole pool.
    count_l2_arrivals: bool = True
    # Every math warpgroup owns its rows, so the L2 epilogue does not join them.
    sync_l2_epilogue: bool = False
    half_width_l2_staging: bool = False
    cluster_size: int = 2
    multicast_weights: bool = True
    # 0 is the schedule by waves.
    l2_lag_units: int = 0
    l2_staging_passes: int = 4


def sm90_fp8(
    shape: ModelShape, ep: int, tokens_per_rank: int = DEFAULT_TOKENS_PER_RANK
) -> tuple[KernelSource, ...]:
    """The SM90 FP8 forward of `shape` on `ep` ranks.

    Raises ValueError for a shape the kernel does not take.
    """
    kernel = "the vendored SM90 FP8 Mega MoE forward"
    block_m, block_n, block_k = 128, 256, 128
    # Clusters of two blocks take neighbouring column blocks, so both GEMMs need an even number of them.
    _check_multiple(kernel, "hidden", shape.hidden, 2 * block_n)
    _check_multiple(kernel, "2 x intermediate", 2 * shape.intermediate, 2 * block_n)
    dispatch_threads, tma_threads, math_threads = 2 * WARP_SIZE, 2 * WARP_SIZE, 2 * WARPGROUP_SIZE
    staging_passes = 4
    pool = _pool_tokens(shape, ep, tokens_per_rank, padding_per_expert=block_m - 1, alignment=block_m)

    math_warpgroups, math_warps = math_threads // WARPGROUP_SIZE, math_threads // WARP_SIZE
    dispatch_warps = dispatch_threads // WARP_SIZE
    send_buffer = _align(shape.hidden * dispatch_warps, SHARED_MEMORY_ALIGNMENT)
    l1_output, l2_output = block_m * block_n // 2, block_m * (block_n // staging_passes) * BF16_BYTES
    # Scales of one column block of weights: gate and up for L1, two blocks of 128 columns for L2.
    weight_scales = math_warpgroups * 2 * max(shape.hidden, shape.intermediate) // block_k * FLOAT_BYTES
    column_blocks = (2 * shape.intermediate + shape.hidden) // block_n
    tile_table_entries = -(-(pool // block_m) * column_blocks // SM90_NUM_SMS) + 2
    tile_table = max(tile_table_entries * 2 * FLOAT_BYTES, shape.num_experts * FLOAT_BYTES)
    barriers = (dispatch_warps + 2 * MAX_STAGES + 2 * math_warps) * BARRIER_BYTES
    fixed = send_buffer + max(l1_output, l2_output) + weight_scales + tile_table + barriers
    stage = (block_m + block_n) * block_k + block_m * FLOAT_BYTES

    parameters = Sm90Fp8(
        **_model_parameters(shape, ep, tokens_per_rank),
        experts_per_wave=shape.experts_per_rank(ep),
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        max_pool_tokens=pool,
        padded_scale_pool_tokens=pool,
        ring_tokens=pool,
        stages=_pipeline_stages(kernel, shape, _align(fixed, SHARED_MEMORY_ALIGNMENT), stage),
        dispatch_threads=dispatch_threads,
        tma_threads=tma_threads,
        math_threads=math_threads,
        num_sms=SM90_NUM_SMS,
        l2_staging_passes=staging_passes,
    )
    source = KernelSource(
        name="vendored_sm90_fp8_mega_moe",
        code="#include <deep_gemm/impls/sm90_fp8_mega_moe.cuh>\n",
        entry=_instantiation("sm90_fp8_mega_moe_impl", parameters),
        arch="sm_90a",
    )
    return (source,)


# Tile of both SM100 kernels: rows of a block, columns of a block, and rows of one store of the epilogue.
SM100_BLOCK_M = 192
SM100_BLOCK_N = 128
SM100_STORE_BLOCK_M = 32
# The vendored layout sizes pools for the tallest block it knows, and for a common multiple of all of them.
SM100_TALLEST_BLOCK_M = 240
SM100_POOL_ALIGNMENT = 1920
SM100_DISPATCH_THREADS = WARPGROUP_SIZE
SM100_MMA_THREADS = WARPGROUP_SIZE
SM100_EPILOGUE_THREADS = 2 * WARPGROUP_SIZE
# A dispatch warp pulls a token in pieces of at most this size.
SM100_MAX_PULL_BYTES = 4096
# Rows of scales are padded to the 128 lanes of a tensor-memory copy.
SM100_SCALE_ROWS = 128


def _sm100_pull_bytes(token_bytes: int) -> int:
    pieces = -(-token_bytes // SM100_MAX_PULL_BYTES)
    while token_bytes % pieces != 0 or token_bytes // pieces % 16 != 0:
        pieces += 1
    return token_bytes // pieces


def _sm100_check(kernel: str, shape: ModelShape) -> None:
    # A cluster of two blocks covers 256 columns; the combine reads a token in whole rows of 32 16-byte
    # vectors.
    _check_multiple(kernel, "hidden", shape.hidden, 2 * SM100_BLOCK_N)
    _check_multiple(kernel, "2 x intermediate", 2 * shape.intermediate, 2 * SM100_BLOCK_N)


def _sm100_fixed_bytes(shape: ModelShape, pull_bytes: int) -> int:
    expert_counts = _align(shape.num_experts * FLOAT_BYTES, SHARED_MEMORY_ALIGNMENT)
    dispatch_warps = SM100_DISPATCH_THREADS // WARP_SIZE
    send_buffer = _align(dispatch_warps * pull_bytes, SHARED_MEMORY_ALIGNMENT)
    warpgroups = SM100_EPILOGUE_THREADS // WARPGROUP_SIZE
    output = warpgroups * SM100_STORE_BLOCK_M * SM100_BLOCK_N * BF16_BYTES
    return expert_counts + send_buffer + output + SM100_SMALL_SHARED_ARRAYS


def _sm100_parameters(
    kernel: str, shape: ModelShape, ep: int, tokens_per_rank: int, token_bytes: int, stage_bytes: int
) -> dict[str, Any]:
    """What both SM100 kernels have in common, for tokens sent as ``token_bytes`` and stages of a size."""
    pull_bytes = _sm100_pull_bytes(token_bytes)
    return {
        **_model_parameters(shape, ep, tokens_per_rank),
        "num_shared_experts": shape.num_shared_experts,
        "block_m": SM100_BLOCK_M,
        "block_n": SM100_BLOCK_N,
        "ring_tokens": _pool_tokens(
            shape, ep, tokens_per_rank, SM100_TALLEST_BLOCK_M - 1, SM100_POOL_ALIGNMENT
        ),
        "stages": _pipeline_stages(kernel, shape, _sm100_fixed_bytes(shape, pull_bytes), stage_bytes),
        "pull_bytes": pull_bytes,
        "dispatch_threads": SM100_DISPATCH_THREADS,
        "mma_threads": SM100_MMA_THREADS,
        "epilogue_threads": SM100_EPILOGUE_THREADS,
        "num_sms": SM100_NUM_SMS,
    }


@dataclass(frozen=True)
class Sm100Bf16:
    """Template parameters of `sm100_bf16_mega_moe_impl`."""

    max_tokens_per_rank: int
    hidden: int
    intermediate: int
    num_experts: int
    num_shared_experts: int
    top_k: int
    block_m: int
    block_n: int
    block_k: int
    store_block_m: int
    ring_tokens: int
    stages: int
    pull_bytes: int
    dispatch_threads: int
    mma_threads: int
    epilogue_threads: int
    num_sms: int
    num_ranks: int
    activation_clamp: float = math.inf
    fast_math: bool = True


def sm100_bf16(
    shape: ModelShape, ep: int, tokens_per_rank: int = DEFAULT_TOKENS_PER_RANK
) -> tuple[KernelSource, ...]:
    """The SM100 BF16 forward of `shape` on `ep` ranks.

    Raises ValueError for a shape the kernel does not take.
    """
    kernel = "the vendored SM100 BF16 Mega MoE forward"
    _sm100_check(kernel, shape)
    block_k = 64
    # Two blocks share the activation rows of a tile.
    stage = (SM100_BLOCK_M // 2 + SM100_BLOCK_N) * block_k * BF16_BYTES
    parameters = Sm100Bf16(
        **_sm100_parameters(kernel, shape, ep, tokens_per_rank, shape.hidden * BF16_BYTES, stage),
        block_k=block_k,
        store_block_m=SM100_STORE_BLOCK_M,
    )
    source = KernelSource(
        name="vendored_sm100_bf16_mega_moe",
        code="#include <deep_gemm/impls/sm100_bf16_mega_moe.cuh>\n",
        entry=_instantiation("sm100_bf16_mega_moe_impl", parameters),
        arch="sm_100a",
    )
    return (source,)


@dataclass(frozen=True)
class Sm100Mxfp8:
    """Template parameters of `sm100_fp8_fp4_mega_moe_impl` with MXFP8 activations (scale per 32 columns)."""

    max_tokens_per_rank: int
    hidden: int
    intermediate: int
    num_experts: int
    num_shared_experts: int
    top_k: int
    block_m: int
    block_n: int
    block_k: int
    store_block_m_l1: int
    store_block_m_l2: int
    scale_block_m: int
    scale_block_n: int
    mma_kind: str
    ring_tokens: int
    scale_ring_tokens: int
    stages: int
    pull_bytes: int
    dispatch_threads: int
    mma_threads: int
    epilogue_threads: int
    num_sms: int
    num_ranks: int
    activation_clamp: float = math.inf
    # 0 is plain SwiGLU.
    swiglu_alpha: float = 0.0
    situ_activation: bool = False
    fast_math: bool = True
    token_scales: bool = False
    l1_expert_scales: bool = False
    l2_expert_scales: bool = False
    l2_activation_scales: bool = False
    fp8_combine: bool = False
    weight_type: str = "cutlass::float_e4m3_t"


# Element types of the expert weights, by the name the buffer's `mma_type` gives them.
SM100_WEIGHT_TYPES = {
    "fp8": "cutlass::float_e4m3_t",
    "fp4": "cutlass::detail::float_e2m1_unpacksmem_t",
}


def sm100_mxfp8(
    shape: ModelShape, ep: int, tokens_per_rank: int = DEFAULT_TOKENS_PER_RANK
) -> tuple[KernelSource, ...]:
    """The SM100 MXFP8 forwards of `shape` on `ep` ranks, with FP8 and with FP4 weights.

    Raises ValueError for a shape the kernel does not take.
    """
    kernel = "the vendored SM100 MXFP8 Mega MoE forward"
    _sm100_check(kernel, shape)
    block_k = 128
    # L2 reads whole K blocks of 128 columns.
    _check_multiple(kernel, "intermediate", shape.intermediate, block_k)
    scale_block_m = _align(SM100_BLOCK_M, SM100_SCALE_ROWS)
    # The scales of a K block of 128 columns are four bytes, one word a row.
    scales = (scale_block_m + SM100_BLOCK_N) * FLOAT_BYTES
    stage = (SM100_BLOCK_M // 2 + SM100_BLOCK_N) * block_k + scales
    common = _sm100_parameters(kernel, shape, ep, tokens_per_rank, shape.hidden, stage)
    parameters = Sm100Mxfp8(
        **common,
        block_k=block_k,
        store_block_m_l1=SM100_STORE_BLOCK_M,
        store_block_m_l2=SM100_STORE_BLOCK_M,
        scale_block_m=scale_block_m,
        scale_block_n=SM100_BLOCK_N,
        mma_kind="deep_gemm::MmaKind::MXFP8FP4",
        scale_ring_tokens=common["ring_tokens"] // SM100_BLOCK_M * scale_block_m,
    )
    return tuple(
        KernelSource(
            name=f"vendored_sm100_fp8x{weights}_mega_moe",
            code="#include <deep_gemm/impls/sm100_fp8_fp4_mega_moe.cuh>\n",
            entry=_instantiation(
                "sm100_fp8_fp4_mega_moe_impl", dataclasses.replace(parameters, weight_type=weight_type)
            ),
            arch="sm_100a",
        )
        for weights, weight_type in SM100_WEIGHT_TYPES.items()
    )
