"""Tensor maps: the descriptors of the Hopper bulk tensor copy engine (TMA), tiled mode.

A map describes a tensor of rank 1 to 5 in global memory and the box of it that one copy moves. Shapes,
strides and boxes are given the way torch orders them, the contiguous dimension last.
The element a copy starts at must lie a multiple of 16 bytes into its row: on the H200 any other start in the
contiguous dimension faults (as an illegal instruction), also where it is in bounds. Starts in the other
dimensions, and starts outside the tensor, are free.
The rules checked here are those of ``cuTensorMapEncodeTiled`` in the CUDA driver API reference: the driver
reports every breach as the same ``CUDA_ERROR_INVALID_VALUE``, so they are named before it is called.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import driver

TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGNMENT = 64
MAX_RANK = 5
MAX_BOX = 256
MAX_ELEMENT_STRIDE = 8
MAX_DIMENSION = 1 << 32
MAX_STRIDE_BYTES = 1 << 40
ADDRESS_ALIGNMENT = 16
STRIDE_ALIGNMENT = 16
_CACHED_MAPS = 4096

# CUtensorMapDataType: the name after CU_TENSOR_MAP_DATA_TYPE_. One-byte floats travel as plain bytes.
_DATA_TYPES: dict[torch.dtype, str] = {
    torch.uint8: "UINT8",
    torch.int8: "UINT8",
    torch.float8_e4m3fn: "UINT8",
    torch.float8_e5m2: "UINT8",
    torch.float8_e8m0fnu: "UINT8",
    torch.uint16: "UINT16",
    torch.int16: "UINT16",
    torch.uint32: "UINT32",
    torch.int32: "INT32",
    torch.uint64: "UINT64",
    torch.int64: "INT64",
    torch.float16: "FLOAT16",
    torch.bfloat16: "BFLOAT16",
    torch.float32: "FLOAT32",
    torch.float64: "FLOAT64",
}
_NAN_FILL_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SWIZZLES = {
    0: "CU_TENSOR_MAP_SWIZZLE_NONE",
    32: "CU_TENSOR_MAP_SWIZZLE_32B",
    64: "CU_TENSOR_MAP_SWIZZLE_64B",
    128: "CU_TENSOR_MAP_SWIZZLE_128B",
}
_L2_PROMOTIONS = {
    0: "CU_TENSOR_MAP_L2_PROMOTION_NONE",
    64: "CU_TENSOR_MAP_L2_PROMOTION_L2_64B",
    128: "CU_TENSOR_MAP_L2_PROMOTION_L2_128B",
    256: "CU_TENSOR_MAP_L2_PROMOTION_L2_256B",
}
_OOB_FILLS = {
    "zero": "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE",
    "nan": "CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA",
}


@dataclass(frozen=True)
class TensorMapSpec:
    """Everything of a tensor map but the address; checked when it is built.

    Attributes:
        dtype: element type; one-byte floats are moved as bytes.
        shape: elements per dimension, contiguous dimension last, rank 1 to 5.
        strides: elements from one index to the next per dimension; the last is 1.
        box: elements per dimension that one copy moves, at most 256 each.
        element_strides: every how many elements one is taken, 1 to 8 per dimension.
        swizzle: 0, 32, 64 or 128 bytes; the box's last dimension must fit into it.
        l2_promotion: bytes an L2 miss fetches at least: 0, 64, 128 or 256.
        oob_fill: what elements outside the tensor read as, ``"zero"`` or ``"nan"``.

    Raises:
        ValueError: for a value the hardware can't do; names it, the limit and the dimension.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: int = 0
    l2_promotion: int = 256
    oob_fill: str = "zero"

    def __post_init__(self) -> None:
        if self.dtype not in _DATA_TYPES:
            known = ", ".join(sorted(str(dtype) for dtype in _DATA_TYPES))
            raise ValueError(f"tensor map: dtype {self.dtype} has no TMA type; use one of {known}")
        rank = len(self.shape)
        if not 1 <= rank <= MAX_RANK:
            raise ValueError(f"tensor map: rank {rank} (shape {self.shape}) must be 1 to {MAX_RANK}")
        for name in ("strides", "box", "element_strides"):
            values = getattr(self, name)
            if len(values) != rank:
                raise ValueError(f"tensor map: {name} {values} has {len(values)} entries for rank {rank}")
        _check_option("swizzle", self.swizzle, _SWIZZLES)
        _check_option("l2_promotion", self.l2_promotion, _L2_PROMOTIONS)
        _check_option("oob_fill", self.oob_fill, _OOB_FILLS)
        if self.oob_fill == "nan" and self.dtype not in _NAN_FILL_DTYPES:
            raise ValueError(
                f"tensor map: oob_fill 'nan' needs a 16-bit or wider float dtype, got {self.dtype}"
            )
        for dim in range(rank):
            self._check_dimension(dim)
        self._check_inner_box()

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    def _check_dimension(self, dim: int) -> None:
        extent, stride = self.shape[dim], self.strides[dim]
        box, step = self.box[dim], self.element_strides[dim]
        if not 1 <= extent <= MAX_DIMENSION:
            raise ValueError(f"tensor map: shape[{dim}] = {extent} must be 1 to 2^32")
        if not 1 <= box <= MAX_BOX:
            raise ValueError(f"tensor map: box[{dim}] = {box} must be 1 to {MAX_BOX} elements")
        if not 1 <= step <= MAX_ELEMENT_STRIDE:
            raise ValueError(f"tensor map: element_strides[{dim}] = {step} must be 1 to {MAX_ELEMENT_STRIDE}")
        if dim == len(self.shape) - 1:
            if stride != 1:
                raise ValueError(
                    f"tensor map: strides[{dim}] = {stride}, the last dimension must be contiguous"
                )
            return
        stride_bytes = stride * self.element_bytes
        if stride_bytes <= 0 or stride_bytes % STRIDE_ALIGNMENT != 0:
            raise ValueError(
                f"tensor map: strides[{dim}] = {stride} elements = {stride_bytes} bytes must be a positive "
                f"multiple of {STRIDE_ALIGNMENT} bytes"
            )
        if stride_bytes >= MAX_STRIDE_BYTES:
            raise ValueError(f"tensor map: strides[{dim}] = {stride_bytes} bytes must be below 2^40")

    def _check_inner_box(self) -> None:
        inner_bytes = self.box[-1] * self.element_bytes
        if inner_bytes % ADDRESS_ALIGNMENT != 0:
            raise ValueError(
                f"tensor map: box[-1] = {self.box[-1]} elements = {inner_bytes} bytes must be a multiple "
                f"of {ADDRESS_ALIGNMENT} bytes"
            )
        if self.swizzle and inner_bytes > self.swizzle:
            raise ValueError(
                f"tensor map: box[-1] = {self.box[-1]} elements = {inner_bytes} bytes must fit into the "
                f"swizzle of {self.swizzle} bytes"
            )


