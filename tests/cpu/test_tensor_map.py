"""Tensor maps: validation, and the exact arguments the driver's encoder is called with."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from prime_kernels.jit import driver, tensormap
from prime_kernels.jit.tensormap import TensorMapSpec, contiguous_strides, tensor_map


class EncoderSpy:
    """Stands in for ``cuTensorMapEncodeTiled``: records its arguments as numbers and writes a pattern."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.result = 0

    def __call__(self, target: int, *arguments: Any) -> int:
        assert target % 64 == 0
        ctypes.memset(target, len(self.calls) + 1, 128)
        self.calls.append(tuple(list(a) if isinstance(a, ctypes.Array) else a for a in arguments))
        return self.result


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch) -> Iterator[EncoderSpy]:
    spy = EncoderSpy()
    monkeypatch.setattr(tensormap, "_encode_function", lambda: spy)
    tensormap._cached_map.cache_clear()
    yield spy
    tensormap._cached_map.cache_clear()


def spec(**changes: Any) -> TensorMapSpec:
    values: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "shape": (512, 256),
        "strides": (256, 1),
        "box": (128, 64),
        "element_strides": (1, 1),
        "swizzle": 128,
    }
    return TensorMapSpec(**{**values, **changes})


def test_the_driver_gets_the_contiguous_dimension_first(encoder: EncoderSpy) -> None:
    api = driver.bindings()
    made = tensor_map(
        0x10000,
        (4, 32, 64),
        shape=(7, 300, 512),
        strides=(300 * 640, 640, 1),
        dtype=torch.bfloat16,
        element_strides=(1, 2, 1),
        swizzle=128,
        l2_promotion=128,
    )
    assert encoder.calls == [
        (
            int(api.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16),
            3,
            0x10000,
            [512, 300, 7],
            [640 * 2, 300 * 640 * 2],
            [64, 32, 4],
            [1, 2, 1],
            int(api.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
            int(api.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B),
            int(api.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B),
            int(api.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        )
    ]
    assert bytes(made) == b"\x01" * 128


@pytest.mark.parametrize(
    ("dtype", "name", "inner"),
    [
        (torch.float8_e4m3fn, "UINT8", 16),
        (torch.uint8, "UINT8", 16),
        (torch.float16, "FLOAT16", 8),
        (torch.int32, "INT32", 4),
        (torch.float32, "FLOAT32", 4),
        (torch.int64, "INT64", 2),
        (torch.float64, "FLOAT64", 2),
    ],
)
def test_types_and_strides_in_bytes(encoder: EncoderSpy, dtype: torch.dtype, name: str, inner: int) -> None:
    api = driver.bindings()
    tensor_map(0x100, (8, inner), shape=(64, 32), dtype=dtype)
    call = encoder.calls[0]
    assert call[0] == int(getattr(api.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{name}"))
    assert call[4] == [32 * dtype.itemsize]


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_every_rank_is_encoded(encoder: EncoderSpy, rank: int) -> None:
    shape = tuple(range(16, 16 + 8 * rank, 8))
    tensor_map(0x100, (8,) * rank, shape=shape, dtype=torch.bfloat16)
    call = encoder.calls[0]
    assert call[1] == rank
    assert call[3] == list(reversed(shape))
    assert len(call[5]) == len(call[6]) == rank


def test_nan_fill_and_no_swizzle(encoder: EncoderSpy) -> None:
    api = driver.bindings()
    tensor_map(0x100, (8, 256), shape=(64, 512), dtype=torch.float32, oob_fill="nan", l2_promotion=0)
    assert encoder.calls[0][-3:] == (
        int(api.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE),
        int(api.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE),
        int(api.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA),
    )


def test_equal_maps_come_from_the_cache_and_other_addresses_do_not(encoder: EncoderSpy) -> None:
    first = tensor_map(0x100, (8, 64), shape=(64, 64), dtype=torch.bfloat16, swizzle=128)
    assert tensor_map(0x100, (8, 64), shape=(64, 64), dtype=torch.bfloat16, swizzle=128) is first
    other = tensor_map(0x200, (8, 64), shape=(64, 64), dtype=torch.bfloat16, swizzle=128)
    assert other is not first
    assert (bytes(first), bytes(other)) == (b"\x01" * 128, b"\x02" * 128)
    assert other.data_ptr == 0x200


def test_a_refused_map_is_an_error_and_is_not_cached(encoder: EncoderSpy) -> None:
    encoder.result = 1
    for _ in range(2):
        with pytest.raises(driver.CudaError, match=r"cuTensorMapEncodeTiled.*CUDA_ERROR_INVALID_VALUE"):
            tensor_map(0x100, (8, 64), shape=(64, 64), dtype=torch.bfloat16)
    assert len(encoder.calls) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.bool}, "dtype torch.bool has no TMA type"),
        ({"shape": (), "strides": (), "box": (), "element_strides": ()}, "rank 0"),
        ({"shape": (2,) * 6}, "rank 6"),
        ({"box": (128,)}, r"box \(128,\) has 1 entries for rank 2"),
        ({"shape": (0, 256)}, r"shape\[0\] = 0 must be 1 to 2\^32"),
        ({"shape": (2**32 + 1, 256)}, r"shape\[0\] = 4294967297"),
        ({"box": (257, 64)}, r"box\[0\] = 257 must be 1 to 256"),
        ({"box": (0, 64)}, r"box\[0\] = 0"),
        ({"element_strides": (9, 1)}, r"element_strides\[0\] = 9 must be 1 to 8"),
        ({"strides": (257, 1)}, r"strides\[0\] = 257 elements = 514 bytes must be a positive multiple of 16"),
        ({"strides": (0, 1)}, r"strides\[0\] = 0 elements"),
        ({"strides": (2**39, 1)}, r"strides\[0\] = 1099511627776 bytes must be below 2\^40"),
        ({"strides": (256, 2)}, r"strides\[1\] = 2, the last dimension must be contiguous"),
        ({"box": (128, 12), "swizzle": 0}, r"box\[-1\] = 12 elements = 24 bytes must be a multiple of 16"),
        ({"swizzle": 64}, r"box\[-1\] = 64 elements = 128 bytes must fit into the swizzle of 64"),
        ({"swizzle": 96}, r"swizzle 96 must be one of 0, 32, 64, 128"),
        ({"l2_promotion": 32}, r"l2_promotion 32 must be one of"),
        ({"oob_fill": "one"}, r"oob_fill 'one' must be one of 'zero', 'nan'"),
        ({"dtype": torch.int16, "oob_fill": "nan"}, "oob_fill 'nan' needs"),
    ],
)
def test_what_the_hardware_cannot_do_is_named(changes: dict[str, Any], message: str) -> None:
    spec()
    with pytest.raises(ValueError, match=message):
        spec(**changes)


def test_the_largest_legal_values_pass() -> None:
    assert spec(shape=(2**32, 256), box=(256, 64), element_strides=(8, 1), strides=(2**39 - 8, 1))
    assert spec(box=(8, 256), swizzle=0, dtype=torch.float32)


@pytest.mark.parametrize("address", [0, 8, 0x1008])
def test_addresses_are_16_byte_aligned(encoder: EncoderSpy, address: int) -> None:
    with pytest.raises(ValueError, match="must be a positive multiple of 16"):
        tensor_map(address, (8, 64), shape=(64, 64), dtype=torch.bfloat16)
    assert encoder.calls == []


def test_sources_that_say_too_little_or_lie_on_the_cpu() -> None:
    with pytest.raises(ValueError, match="needs shape= and dtype="):
        tensor_map(0x100, (8, 64))
    with pytest.raises(ValueError, match="the tensor is on cpu"):
        tensor_map(torch.zeros(64, 64), (8, 64))


def test_row_major_strides() -> None:
    assert contiguous_strides((2, 3, 4)) == (12, 4, 1)
    assert contiguous_strides((7,)) == (1,)
