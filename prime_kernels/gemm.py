"""DeepGEMM's BF16 grouped GEMMs under DeepGEMM's names.

On SM90 these launch DeepGEMM's own kernel from the vendored headers, on CPU tensors (or after
``set_backend("reference")``) plain torch. What neither covers (an ``epilogue``, another GPU) goes to an
installed ``deep_gemm``, and without one is an error that says so.

Terms: G groups (experts), M rows in all, `contiguous`: the groups' rows lie one after another, each group
starting on a multiple of :func:`get_mk_alignment_for_contiguous_layout` rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from ._dropin import upstream_attribute
from .gemm_checks import (
    check_compiled_dims,
    check_dtypes,
    check_group_sizes,
    check_row_count,
    check_rows,
    check_shape,
    check_stacked,
    check_tensors,
)
from .gemm_heuristics import BLOCK_K, CLUSTER, GROUP_ALIGNMENT, GemmKind, choose_config
from .gemm_kernel import GemmPlan, GemmProblem, kernel_source, make_plan
from .gemm_reference import k_grouped_tn, m_grouped
from .jit.source import KernelSource
from .runtime import get_backend, sm_limit

_SM90 = (9, 0)
# SMs of an H100 or H200 in the SXM form, which warm-up assumes when there is no GPU to ask.
HOPPER_SXM_SMS = 132


def get_mk_alignment_for_contiguous_layout() -> int:
    """Rows (or K elements) every group of a contiguous layout starts on a multiple of."""
    return GROUP_ALIGNMENT


def m_grouped_bf16_gemm_nt_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
    epilogue: object | None = None,
) -> None:
    """``d[r] = a[r] @ b[g(r)].T`` for every row r of group g(r).

    Args:
        a: bf16 [M, K], last dimension contiguous.
        b: bf16 [G, N, K], last dimension contiguous, groups one after another.
        d: bf16 [M, N], overwritten. Rows of no group hold unspecified values afterwards (zero where the
            rows of ``a`` are zero), so they must be ignored.
        grouped_layout: int32. By default [M]: the group of each row, -1 for padding; the rows of a 128-row
            block belong to one group. With ``use_psum_layout`` [G]: the end of each group, which is its start
            plus its rows; a group starts at the end of the one before it, rounded up to 128 rows. Its values
            are on the device and are not checked.
        compiled_dims: which of n and k are compiled into the kernel.
        use_psum_layout: see ``grouped_layout``.
        ensure_zero_padding: kept for compatibility; zero rows of ``a`` always give zero rows of ``d`` here.
        expected_m_for_psum_layout: a hint of upstream's, checked and unused.
        epilogue: not None goes to an installed ``deep_gemm``.

    Raises:
        ValueError: for a wrong shape, dtype, device or stride.
        RuntimeError: on a GPU without this kernel, with no ``deep_gemm`` installed.
    """
    if expected_m_for_psum_layout is not None and not use_psum_layout:
        raise ValueError("expected_m_for_psum_layout needs use_psum_layout=True")
    _m_grouped(
        GemmKind.M_NT,
        a,
        b,
        d,
        grouped_layout,
        compiled_dims,
        use_psum_layout,
        ensure_zero_padding,
        expected_m_for_psum_layout,
        epilogue,
    )


def m_grouped_bf16_gemm_nn_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    epilogue: object | None = None,
) -> None:
    """``d[r] = a[r] @ b[g(r)]`` with b bf16 [G, K, N] (K a multiple of 64); else as the NT form."""
    _m_grouped(
        GemmKind.M_NN,
        a,
        b,
        d,
        grouped_layout,
        compiled_dims,
        use_psum_layout,
        ensure_zero_padding,
        None,
        epilogue,
    )


def k_grouped_bf16_gemm_tn_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    ks: Sequence[int] | None,
    grouped_layout: torch.Tensor,
    c: torch.Tensor | None = None,
    compiled_dims: str = "mn",
    use_psum_layout: bool = False,
    epilogue: object | None = None,
) -> None:
    """``d[g] = c[g] + a[rows of g].T @ b[rows of g]``, the weight gradient of every group.

    Args:
        a: bf16 [sum K, M], last dimension contiguous, M a multiple of 64.
        b: bf16 [sum K, N], last dimension contiguous.
        d: fp32 [G, M, N] contiguous. Overwritten (exact zeros for an empty group) or, with ``c``, added into.
        ks: rows of each group, each a multiple of 64 and all of them adding up to sum K. May be None with
            ``use_psum_layout``; all of ``d`` is then zeroed first, because the empty groups aren't known.
        grouped_layout: int32 [G] on the device: the values of ``ks``, or with ``use_psum_layout`` the end of
            each group (start plus rows; a group starts at the end of the one before it, rounded up to 128).
            The rows between an end and the next start must be zero in ``a`` and ``b``.
        c: None to overwrite ``d``; ``d`` itself to accumulate; another fp32 tensor of its shape is copied
            into ``d`` first.
        compiled_dims: which of m and n are compiled into the kernel.
        use_psum_layout: see ``grouped_layout``.
        epilogue: not None goes to an installed ``deep_gemm``.

    Raises:
        ValueError: for a wrong shape, dtype, device or stride.
        RuntimeError: on a GPU without this kernel, with no ``deep_gemm`` installed.
    """
    name = "k_grouped_bf16_gemm_tn_contiguous"
    backend = _backend(name, d, epilogue)
    if backend == "upstream":
        upstream_attribute(name)(a, b, d, ks, grouped_layout, c, compiled_dims, use_psum_layout, epilogue)  # type: ignore[operator]
        return
    check_tensors(name, {"a": (a, 2), "b": (b, 2), "d": (d, 3)}, d, grouped_layout)
    if backend != "reference":
        check_dtypes(name, {"a": (a, torch.bfloat16), "b": (b, torch.bfloat16), "d": (d, torch.float32)})
    num_groups, m, n = d.shape
    sum_k = a.shape[0]
    check_shape(name, "a", a, (sum_k, m))
    check_shape(name, "b", b, (sum_k, n))
    check_shape(name, "grouped_layout", grouped_layout, (num_groups,))
    check_compiled_dims(name, compiled_dims, "mn")
    check_group_sizes(name, ks, num_groups, sum_k, use_psum_layout)
    if c is not None:
        check_shape(name, "c", c, (num_groups, m, n))
        if c.dtype != d.dtype or c.device != d.device:
            raise ValueError(
                f"{name}: c is {c.dtype} on {c.device}, d is {d.dtype} on {d.device}; they must agree"
            )
    if not d.is_contiguous():
        raise ValueError(f"{name}: d has strides {d.stride()}, needs a contiguous tensor")
    _start_from(d, c, ks)
    if d.numel() == 0 or sum_k == 0:
        return
    if backend == "reference":
        if c is None:
            d.zero_()
        k_grouped_tn(a, b, d, grouped_layout, use_psum_layout)
        return
    check_rows(name, {"a": a, "b": b, "d": d})
    check_row_count(name, {"a": a, "b": b, "d": d})
    if use_psum_layout:
        # The SM90 kernel knows sizes only. With the zero rows up to the next start counted in, they are the
        # same groups.
        grouped_layout = _aligned_sizes(grouped_layout)
    device = d.get_device()
    plan = _plan(
        GemmKind.K_TN, m, n, 0, num_groups, False, c is not None, _usable_sms(device), compiled_dims, device
    )
    plan.launch(a, b, d, grouped_layout, (m, n, sum_k))


def _aligned_sizes(ends: torch.Tensor) -> torch.Tensor:
    """Rows of each group, padding included, from the groups' ends; on the device, no synchronisation."""
    aligned_ends = (ends + (GROUP_ALIGNMENT - 1)) // GROUP_ALIGNMENT * GROUP_ALIGNMENT
    return aligned_ends.diff(prepend=aligned_ends.new_zeros(1))


