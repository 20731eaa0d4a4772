"""Kernel arguments in the form the driver takes them: an array of pointers, one to each value."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from .tensormap import TENSOR_MAP_BYTES, TensorMap

POINTER_BYTES = ctypes.sizeof(ctypes.c_void_p)

_CTYPES = (ctypes._SimpleCData, ctypes.Structure, ctypes.Union, ctypes.Array)
# A torch.Tensor, a TensorMap, a ctypes value or None; ctypes has no common public base class to name.
Argument: TypeAlias = Any

_TENSOR, _MAP, _NULL, _VALUE = range(4)


class ArgumentPacker:
    """Packs the arguments of one kernel; its memory is reused from launch to launch.

    The driver copies the values during the launch call, so they need not outlive it.

    Args:
        name: the kernel, for messages.
        sizes: size in bytes of each kernel parameter, None where unknown (then sizes aren't checked).
        device: number of the device that tensors must be on; None for no check.
    """

    def __init__(self, name: str, sizes: Sequence[int] | None, device: int | None) -> None:
        self._name = name
        self._device = device
        self._sizes = None if sizes is None else tuple(sizes)
        self._kinds: dict[type, int] = {}
        self._grow(0 if sizes is None else len(sizes))

    def _grow(self, count: int) -> None:
        self._count = count
        self._slots = (ctypes.c_uint64 * max(count, 1))()
        self._pointers = (ctypes.c_void_p * max(count, 1))()
        start = ctypes.addressof(self._slots)
        self._slot_addresses = [start + index * POINTER_BYTES for index in range(count)]
        self._address = ctypes.addressof(self._pointers)

    def pack(self, args: Sequence[Argument]) -> int:
        """The address of the array of pointers to ``args``, valid until the next call.

        Raises:
            ValueError: for a wrong count, size or device.
            TypeError: for a type that has no defined size.
        """
        if len(args) != self._count:
            if self._sizes is not None:
                raise ValueError(
                    f"kernel {self._name} has {self._count} parameters, got {len(args)} arguments"
                )
            self._grow(len(args))
        sizes, pointers, slots, kinds = self._sizes, self._pointers, self._slots, self._kinds
        for index, arg in enumerate(args):
            kind = kinds.get(type(arg))
            if kind is None:
                kind = kinds[type(arg)] = self._kind(arg, index)
            if kind == _TENSOR:
                if self._device is not None and arg.get_device() != self._device:
                    raise ValueError(
                        f"kernel {self._name}, argument {index}: tensor on {arg.device}, the kernel runs on "
                        f"cuda:{self._device}"
                    )
                slots[index] = arg.data_ptr()
                pointers[index], size = self._slot_addresses[index], POINTER_BYTES
            elif kind == _MAP:
                pointers[index], size = arg.address, TENSOR_MAP_BYTES
            elif kind == _VALUE:
                pointers[index], size = ctypes.addressof(arg), ctypes.sizeof(arg)
            else:
                slots[index] = 0
                pointers[index], size = self._slot_addresses[index], POINTER_BYTES
            if sizes is not None and size != sizes[index]:
                raise ValueError(
                    f"kernel {self._name}, argument {index}: {type(arg).__name__} is {size} bytes, the "
                    f"kernel's parameter is {sizes[index]}"
                )
        return self._address

    def _kind(self, arg: Any, index: int) -> int:
        if isinstance(arg, torch.Tensor):
            return _TENSOR
        if isinstance(arg, TensorMap):
            return _MAP
        if arg is None:
            return _NULL
        if isinstance(arg, _CTYPES):
            return _VALUE
        raise TypeError(
            f"kernel {self._name}, argument {index}: {type(arg).__name__} has no defined size; pass a "
            "tensor, a TensorMap, a ctypes value (for example ctypes.c_uint32(n)) or None"
        )
