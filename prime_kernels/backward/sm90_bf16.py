"""Host side of the SM90 BF16 backward kernel (``include/prime_kernels/backward_sm90_bf16.cuh``)."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..exchange import CLUSTER_SIZE, LaunchParams
from ..forward.sm90_bf16 import (
    ATOM,
    SHARED_BYTES,
    SWIZZLE_BYTES,
    THREADS,
    WEIGHT_BOX_ROWS,
    kernel_source,
)
from ..jit import KernelSource
from ..jit.tensormap import TENSOR_MAP_BYTES, tensor_map

if TYPE_CHECKING:
    from ..sm90 import Sm90Rank

NUM_MAPS = 10
KEPT_TILE_RATIO = 2  # with kept z, tiles of the first phase are this much wider: a wave of experts has fewer


class WeightGradient(ctypes.Structure):
    """Mirror of ``WeightGradient`` in params.cuh; strides in elements."""

    _fields_ = [
        ("data", ctypes.c_uint64),
        ("expert_stride", ctypes.c_uint64),
        ("row_stride", ctypes.c_uint64),
        ("is_fp32", ctypes.c_uint32),
        ("accumulate", ctypes.c_uint32),
    ]


class BackwardParams(ctypes.Structure):
    """Mirror of ``BackwardParams`` in params.cuh."""

    _fields_ = [
        ("launch", LaunchParams),
        ("pool_x", ctypes.c_uint64),
        ("pool_dy", ctypes.c_uint64),
        ("weights", ctypes.c_uint64),
        ("dtopk_parts", ctypes.c_uint64),
        ("dx", ctypes.c_uint64),
        ("dtopk", ctypes.c_uint64),
        ("dw", WeightGradient * 2),
    ]


Maps = ctypes.c_uint8 * (NUM_MAPS * TENSOR_MAP_BYTES)


def source(
    hidden: int, intermediate: int, clamped: bool = False, kept_z: bool = False, trace: bool = False
) -> KernelSource:
    """The kernel for one (H, I), with or without a limit in SwiGLU, with kept gate and up or not.

    All else is an argument.
    """
    return kernel_source("backward", hidden, intermediate, (clamped, kept_z, trace))


def _weight_gradient(dw: Tensor | None, accumulate: bool) -> WeightGradient:
    if dw is None:
        return WeightGradient()
    return WeightGradient(dw.data_ptr(), dw.stride(0), dw.stride(1), dw.dtype == torch.float32, accumulate)


def _tensor_maps(rank: Sm90Rank, l1: Tensor, l2: Tensor, z: Tensor | None) -> Maps:  # type: ignore[valid-type]
    """In the order of ``BackwardMaps``."""
    pools = rank.pools

    def tile(pool: Tensor) -> bytes:
        return bytes(tensor_map(pool, (ATOM, ATOM), swizzle=SWIZZLE_BYTES))

    def columns(matrices: Tensor) -> bytes:
        return bytes(tensor_map(matrices, (1, ATOM, ATOM), swizzle=SWIZZLE_BYTES))

    return Maps.from_buffer_copy(
        tile(pools.x)
        + tile(pools.dy)
        + tile(pools.dz)
        + tile(pools.activations)
        + bytes(tensor_map(l1, (1, WEIGHT_BOX_ROWS, ATOM), swizzle=SWIZZLE_BYTES))
        + columns(l1)
        + columns(l2)
        + columns(pools.x.unsqueeze(0))
        + columns(pools.activations.unsqueeze(0))
        + tile(pools.dz if z is None else z)
    )


def launch(
    rank: Sm90Rank,
    dx: Tensor,
    dw1: Tensor | None,
    dw2: Tensor | None,
    dtopk: Tensor,
    l1: Tensor,
    l2: Tensor,
    clamp: float | None,
    accumulate: bool,
    z: Tensor | None,
) -> None:
    """Launch the route plan and the kernel on the current stream.

    Args:
        dx: bf16 [n, H]; dtopk: fp32 [n, K]; both overwritten.
        dw1, dw2: [El, 2I, H] and [El, H, I], fp32 or bf16, overwritten, or added to when ``accumulate``
            (fp32); None: not computed.
        l1, l2: bf16 weights as in the forward.
        z: what the forward of the same routing kept; None: recomputed.
    """
    pools = rank.pools
    common = rank.launch_params(dx.shape[0], clamp)
    if z is not None:
        common.problem.min_wave_tasks //= KEPT_TILE_RATIO
    params = BackwardParams(
        launch=common,
        pool_x=pools.x.data_ptr(),
        pool_dy=pools.dy.data_ptr(),
        weights=pools.weights.data_ptr(),
        dtopk_parts=pools.dtopk_parts.data_ptr(),
        dx=dx.data_ptr(),
        dtopk=dtopk.data_ptr(),
        dw=(WeightGradient * 2)(_weight_gradient(dw2, accumulate), _weight_gradient(dw1, accumulate)),
    )
    maps = _tensor_maps(rank, l1, l2, z)
    kernel = rank.backward_kernel(clamp is not None, z is not None)
    # Last: the route plan counts the call, and what raises after it would leave this rank out of step with
    # its peers.
    rank.route_plan(dx.shape[0])
    kernel.launch(rank.num_ctas, THREADS, (params, maps), cluster=CLUSTER_SIZE, smem=SHARED_BYTES)