def _start_from(d: torch.Tensor, c: torch.Tensor | None, ks: Sequence[int] | None) -> None:
    """Bring ``d`` into the state the kernel starts from: it skips empty groups and never reads ``c``."""
    if c is not None:
        if c.data_ptr() != d.data_ptr():
            d.copy_(c)
    elif ks is None:
        d.zero_()
    else:
        for group, k in enumerate(ks):
            if k == 0:
                d[group].zero_()


def _m_grouped(
    kind: GemmKind,
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    compiled_dims: str,
    use_psum_layout: bool,
    ensure_zero_padding: bool,
    expected_m: int | None,
    epilogue: object | None,
) -> None:
    nt = kind is GemmKind.M_NT
    name = f"m_grouped_bf16_gemm_{'nt' if nt else 'nn'}_contiguous"
    backend = _backend(name, d, epilogue)
    if backend == "upstream":
        hints = (expected_m,) if nt else ()
        upstream_attribute(name)(  # type: ignore[operator]
            a, b, d, grouped_layout, compiled_dims, use_psum_layout, ensure_zero_padding, *hints, epilogue
        )
        return
    check_tensors(name, {"a": (a, 2), "b": (b, 3), "d": (d, 2)}, d, grouped_layout)
    if backend != "reference":
        check_dtypes(name, {"a": (a, torch.bfloat16), "b": (b, torch.bfloat16), "d": (d, torch.bfloat16)})
    m, k = a.shape
    num_groups = b.shape[0]
    n = d.shape[1]
    check_shape(name, "d", d, (m, n))
    check_shape(name, "b", b, (num_groups, n, k) if nt else (num_groups, k, n))
    check_shape(name, "grouped_layout", grouped_layout, (num_groups if use_psum_layout else m,))
    check_compiled_dims(name, compiled_dims, "nk")
    if d.numel() == 0:
        return
    if backend == "reference":
        m_grouped(a, b.mT if nt else b, d, grouped_layout, use_psum_layout)
        return
    if k == 0:
        d.zero_()
        return
    if not nt and k % BLOCK_K:
        # The last K block would take rows of the next group's matrix: harmless times zero, but not times NaN.
        raise ValueError(f"{name}: k = {k} must be a multiple of {BLOCK_K}")
    check_rows(name, {"a": a, "b": b, "d": d})
    check_stacked(name, "b", b)
    check_row_count(name, {"a": a, "b": b, "d": d})
    device = d.get_device()
    plan = _plan(
        kind, 0, n, k, num_groups, use_psum_layout, False, _usable_sms(device), compiled_dims, device
    )
    plan.launch(a, b, d, grouped_layout, (m, n, k))


