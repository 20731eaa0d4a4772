"""How the vendored SM90 BF16 grouped GEMM is instantiated, fed with tensor maps and launched."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch

from .gemm_heuristics import (
    CLUSTER,
    OPERAND_SWIZZLE,
    PRODUCER_THREADS,
    GemmConfig,
    GemmKind,
)
from .jit.launch import Kernel, load_kernel
from .jit.source import KernelSource
from .jit.tensormap import TensorMap, tensor_map

ARCH = "sm_90a"
_CODE = "#include <deep_gemm/impls/sm90_bf16_gemm.cuh>\n"
_SWIZZLE_ATOM = OPERAND_SWIZZLE // 2  # bf16 elements

# (major-ness of A, of B): the dimension that is contiguous in memory.
_MAJORS = {GemmKind.M_NT: ("K", "K"), GemmKind.M_NN: ("K", "MN"), GemmKind.K_TN: ("MN", "MN")}
# (k-grouped, groups given by their ends); the SM90 kernel has no k-grouped form with ends.
_GEMM_TYPES = {
    (False, False): "MGroupedContiguous",
    (False, True): "MGroupedContiguousWithPsumLayout",
    (True, False): "KGroupedContiguous",
}


@dataclass(frozen=True)
class GemmProblem:
    """What is compiled into a kernel besides its configuration.

    Attributes:
        kind: operand order and grouping.
        m, n, k: compiled-in dimensions; 0 where the kernel takes them at run time.
        num_groups: number of weight matrices, or of outputs for ``K_TN``.
        use_psum_layout: groups are given by their ends instead of by a row index; m-grouped only.
        accumulate: add into the output instead of overwriting it.
        num_sms: blocks of the persistent grid.
    """

    kind: GemmKind
    m: int
    n: int
    k: int
    num_groups: int
    use_psum_layout: bool
    accumulate: bool
    num_sms: int


def kernel_source(problem: GemmProblem, config: GemmConfig) -> KernelSource:
    """The instantiation of the vendored kernel for a problem and a configuration."""
    major_a, major_b = _MAJORS[problem.kind]
    k_grouped = problem.kind is GemmKind.K_TN
    arguments = (
        f"cute::UMMA::Major::{major_a}",
        f"cute::UMMA::Major::{major_b}",
        problem.m,
        problem.n,
        problem.k,
        problem.num_groups,
        config.block_m,
        config.block_n,
        config.block_k,
        OPERAND_SWIZZLE,
        OPERAND_SWIZZLE,
        config.output_swizzle,
        config.num_stages,
        PRODUCER_THREADS,
        config.math_threads,
        config.multicast,
        str(config.multicast_on_a).lower(),
        problem.num_sms,
        f"deep_gemm::GemmType::{_GEMM_TYPES[k_grouped, problem.use_psum_layout]}",
        str(problem.accumulate).lower(),
        "cutlass::bfloat16_t" if config.output_bytes == torch.bfloat16.itemsize else "float",
    )
    return KernelSource(
        name=f"{problem.kind.value}_bf16_gemm",
        code=_CODE,
        entry=f"deep_gemm::sm90_bf16_gemm_impl<{', '.join(map(str, arguments))}>",
        arch=ARCH,
    )


@functools.lru_cache(maxsize=1024)
def _kernel(problem: GemmProblem, config: GemmConfig, device: int) -> Kernel:
    return load_kernel(kernel_source(problem, config), device)


def _operand_box(k_major: bool, block_mn: int, block_k: int) -> tuple[int, int]:
    """The box of a 2-D operand: rows, then the contiguous dimension in one swizzle atom."""
    return (block_mn if k_major else block_k), _SWIZZLE_ATOM


def _matrix_map(matrix: torch.Tensor, box: tuple[int, int], swizzle: int) -> TensorMap:
    """A 2-D tensor map over a matrix, or over a stack of matrices whose rows follow each other evenly."""
    rows = matrix.shape[:-1].numel()
    columns = matrix.shape[-1]
    return tensor_map(matrix, box, shape=(rows, columns), strides=(matrix.stride(-2), 1), swizzle=swizzle)


def launch_gemm(
    problem: GemmProblem,
    config: GemmConfig,
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    shape: tuple[int, int, int],
) -> None:
    """Launch on the device of ``d`` and torch's current stream there; all arguments are checked already.

    Args:
        a, b, d: 2-D, or 3-D with the groups outermost; contiguous last dimension, groups one after another.
        grouped_layout: int32 on the same device.
        shape: (m, n, k) as the kernel counts them.
    """
    kernel = _kernel(problem, config, d.get_device())
    a_k_major, b_k_major = (major == "K" for major in _MAJORS[problem.kind])
    map_a = _matrix_map(a, _operand_box(a_k_major, config.block_m, config.block_k), OPERAND_SWIZZLE)
    map_b = _matrix_map(b, _operand_box(b_k_major, config.block_n, config.block_k), OPERAND_SWIZZLE)
    output_columns = _SWIZZLE_ATOM if config.output_swizzle else config.block_n
    map_d = _matrix_map(d, (config.block_m, output_columns), config.output_swizzle)
    m, n, k = shape
    kernel.launch(
        problem.num_sms,
        config.threads,
        (grouped_layout, ctypes.c_uint32(m), ctypes.c_uint32(n), ctypes.c_uint32(k), map_a, map_b, map_d),
        cluster=CLUSTER if config.multicast == CLUSTER else None,
        smem=config.smem_bytes,
    )
