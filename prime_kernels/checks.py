"""Checks that need no buffer: numbers, groups, and memory that outputs may go to.

As in `validation`, each message names the value, the limit and what to do about it.
"""

from __future__ import annotations

import numbers
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Sizes are 32-bit integers in the kernels' tables.
MAX_SIZE = 2**31 - 1
# Bytes torch can count.
MAX_BYTES = 2**63 - 1


def check_int(name: str, value: Any, least: int) -> None:
    """ValueError unless ``value`` is an integer from ``least`` to what 32 bits hold."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_SIZE:
        raise ValueError(f"{name} is {value!r}, needs an integer of at least {least} and at most {MAX_SIZE}")


def check_clamp(clamp: Any) -> None:
    """ValueError for a clamp that is not a number above 0."""
    if clamp is None:
        return
    if isinstance(clamp, bool) or not isinstance(clamp, numbers.Real) or not float(clamp) > 0:
        raise ValueError(f"activation_clamp is {clamp!r}, needs a value above 0, or None for no clamp")


def check_group(group: Any) -> None:
    """ValueError for what is no process group, and for a group this process is not a member of."""
    if group is None or isinstance(group, dist.ProcessGroup):
        return
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "group is one this process is not a member of; build buffers and layers on its members only"
        )
    raise ValueError(
        f"group is {group!r}, needs a torch.distributed process group, or None for the default group"
    )


def check_no_overlap(name: str, output: Tensor) -> None:
    """ValueError for an output two of whose elements share memory, as those of ``expand`` do.

    Strides sorted by size have to step over all that the smaller ones reach. That refuses a few odd layouts
    without overlap, too.
    """
    if output.is_contiguous() or output.numel() == 0:
        return
    reach = 1
    for stride, extent in sorted(zip(output.stride(), output.shape, strict=True)):
        if extent == 1:
            continue
        if stride < reach:
            raise ValueError(
                f"{name} has strides {list(output.stride())} for shape {list(output.shape)}: elements share "
                "memory and would overwrite each other; pass memory of its own for each, not a view by expand"
            )
        reach += (extent - 1) * stride


def check_tensors(device: torch.device | None, /, **tensors: Any) -> None:
    """ValueError for what is no tensor, or on another device than ``device`` (None: that of the first)."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}, needs a tensor")
        if device is None:
            device = tensor.device
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, the other tensors on {device}; move it there")


def zeroed_bytes(num_bytes: int, device: torch.device) -> Tensor:
    """uint8 memory; RuntimeError, which names the bytes, when the device does not have them."""
    problem = f"a buffer of this shape takes {num_bytes} bytes on {device}"
    fix = "lower num_max_tokens_per_rank, or view one buffer for several shapes with base="
    if num_bytes > MAX_BYTES:
        raise RuntimeError(f"{problem}, more than can be addressed; {fix}")
    try:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise RuntimeError(f"{problem}, which it has not free: {error}; {fix}") from error
