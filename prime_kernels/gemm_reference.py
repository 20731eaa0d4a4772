"""The grouped GEMMs in plain torch: what the kernels compute, and the backend for CPU tensors.

Products accumulate in float32 (float64 inputs in float64) and are rounded once, to the output's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .gemm_heuristics import GROUP_ALIGNMENT


def align_up(value: int, alignment: int) -> int:
    """The least multiple of ``alignment`` that is at least ``value``."""
    return -(-value // alignment) * alignment


def psum_ranges(ends: list[int], alignment: int = GROUP_ALIGNMENT) -> Iterator[tuple[int, int]]:
    """(start, end) of each group from the groups' ends: a group starts at the aligned end of the one before.

    Raises:
        ValueError: when a group ends before it starts; an empty group's end is its (aligned) start.
    """
    end = 0
    for group, next_end in enumerate(ends):
        start = align_up(end, alignment)
        if next_end < start:
            raise ValueError(f"group {group} ends at {next_end}, before its start {start}")
        yield start, next_end
        end = next_end


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    return a.to(wide) @ b.to(wide)


def m_grouped(
    a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, grouped_layout: torch.Tensor, use_psum_layout: bool
) -> None:
    """``d[r] = a[r] @ b[g(r)]`` with b [G, K, N]; rows of no group become 0.

    Args:
        a: [M, K]. b: [G, K, N]. d: [M, N], overwritten.
        grouped_layout: the group of each row ([M], negative for none), or the groups' ends ([G]).
    """
    d.zero_()
    if use_psum_layout:
        for group, (start, end) in enumerate(psum_ranges(grouped_layout.tolist())):
            d[start:end] = _product(a[start:end], b[group]).to(d.dtype)
        return
    for group in range(b.shape[0]):
        rows = (grouped_layout == group).nonzero().squeeze(1)
        d[rows] = _product(a[rows], b[group]).to(d.dtype)


def k_grouped_tn(
    a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, grouped_layout: torch.Tensor, use_psum_layout: bool
) -> None:
    """``d[g] += a[rows of g].T @ b[rows of g]``.

    Args:
        a: [sum K, M]. b: [sum K, N]. d: [G, M, N], added into.
        grouped_layout: rows of each group ([G]), or the groups' ends.
    """
    values = grouped_layout.tolist()
    if use_psum_layout:
        ranges = list(psum_ranges(values))
    else:
        ends = torch.tensor(values).cumsum(0).tolist()
        ranges = list(zip([0, *ends[:-1]], ends, strict=True))
    for group, (start, end) in enumerate(ranges):
        d[group] += _product(a[start:end].T, b[start:end]).to(d.dtype)
