"""Staging buffers that layers of one shape share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import runtime
from .symm import SymmBuffer, get_symm_buffer_for_mega_moe
from .validation import DATA_DTYPES

_MMA_TYPE_OF_DTYPE = {dtype: mma_type for mma_type, dtype in DATA_DTYPES.items()}

# Buffers that modules built, by everything they depend on. Kept until release_buffers(): construction is
# collective, so whether one is found here must not depend on when a rank's garbage collector runs.
_shared_buffers: dict[tuple[Any, ...], SymmBuffer] = {}


def release_buffers() -> None:
    """Forget the buffers that :class:`MegaMoE` layers share; each is freed with the last layer that uses it.

    Call it on all ranks of a group, at the same place in the program.
    """
    _shared_buffers.clear()


def shared_buffer(
    group: dist.ProcessGroup | None,
    shape: tuple[int, int, int, int, int, int],
    mma_type: str,
    device: torch.device,
) -> SymmBuffer:
    """The live buffer that layers of one shape share, built at the first request. Collective over ``group``.

    It is allocated on the device of :func:`~.runtime.set_device`, else on ``device``.

    Args:
        group: as :func:`~.ep.resolve_group` returns it.
        shape: E, T, K, H, I and the number of shared experts.

    Raises:
        ValueError, RuntimeError: see :class:`~.symm.SymmBuffer`.
    """
    chosen_device = runtime.get_device()
    device = chosen_device or device
    key = (group, shape, mma_type, device, runtime.get_backend(), runtime.get_pool_capacity_factor())
    buffer = _shared_buffers.get(key)
    if buffer is None or buffer.destroyed:
        runtime.set_device(device)
        try:
            # Memory made in inference mode could not be staged into outside of it.
            with torch.inference_mode(False):
                buffer = get_symm_buffer_for_mega_moe(group, *shape, mma_type=mma_type)
        finally:
            runtime.set_device(chosen_device)
        _shared_buffers[key] = buffer
    return buffer


def mma_type_of(weight: Tensor, what: str) -> str:
    """The type of buffer for what a forward computes in: the dtype of ``weight``, or autocast's.

    Raises:
        ValueError: no buffer computes in that dtype; ``what`` names who asked.
    """
    dtype, device_type = weight.dtype, weight.device.type
    if torch.is_autocast_enabled(device_type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device_type)
    return mma_type_of_dtype(dtype, what)


def mma_type_of_dtype(dtype: torch.dtype, what: str) -> str:
    """The type of buffer for what computes in ``dtype``; ValueError, naming ``what``, if there is none."""
    if dtype not in _MMA_TYPE_OF_DTYPE:
        known = ", ".join(str(known) for known in _MMA_TYPE_OF_DTYPE)
        raise ValueError(f"{what} computes in {dtype} here and has no buffer for it; use {known}")
    return _MMA_TYPE_OF_DTYPE[dtype]
