"""Host side of the SM90 BF16 forward kernel (``include/prime_kernels/forward_sm90_bf16.cuh``)."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from torch import Tensor

from ..exchange import CLUSTER_SIZE, LaunchParams
from ..jit import KernelSource
from ..jit.tensormap import tensor_map

if TYPE_CHECKING:
    from ..sm90 import Sm90Rank

ARCH = "sm_90a"
THREADS = 384
SHARED_BYTES = 232392  # sizeof(SharedMap) in tiles.cuh
ATOM = 64  # bf16 elements of a swizzled row: the inner box of every map
SWIZZLE_BYTES = 128
WEIGHT_BOX_ROWS = 128  # each CTA of a cluster loads this part of the weight tile for both


class ForwardParams(ctypes.Structure):
    """Mirror of ``ForwardParams`` in params.cuh."""

    _fields_ = [
        ("launch", LaunchParams),
        ("pool_x", ctypes.c_uint64),
        ("y", ctypes.c_uint64),
        ("recv_stats", ctypes.c_uint64),
    ]


def kernel_source(direction: str, hidden: int, intermediate: int, flags: tuple[bool, ...]) -> KernelSource:
    """The ``"forward"`` or ``"backward"`` kernel; ``flags`` are those of its ``Config``, in their order."""
    name = f"{direction}_sm90_bf16"
    arguments = ", ".join([str(hidden), str(intermediate), *(str(flag).lower() for flag in flags)])
    config = f"prime_kernels::{direction.capitalize()}Config<{arguments}>"
    include = f"#include <prime_kernels/{name}.cuh>\n"
    return KernelSource(name, include, f"prime_kernels::{name}<{config}>", ARCH)


def source(
    hidden: int, intermediate: int, clamped: bool = False, keep_z: bool = False, trace: bool = False
) -> KernelSource:
    """The kernel for one (H, I), with or without a limit in SwiGLU, keeping gate and up or not.

    All else is an argument.
    """
    return kernel_source("forward", hidden, intermediate, (clamped, keep_z, trace))


def launch(
    rank: Sm90Rank,
    y: Tensor,
    l1: Tensor,
    l2: Tensor,
    clamp: float | None,
    recv_stats: Tensor | None,
    z: Tensor | None,
    rounds: int,
) -> None:
    """Launch the route plan and the kernel on the current stream.

    Args:
        y: bf16 [n, H], overwritten.
        l1, l2: bf16 [El, 2I, H] and [El, H, I]; the last dimension contiguous, other strides any multiple
            of 8.
        recv_stats: int32 [El], to which the rows received are added.
        z: bf16 [C, 2I] (gate | up of each pool row), written for the backward; None: not kept.
        rounds: parts the tokens are worked on in, equal on all ranks.
    """
    pools = rank.pools
    params = ForwardParams(
        launch=rank.launch_params(y.shape[0], clamp, rounds),
        pool_x=pools.x.data_ptr(),
        y=y.data_ptr(),
        recv_stats=0 if recv_stats is None else recv_stats.data_ptr(),
    )
    activations = tensor_map(pools.activations, (ATOM, ATOM), swizzle=SWIZZLE_BYTES)
    maps = (
        tensor_map(pools.x, (ATOM, ATOM), swizzle=SWIZZLE_BYTES),
        tensor_map(l1, (1, WEIGHT_BOX_ROWS, ATOM), swizzle=SWIZZLE_BYTES),
        activations,
        tensor_map(l2, (1, WEIGHT_BOX_ROWS, ATOM), swizzle=SWIZZLE_BYTES),
        activations if z is None else tensor_map(z, (ATOM, ATOM), swizzle=SWIZZLE_BYTES),
    )
    kernel = rank.forward_kernel(clamp is not None, z is not None)
    # Last: the route plan counts the call, and what raises after it would leave this rank out of step with
    # its peers.
    rank.route_plan(y.shape[0], rounds)
    kernel.launch(rank.num_ctas, THREADS, (params, *maps), cluster=CLUSTER_SIZE, smem=SHARED_BYTES)