def _check_option(name: str, value: object, known: Mapping[Any, str]) -> None:
    if value not in known:
        raise ValueError(f"tensor map: {name} {value!r} must be one of {', '.join(map(repr, known))}")


class TensorMap:
    """An encoded tensor map: 128 bytes on a 64-byte boundary, passed to kernels by value.

    It holds the tensor's address and keeps nothing alive: the tensor must outlive the kernels that use it.

    Attributes:
        spec: what it was made from.
        data_ptr: the address of the tensor it describes.
        address: where the 128 bytes lie in host memory.
    """

    __slots__ = ("_storage", "address", "data_ptr", "spec")

    def __init__(self, spec: TensorMapSpec | None, data_ptr: int) -> None:
        self.spec = spec
        self.data_ptr = data_ptr
        # ctypes aligns to 8 bytes only, so the aligned part is cut out of a larger buffer.
        self._storage = (ctypes.c_uint8 * (TENSOR_MAP_BYTES + TENSOR_MAP_ALIGNMENT))()
        self.address = -(-ctypes.addressof(self._storage) // TENSOR_MAP_ALIGNMENT) * TENSOR_MAP_ALIGNMENT

    def __bytes__(self) -> bytes:
        return ctypes.string_at(self.address, TENSOR_MAP_BYTES)


def tensor_map(
    source: torch.Tensor | int,
    box: Sequence[int],
    *,
    shape: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    element_strides: Sequence[int] | None = None,
    swizzle: int = 0,
    l2_promotion: int = 256,
    oob_fill: str = "zero",
) -> TensorMap:
    """Encode a tiled tensor map (see :class:`TensorMapSpec` for the limits).

    Args:
        source: a CUDA tensor, or a device address (then ``shape`` and ``dtype`` are needed).
        box: elements per dimension one copy moves, contiguous dimension last.
        shape: overrides the tensor's shape, for a view of other rank over the same memory.
        strides: in elements; default the tensor's, or contiguous when ``shape`` is given.
        dtype: overrides the tensor's dtype.
        element_strides: default 1 in every dimension.
        swizzle: 0, 32, 64 or 128 bytes.
        l2_promotion: 0, 64, 128 or 256 bytes.
        oob_fill: ``"zero"`` or ``"nan"``.

    Returns:
        The map. Equal arguments give the same object from a cache, so the call is cheap when repeated.

    Raises:
        ValueError: for anything the hardware can't do, before the driver is called.
    """
    if isinstance(source, torch.Tensor):
        if not source.is_cuda:
            raise ValueError(
                f"tensor map: the tensor is on {source.device}, TMA reads device memory; pass a CUDA tensor"
            )
        address, dtype = source.data_ptr(), dtype or source.dtype
        if shape is None:
            shape, strides = source.shape, source.stride() if strides is None else strides
    else:
        address = int(source)
        if shape is None or dtype is None:
            raise ValueError("tensor map: a plain address needs shape= and dtype= as well")
    if strides is None:
        strides = contiguous_strides(shape)
    return _cached_map(
        address,
        dtype,
        tuple(shape),
        tuple(strides),
        tuple(box),
        tuple(element_strides) if element_strides is not None else (1,) * len(shape),
        swizzle,
        l2_promotion,
        oob_fill,
    )


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


@functools.lru_cache(maxsize=_CACHED_MAPS)
def _cached_map(
    address: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    element_strides: tuple[int, ...],
    swizzle: int,
    l2_promotion: int,
    oob_fill: str,
) -> TensorMap:
    spec = TensorMapSpec(dtype, shape, strides, box, element_strides, swizzle, l2_promotion, oob_fill)
    return encode(spec, address)


def encode(spec: TensorMapSpec, address: int) -> TensorMap:
    """Encode ``spec`` for a tensor at device address ``address`` with the driver.

    Raises:
        ValueError: when the address is not on a 16-byte boundary.
        CudaError: when the driver refuses the map.
    """
    if address <= 0 or address % ADDRESS_ALIGNMENT != 0:
        raise ValueError(
            f"tensor map: address {address:#x} must be a positive multiple of {ADDRESS_ALIGNMENT}"
        )
    api = driver.bindings()
    result = TensorMap(spec, address)
    code = _encode_function()(result.address, *_encode_arguments(spec, address, api))
    driver.check((api.CUresult(code),), f"cuTensorMapEncodeTiled({spec}, address {address:#x})")
    return result


def _encode_arguments(spec: TensorMapSpec, address: int, api: Any) -> tuple[Any, ...]:
    """The arguments of ``cuTensorMapEncodeTiled`` after the map itself, the contiguous dimension first."""
    rank = len(spec.shape)
    stride_bytes = [stride * spec.element_bytes for stride in reversed(spec.strides[:-1])]
    return (
        int(getattr(api.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_DATA_TYPES[spec.dtype]}")),
        rank,
        address,
        (ctypes.c_uint64 * rank)(*reversed(spec.shape)),
        # A rank of 1 has no strides; the driver still wants a valid pointer.
        (ctypes.c_uint64 * max(rank - 1, 1))(*stride_bytes),
        (ctypes.c_uint32 * rank)(*reversed(spec.box)),
        (ctypes.c_uint32 * rank)(*reversed(spec.element_strides)),
        int(api.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
        int(getattr(api.CUtensorMapSwizzle, _SWIZZLES[spec.swizzle])),
        int(getattr(api.CUtensorMapL2promotion, _L2_PROMOTIONS[spec.l2_promotion])),
        int(getattr(api.CUtensorMapFloatOOBfill, _OOB_FILLS[spec.oob_fill])),
    )


@functools.cache
def _encode_function() -> Any:
    # cuda-python's own wrapper writes into an object it allocates without the 64-byte alignment the
    # driver asks for, so the function is called at its address.
    prototype = ctypes.CFUNCTYPE(
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_uint64),
        ctypes.POINTER(ctypes.c_uint64),
        ctypes.POINTER(ctypes.c_uint32),
        ctypes.POINTER(ctypes.c_uint32),
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
    )
    return prototype(driver.entry_address("cuTensorMapEncodeTiled"))
