"""Tile shapes of the SM90 BF16 grouped GEMMs, chosen by problem shape.

Every choice depends on the weight shape only, never on the number of rows, so that warming the kernel cache
needs no token count and a training step with other routing never compiles.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from enum import Enum

# Rows a group starts on in the m-grouped layouts and K elements a group covers a multiple of in the k-grouped
# one: one M tile, respectively two K blocks. Same value as upstream's default.
GROUP_ALIGNMENT = 128

BF16_BYTES = 2
FP32_BYTES = 4
BLOCK_K = 64
# With an fp32 output tile only two 64-wide stages fit; four half as wide keep the tensor cores fed.
BLOCK_K_FP32 = 32
# K-major tiles must be one swizzle atom wide, which with 64 bf16 elements is 128 bytes.
OPERAND_SWIZZLE = 128
OUTPUT_SWIZZLE_BF16 = 128
OUTPUT_SWIZZLE_FP32 = 0
WARPGROUP = 128
PRODUCER_THREADS = WARPGROUP
# Two mbarriers (full, empty) of 8 bytes a stage.
BARRIER_BYTES_PER_STAGE = 16
# Dynamic shared memory of a block on SM90, less the kilobyte the 1024-byte alignment may take.
SMEM_BUDGET = 227 * 1024 - 1024
MAX_STAGES = 8
CLUSTER = 2
# Output columns come in whole 64-element atoms of the 128-byte swizzle; one WGMMA covers at most 256.
BLOCK_NS = (256, 192, 128, 64)


class GemmKind(str, Enum):
    """Which operand order, and what the groups split.

    ``M_NT``: d[rows of g] = a[rows of g] @ b[g].T; ``M_NN``: d[rows of g] = a[rows of g] @ b[g];
    ``K_TN``: d[g] = a[rows of g].T @ b[rows of g].
    """

    M_NT = "m_grouped_nt"
    M_NN = "m_grouped_nn"
    K_TN = "k_grouped_tn"


@dataclass(frozen=True)
class GemmConfig:
    """Template parameters of the kernel that do not come from the problem.

    Attributes:
        block_m, block_n, block_k: the tile of one block, elements.
        num_stages: depth of the shared-memory pipeline.
        multicast: blocks per cluster that share an operand's tile, 1 or 2.
        multicast_on_a: share A between two N tiles (True) or B between two M tiles (False).
        output_bytes: bytes of an output element, 2 (bf16) or 4 (fp32).
    """

    block_m: int
    block_n: int
    num_stages: int
    multicast: int
    multicast_on_a: bool
    output_bytes: int
    block_k: int = BLOCK_K

    @property
    def math_threads(self) -> int:
        """One warpgroup computes 64 rows; two share a tile of 128 or 256."""
        return WARPGROUP if self.block_m <= 64 else 2 * WARPGROUP

    @property
    def threads(self) -> int:
        """Threads of a block: the producer warpgroup and the math warpgroups."""
        return PRODUCER_THREADS + self.math_threads

    @property
    def output_swizzle(self) -> int:
        """Swizzle of the output tile in shared memory, in bytes."""
        return OUTPUT_SWIZZLE_BF16 if self.output_bytes == BF16_BYTES else OUTPUT_SWIZZLE_FP32

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory: the output tile, then per stage the A and B tiles and two barriers."""
        return output_tile_bytes(self.block_m, self.block_n, self.output_bytes) + self.num_stages * (
            stage_bytes(self.block_m, self.block_n, self.block_k) + BARRIER_BYTES_PER_STAGE
        )


