"""How the vendored SM90 BF16 grouped GEMM is instantiated, fed with tensor maps and launched."""

from __future__ import annotations

import ctypes
import functools
import math
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


@dataclass(frozen=True)
class GemmPlan:
    """A loaded kernel and all of its launch that does not depend on the tensors.

    Attributes:
        kernel: the loaded kernel.
        num_sms, threads, cluster, smem: the launch configuration.
        box_a, box_b, box_d: rows and columns that one TMA copy of each operand moves.
        swizzle_d: swizzle of the output tile in bytes.
    """

    kernel: Kernel
    num_sms: int
    threads: int
    cluster: int | None
    smem: int
    box_a: tuple[int, int]
    box_b: tuple[int, int]
    box_d: tuple[int, int]
    swizzle_d: int

    def launch(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        d: torch.Tensor,
        grouped_layout: torch.Tensor,
        shape: tuple[int, int, int],
    ) -> None:
        """Launch on torch's current stream of the plan's device; all arguments are checked already.

        Args:
            a, b, d: 2-D, or 3-D with the groups outermost and one after another; last dimension contiguous.
            grouped_layout: int32 on the same device.
            shape: (m, n, k) as the kernel counts them.
        """
        m, n, k = shape
        arguments = (
            grouped_layout,
            ctypes.c_uint32(m),
            ctypes.c_uint32(n),
            ctypes.c_uint32(k),
            _matrix_map(a, self.box_a, OPERAND_SWIZZLE),
            _matrix_map(b, self.box_b, OPERAND_SWIZZLE),
            _matrix_map(d, self.box_d, self.swizzle_d),
        )
        self.kernel.launch(self.num_sms, self.threads, arguments, cluster=self.cluster, smem=self.smem)


def make_plan(problem: GemmProblem, config: GemmConfig, device: int) -> GemmPlan:
    """Compile (through the cache) and load the kernel on CUDA device number ``device``."""
    # An operand's box is one swizzle atom wide in the dimension that is contiguous.
    rows_a, rows_b = (
        block if major == "K" else config.block_k
        for major, block in zip(_MAJORS[problem.kind], (config.block_m, config.block_n), strict=True)
    )
    return GemmPlan(
        kernel=load_kernel(kernel_source(problem, config), device),
        num_sms=problem.num_sms,
        threads=config.threads,
        cluster=CLUSTER if config.multicast == CLUSTER else None,
        smem=config.smem_bytes,
        box_a=(rows_a, _SWIZZLE_ATOM),
        box_b=(rows_b, _SWIZZLE_ATOM),
        box_d=(config.block_m, _SWIZZLE_ATOM if config.output_swizzle else config.block_n),
        swizzle_d=config.output_swizzle,
    )


def _matrix_map(matrix: torch.Tensor, box: tuple[int, int], swizzle: int) -> TensorMap:
    """A 2-D tensor map over a matrix, or over a stack of matrices whose rows follow each other evenly."""
    *rows, columns = matrix.shape
    return _cached_matrix_map(
        matrix.data_ptr(), matrix.dtype, math.prod(rows), columns, matrix.stride(-2), box, swizzle
    )


@functools.lru_cache(maxsize=4096)
def _cached_matrix_map(
    address: int,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    row_stride: int,
    box: tuple[int, int],
    swizzle: int,
) -> TensorMap:
    return tensor_map(
        address, box, shape=(rows, columns), strides=(row_stride, 1), dtype=dtype, swizzle=swizzle
    )