@functools.lru_cache(maxsize=1024)
def _plan(
    kind: GemmKind,
    m: int,
    n: int,
    k: int,
    num_groups: int,
    use_psum_layout: bool,
    accumulate: bool,
    num_sms: int,
    compiled_dims: str,
    device: int,
) -> GemmPlan:
    """The loaded kernel for a problem; m is 0 for the m-grouped kinds, k for ``K_TN``."""
    config = choose_config(kind, m, n, num_groups, num_sms, use_psum_layout)
    problem = GemmProblem(
        kind=kind,
        m=m if "m" in compiled_dims else 0,
        n=n if "n" in compiled_dims else 0,
        k=k if "k" in compiled_dims else 0,
        num_groups=num_groups,
        use_psum_layout=use_psum_layout,
        accumulate=accumulate,
        num_sms=num_sms,
    )
    return make_plan(problem, config, device)


def kernel_sources(
    hidden: int, intermediate: int, num_local_experts: int, num_sms: int = HOPPER_SXM_SMS
) -> list[KernelSource]:
    """The six GEMMs of one MoE layer, as a forward and backward through these functions compiles them.

    Args:
        hidden: H. intermediate: I. num_local_experts: groups.
        num_sms: blocks of the persistent grid, see ``get_num_sms``.
    """
    num_sms = _even_sms(num_sms)
    sources = []
    # (kind, m, n, k): L1, L2, dA, dX, then dW13 and dW2 both ways (overwriting and accumulating).
    shapes = [
        (GemmKind.M_NT, 0, 2 * intermediate, hidden),
        (GemmKind.M_NT, 0, hidden, intermediate),
        (GemmKind.M_NN, 0, intermediate, hidden),
        (GemmKind.M_NN, 0, hidden, 2 * intermediate),
        (GemmKind.K_TN, 2 * intermediate, hidden, 0),
        (GemmKind.K_TN, hidden, intermediate, 0),
    ]
    for kind, m, n, k in shapes:
        config = choose_config(kind, m, n, num_local_experts, num_sms, False)
        for accumulate in (False, True) if kind is GemmKind.K_TN else (False,):
            problem = GemmProblem(kind, m, n, k, num_local_experts, False, accumulate, num_sms)
            sources.append(kernel_source(problem, config))
    return sources


def _backend(name: str, d: torch.Tensor, epilogue: object | None) -> str:
    """``"sm90"``, ``"reference"`` or ``"upstream"`` (an installed ``deep_gemm``)."""
    if epilogue is not None:
        return "upstream"
    chosen = get_backend()
    if chosen == "reference" or (chosen == "auto" and d.device.type == "cpu"):
        return "reference"
    if d.device.type == "cuda":
        capability = _device_facts(d.get_device())[0]
        if capability == _SM90:
            return "sm90"
        where = f"{d.device} is SM{capability[0]}{capability[1]}"
    else:
        where = f"d is on {d.device}"
    if chosen == "auto" and d.device.type == "cuda":
        try:
            upstream_attribute(name)
        except ImportError as error:
            raise RuntimeError(
                f"{name} has a kernel here for SM90 only and {where}; {error}; or "
                'set_backend("reference") runs plain torch on any device'
            ) from error
        return "upstream"
    raise RuntimeError(f'{name}: backend "{chosen}" needs an SM90 GPU and {where}')


def _even_sms(num_sms: int) -> int:
    """Clusters of two need an even grid."""
    return num_sms - num_sms % CLUSTER if num_sms >= CLUSTER else num_sms


def _usable_sms(device: int) -> int:
    limit = sm_limit()
    present = _device_facts(device)[1]
    return _even_sms(present if limit is None else min(limit, present))


@functools.cache
def _device_facts(device: int) -> tuple[tuple[int, int], int]:
    """Compute capability and number of SMs of a CUDA device."""
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), properties.multi_processor_count