def output_tile_bytes(block_m: int, block_n: int, output_bytes: int) -> int:
    """Shared memory of the output tile, rounded up to the 1024 bytes the swizzle needs."""
    return -(-block_m * block_n * output_bytes // 1024) * 1024


def stage_bytes(block_m: int, block_n: int, block_k: int = BLOCK_K) -> int:
    """Shared memory of one stage's A and B tiles."""
    return (block_m + block_n) * block_k * BF16_BYTES


def max_stages(block_m: int, block_n: int, output_bytes: int, block_k: int = BLOCK_K) -> int:
    """How many stages fit beside the output tile."""
    room = SMEM_BUDGET - output_tile_bytes(block_m, block_n, output_bytes)
    return min(MAX_STAGES, room // (stage_bytes(block_m, block_n, block_k) + BARRIER_BYTES_PER_STAGE))


def make_config(
    block_m: int, block_n: int, output_bytes: int, multicast: str, block_k: int = BLOCK_K
) -> GemmConfig:
    """A configuration with as many stages as fit; ``multicast`` is ``"a"``, ``"b"`` or ``"none"``."""
    return GemmConfig(
        block_m=block_m,
        block_n=block_n,
        num_stages=max_stages(block_m, block_n, output_bytes, block_k),
        multicast=1 if multicast == "none" else CLUSTER,
        multicast_on_a=multicast == "a",
        output_bytes=output_bytes,
        block_k=block_k,
    )


# How fast a tile of this width runs relative to 256 columns when no column is wasted. From the sweep recorded
# in ci/results (`bench/gemm_sweep.py`, one H200): 131072 rows, 16 experts, the best multicast of each tile in
# TFLOP/s at H 2048 I 768, then at H 4096 I 1536:
#
#   tile          L1         L2         dA         dX
#   128x256x64    796  777   745  789   764  803   795  815
#   128x192x64    796  757   711  756   769  795   762  715
#   128x128x64    761  753   700  755   742  765   750  751
#   128x64x64     580  503   574  573   580  539   580  490
#
#   tile          dW13       dW2
#   128x256x32    751  752   741  742    4 stages
#   128x192x32    755  749   732  742
#   256x128x32    742  751   732  741
#   128x128x64    723  673   718  729
#   128x256x64    648  637   647  655    2 stages: too few in flight
#
# Multicast of A, of B and none lie within the spread of repeated runs (up to 8% at the larger shape), but for
# dW13 at the larger shape, where sharing B (752) beats none (712).
_RELATIVE_SPEED = {256: 1.0, 192: 0.98, 128: 0.95, 64: 0.6}

# With many groups each has few rows, so that writing the fp32 output weighs as much as the product. A smaller
# tile hides more of it: 131072 rows over 128 experts, H 2048 I 768, dW13 and dW2 in ms:
#   128x128x64  1.76  0.86     128x192x32  1.81     128x256x32  1.97  1.01     128x256x64  2.09
# It costs 3% where the groups are large after all.
MANY_GROUPS = 64
MANY_GROUPS_BLOCK_N = 128


def tile_count(extent: int, block: int) -> int:
    """Tiles that cover ``extent`` elements."""
    return -(-extent // block)


@functools.lru_cache(maxsize=1024)
def choose_config(
    kind: GemmKind, m: int, n: int, num_groups: int, num_sms: int, use_psum_layout: bool
) -> GemmConfig:
    """The configuration for a problem.

    Args:
        kind: operand order and grouping.
        m: rows of each group's output for ``K_TN``; ignored (0) for the m-grouped kinds.
        n: columns of the output.
        num_groups: weight matrices, or outputs for ``K_TN``.
        num_sms: blocks of the persistent grid.
        use_psum_layout: groups are given by their ends, so an M-grouped one may have an odd number of tiles.

    Raises:
        ValueError: when ``K_TN`` has an ``m`` that no M tile divides.
    """
    k_grouped = kind is GemmKind.K_TN
    output_bytes, block_k = (FP32_BYTES, BLOCK_K_FP32) if k_grouped else (BF16_BYTES, BLOCK_K)
    block_m = GROUP_ALIGNMENT
    if k_grouped and m % block_m:
        block_m = WARPGROUP // 2
        if m % block_m:
            # The output tile of the last M block would reach into the next group's output.
            raise ValueError(f"k-grouped GEMM: m = {m} must be a multiple of {block_m}")
    widths: tuple[int, ...] = BLOCK_NS
    if k_grouped and num_groups >= MANY_GROUPS:
        widths, block_k = tuple(width for width in BLOCK_NS if width <= MANY_GROUPS_BLOCK_N), BLOCK_K
    block_n = min(widths, key=lambda width: tile_count(n, width) * width / _RELATIVE_SPEED[width])
    multicast = "b" if multicast_legal(kind, m, n, block_m, block_n, num_sms, use_psum_layout) else "none"
    return make_config(block_m, block_n, output_bytes, multicast, block_k)


def multicast_legal(
    kind: GemmKind, m: int, n: int, block_m: int, block_n: int, num_sms: int, use_psum_layout: bool
) -> bool:
    """Whether two neighbouring blocks always work on the same group, as sharing an operand's tile needs.

    The scheduler hands consecutive tiles to consecutive blocks. With an odd number of blocks, or where a
    group may have an odd number of tiles, a pair could straddle two groups and wait for each other forever.
    (The m-grouped layout with a row index checks this on the device.)
    """
    if num_sms % CLUSTER:
        return False
    n_tiles = tile_count(n, block_n)
    if kind is GemmKind.K_TN:
        return math.prod((tile_count(m, block_m), n_tiles)) % CLUSTER == 0
    return not use_psum_layout or n_tiles % CLUSTER == 0
