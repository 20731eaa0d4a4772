"""Argument checks of the grouped GEMMs; every message names the value, the limit and what is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .gemm_heuristics import BLOCK_K

# TMA reads and writes rows that start on 16-byte boundaries.
TMA_ALIGNMENT = 16
# TMA coordinates are signed 32-bit; byte offsets are 64-bit and have no limit here.
MAX_ROWS = 2**31


def check_tensors(
    name: str,
    ranks: Mapping[str, tuple[torch.Tensor, int]],
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
) -> None:
    """Ranks, one device for all, and an int32 contiguous layout."""
    for label, (tensor, rank) in ranks.items():
        if tensor.dim() != rank:
            raise ValueError(f"{name}: {label} has shape {tuple(tensor.shape)}, needs {rank} dimensions")
        if tensor.device != d.device:
            raise ValueError(f"{name}: {label} is on {tensor.device}, d on {d.device}; they must agree")
    if grouped_layout.device != d.device or grouped_layout.dtype != torch.int32:
        raise ValueError(
            f"{name}: grouped_layout is {grouped_layout.dtype} on {grouped_layout.device}, needs "
            f"torch.int32 on {d.device}"
        )
    if not grouped_layout.is_contiguous():
        raise ValueError(
            f"{name}: grouped_layout has strides {grouped_layout.stride()}, needs a contiguous one"
        )


def check_dtypes(name: str, tensors: Mapping[str, tuple[torch.Tensor, torch.dtype]]) -> None:
    """Each tensor has the dtype named beside it."""
    for label, (tensor, dtype) in tensors.items():
        if tensor.dtype != dtype:
            raise ValueError(f"{name}: {label} is {tensor.dtype}, needs {dtype}")


def check_shape(name: str, label: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """ValueError unless ``tensor`` has this shape. ``name`` is the function, ``label`` the argument."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: {label} has shape {tuple(tensor.shape)}, needs {shape}")


def check_rows(name: str, matrices: Mapping[str, torch.Tensor]) -> None:
    """What TMA needs of a matrix or a stack of them: contiguous rows that start on 16-byte boundaries."""
    for label, matrix in matrices.items():
        *_, row, column = matrix.stride()
        misaligned = (row * matrix.element_size()) % TMA_ALIGNMENT or matrix.data_ptr() % TMA_ALIGNMENT
        if column != 1 or misaligned:
            raise ValueError(
                f"{name}: {label} has shape {tuple(matrix.shape)}, strides {matrix.stride()} and address "
                f"{matrix.data_ptr():#x}; its last dimension must be contiguous, its rows and its address a "
                f"multiple of {TMA_ALIGNMENT} bytes"
            )


def check_row_count(name: str, matrices: Mapping[str, torch.Tensor]) -> None:
    """Row numbers, over all groups of a stack, are 32-bit in the kernel."""
    for label, matrix in matrices.items():
        rows = matrix.shape[:-1].numel()
        if rows >= MAX_ROWS:
            raise ValueError(f"{name}: {label} has {rows} rows in all, needs fewer than 2^31")


def check_stacked(name: str, label: str, stack: torch.Tensor) -> None:
    """The matrices of a 3-D stack follow each other, so that all rows are evenly spaced."""
    if stack.shape[0] > 1 and stack.stride(0) != stack.shape[1] * stack.stride(1):
        raise ValueError(
            f"{name}: {label} has strides {stack.stride()}; its groups must follow each other, "
            f"stride(0) = {stack.shape[1]} * stride(1)"
        )


def check_compiled_dims(name: str, compiled_dims: str, allowed: str) -> None:
    """ValueError unless ``compiled_dims`` names only dimensions that may be compiled in."""
    if not set(compiled_dims) <= set(allowed):
        raise ValueError(
            f"{name}: compiled_dims {compiled_dims!r} may hold only letters of {allowed!r}; the "
            "number of rows is never compiled in"
        )


def check_group_sizes(
    name: str, ks: Sequence[int] | None, num_groups: int, sum_k: int, use_psum_layout: bool
) -> None:
    """The K of every group; with the psum layout they are a hint about empty groups only."""
    if ks is None:
        if not use_psum_layout:
            raise ValueError(f"{name}: ks may be None only with use_psum_layout=True")
        return
    if len(ks) != num_groups:
        raise ValueError(f"{name}: ks has {len(ks)} entries for {num_groups} groups")
    if use_psum_layout:
        return
    for group, k in enumerate(ks):
        if k < 0 or k % BLOCK_K:
            raise ValueError(f"{name}: ks[{group}] = {k} must be a multiple of {BLOCK_K}")
    if sum(ks) != sum_k:
        raise ValueError(f"{name}: ks add up to {sum(ks)}, a has {sum_k} rows")
