"""Kernel arguments, launch configurations and driver errors: what can be checked without a driver."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest
import torch

from prime_kernels.jit import driver
from prime_kernels.jit.arguments import ArgumentPacker
from prime_kernels.jit.launch import (
    KernelLimits,
    LaunchShape,
    check_launch,
    device_index,
    dim3,
    launch_config,
)
from prime_kernels.jit.tensormap import TENSOR_MAP_BYTES, TensorMap

LIMITS = KernelLimits(max_threads=384, static_smem=1024, max_smem=232448)


class Params(ctypes.Structure):
    _fields_ = (("rows", ctypes.c_uint32), ("scale", ctypes.c_float), ("base", ctypes.c_uint64))


def packed_values(packer: ArgumentPacker, args: tuple, sizes: list[int]) -> list[bytes]:
    """What the driver would copy: the bytes behind each pointer of the array that ``pack`` returns."""
    pointers = (ctypes.c_void_p * len(sizes)).from_address(packer.pack(args))
    return [ctypes.string_at(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)]


def test_each_argument_is_passed_by_value() -> None:
    tensor = torch.arange(8)
    params = Params(7, 0.5, 2**40)
    tensor_map = TensorMap(None, 0)
    ctypes.memset(tensor_map.address, 0xAB, TENSOR_MAP_BYTES)
    sizes = [8, 4, 16, 128, 8, 1, 8]
    args = (tensor, ctypes.c_uint32(3), params, tensor_map, None, ctypes.c_bool(True), ctypes.c_double(1.5))
    packed = packed_values(ArgumentPacker("k", sizes, None), args, sizes)
    assert packed == [
        tensor.data_ptr().to_bytes(8, "little"),
        (3).to_bytes(4, "little"),
        bytes(params),
        b"\xab" * TENSOR_MAP_BYTES,
        bytes(8),
        b"\x01",
        bytes(ctypes.c_double(1.5)),
    ]


def test_slots_are_rewritten_by_the_next_launch() -> None:
    packer = ArgumentPacker("k", [8, 8], None)
    first, second = torch.zeros(1), torch.zeros(1)
    packer.pack((first, second))
    packed = packed_values(packer, (second, None), [8, 8])
    assert packed == [second.data_ptr().to_bytes(8, "little"), bytes(8)]


def test_a_tensor_slice_passes_its_own_start() -> None:
    base = torch.zeros(16, dtype=torch.bfloat16)
    (packed,) = packed_values(ArgumentPacker("k", [8], None), (base[3:],), [8])
    assert int.from_bytes(packed, "little") == base.data_ptr() + 3 * 2


def test_parameters_and_subclasses_of_tensor_count_as_tensors() -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    (packed,) = packed_values(ArgumentPacker("k", [8], None), (weight,), [8])
    assert int.from_bytes(packed, "little") == weight.data_ptr()


def test_unknown_sizes_accept_any_number_of_arguments() -> None:
    packer = ArgumentPacker("k", None, None)
    assert packed_values(packer, (ctypes.c_int32(-2),), [4]) == [b"\xfe\xff\xff\xff"]
    assert len(packed_values(packer, (None, None, None), [8, 8, 8])) == 3


@pytest.mark.parametrize("number", [1, 1.0, True])
def test_plain_numbers_have_no_size(number: float) -> None:
    with pytest.raises(TypeError, match=r"kernel k, argument 0: .* has no defined size.*ctypes"):
        ArgumentPacker("k", [4], None).pack((number,))


def test_wrong_count_and_size_name_the_argument() -> None:
    packer = ArgumentPacker("k", [8, 4], None)
    with pytest.raises(ValueError, match="kernel k has 2 parameters, got 1"):
        packer.pack((None,))
    with pytest.raises(ValueError, match="argument 1: c_ulong is 8 bytes, the kernel's parameter is 4"):
        packer.pack((None, ctypes.c_uint64(1)))


def test_a_tensor_on_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match="argument 0: tensor on cpu, the kernel runs on cuda:1"):
        ArgumentPacker("k", [8], 1).pack((torch.zeros(1),))


def test_tensor_maps_lie_on_64_byte_boundaries() -> None:
    maps = [TensorMap(None, 0) for _ in range(50)]
    assert {tensor_map.address % 64 for tensor_map in maps} == {0}
    assert all(len(bytes(tensor_map)) == 128 for tensor_map in maps)


def test_dimensions_are_filled_up_with_ones() -> None:
    assert dim3(5, "grid") == (5, 1, 1)
    assert dim3((2, 3), "grid") == (2, 3, 1)
    for bad in (0, (1, 0), (1, 2, 3, 4), (), (1.5,)):
        with pytest.raises(ValueError, match=r"grid .* must be 1 to 3 integers"):
            dim3(bad, "grid")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": (1, 65536)}, r"grid.y = 65536 exceeds 65535"),
        ({"block": (1, 1, 65)}, r"block.z = 65 exceeds 64"),
        ({"block": 385}, r"385 threads.*at most 384"),
        ({"grid": 131, "cluster": 2}, r"grid \(131, 1, 1\) must be a multiple of the cluster \(2, 1, 1\)"),
        ({"grid": 64, "cluster": 32}, r"cluster \(32, 1, 1\) has 32 blocks, at most 16"),
        ({"smem": 231425}, r"231425 bytes of dynamic and 1024 of static.*within 232448"),
        ({"smem": -1}, r"-1 bytes"),
    ],
)
def test_a_launch_past_a_limit_names_value_and_limit(change: dict, message: str) -> None:
    good = {
        "grid": 132,
        "block": 384,
        "cluster": 2,
        "smem": 231424,
        "pdl": False,
        "cooperative": False,
    }
    check_launch("k", LIMITS, **good)
    with pytest.raises(ValueError, match=f"kernel k: .*{message}"):
        check_launch("k", LIMITS, **{**good, **change})


def test_launch_attributes_reach_the_driver_structure() -> None:
    ids = driver.bindings().CUlaunchAttributeID
    config = launch_config(LaunchShape((4, 2, 1), (128, 1, 1), (2, 1, 1), 4096, True, True))
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (4, 2, 1)
    assert (config.blockDimX, config.sharedMemBytes, config.numAttrs) == (128, 4096, 3)
    values = {attribute.id: attribute.value for attribute in config.attrs}
    cluster = values[ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION].clusterDim
    assert (cluster.x, cluster.y, cluster.z) == (2, 1, 1)
    assert values[
        ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    ].programmaticStreamSerializationAllowed
    assert values[ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE].cooperative
    plain = launch_config(LaunchShape((1, 1, 1), (32, 1, 1), None, 0, False, False))
    assert plain.numAttrs == 0


def test_driver_errors_carry_the_name_of_the_result() -> None:
    api = driver.bindings()
    assert driver.check((api.CUresult.CUDA_SUCCESS,), "call") is None
    assert driver.check((api.CUresult.CUDA_SUCCESS, 4), "call") == 4
    assert driver.check((api.CUresult.CUDA_SUCCESS, 4, 5), "call") == (4, 5)
    with pytest.raises(
        driver.CudaError, match=r"launch of k failed with CUDA_ERROR_INVALID_VALUE \(1\)"
    ) as info:
        driver.check((api.CUresult.CUDA_ERROR_INVALID_VALUE, None), "launch of k")
    assert (info.value.result, info.value.code) == ("CUDA_ERROR_INVALID_VALUE", 1)


def test_only_cuda_devices_run_kernels() -> None:
    assert device_index(3) == 3
    assert device_index("cuda:1") == 1
    assert device_index(torch.device("cuda", 2)) == 2
    with pytest.raises(ValueError, match="kernels run on CUDA devices, got cpu"):
        device_index("cpu")


def loaded_by(imports: str) -> set[str]:
    """Which of the driver's modules and libraries a fresh interpreter holds after ``import <imports>``."""
    code = (
        f"import sys, {imports}\n"
        "print(*(name for name in sys.modules if name.startswith('cuda.bindings')))\n"
        "print(*('libcuda.so' for line in open('/proc/self/maps') if '/libcuda.so' in line))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_importing_the_launcher_loads_no_more_of_the_driver_than_torch_does() -> None:
    assert loaded_by("prime_kernels.jit, prime_kernels.gemm") == loaded_by("torch")
