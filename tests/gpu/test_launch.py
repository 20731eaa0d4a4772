"""Launches through the driver API on a real GPU: arguments, attributes, streams, graphs, threads, errors."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch

from prime_kernels.bench.timing import host_us
from prime_kernels.jit import CudaError, Kernel, KernelSource, driver, load_kernel

pytestmark = pytest.mark.gpu
if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs an SM90 GPU", allow_module_level=True)

CODE = r"""
struct Params { unsigned rows; float scale; unsigned long long base; };

extern "C" __global__ void arguments(long long* out, unsigned small, float real, Params params,
                                     const int* null) {
    out[0] = small; out[1] = (long long)(real * 4); out[2] = params.rows;
    out[3] = (long long)(params.scale * 4); out[4] = (long long)params.base; out[5] = null == nullptr;
}
extern "C" __global__ void add_one(float* x, unsigned n) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) x[i] += 1;
}
extern "C" __global__ void cluster_shape(int* out) {
    unsigned rank, size;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    if (threadIdx.x == 0) { out[2 * blockIdx.x] = rank; out[2 * blockIdx.x + 1] = size; }
}
extern "C" __global__ void dynamic_smem(int* out, unsigned words) {
    extern __shared__ int words_of_block[];
    for (unsigned i = threadIdx.x; i < words; i += blockDim.x) words_of_block[i] = i * 3;
    __syncthreads();
    for (unsigned i = threadIdx.x; i < words; i += blockDim.x) out[i] = words_of_block[words - 1 - i];
}
extern "C" __global__ void grid_sum(unsigned* counter, unsigned* seen) {
    if (threadIdx.x != 0) return;
    atomicAdd(counter, 1u);
    // Ends only when every block of the grid is resident at once.
    while (*(volatile unsigned*)counter < gridDim.x) {}
    seen[blockIdx.x] = *(volatile unsigned*)counter;
}
extern "C" __global__ void slow_write(int* flag, int value) {
    for (int i = 0; i < 200; ++i) __nanosleep(1000);
    *(volatile int*)flag = value;
    __threadfence();
    cudaTriggerProgrammaticLaunchCompletion();
}
extern "C" __global__ void dependent_read(const int* flag, int* out) {
    cudaGridDependencySynchronize();
    *out = *(volatile const int*)flag;
}
"""

# About a tenth of a second.
SLEEP_CYCLES = 200_000_000


class Params(ctypes.Structure):
    _fields_ = (("rows", ctypes.c_uint32), ("scale", ctypes.c_float), ("base", ctypes.c_uint64))


def kernel(entry: str) -> Kernel:
    return load_kernel(KernelSource(f"test_{entry}", CODE, entry, "sm_90a"))


def test_arguments_arrive_as_they_were_given() -> None:
    out = torch.full((6,), -1, dtype=torch.int64, device="cuda")
    args = (out, ctypes.c_uint32(2**32 - 1), ctypes.c_float(0.75), Params(9, 2.5, 2**50), None)
    kernel("arguments").launch(1, 1, args)
    assert out.tolist() == [2**32 - 1, 3, 9, 10, 2**50, 1]


def test_parameter_sizes_are_checked_against_the_kernel() -> None:
    out = torch.zeros(6, dtype=torch.int64, device="cuda")
    with pytest.raises(ValueError, match=r"argument 1: c_ulong is 8 bytes, the kernel's parameter is 4"):
        kernel("arguments").launch(1, 1, (out, ctypes.c_uint64(1), ctypes.c_float(1), Params(), None))
    with pytest.raises(ValueError, match="has 5 parameters, got 1"):
        kernel("arguments").launch(1, 1, (out,))
    with pytest.raises(ValueError, match="argument 0: tensor on cpu"):
        kernel("arguments").launch(1, 1, (out.cpu(), ctypes.c_uint32(1), ctypes.c_float(1), Params(), None))


def test_loading_is_memoised() -> None:
    assert kernel("add_one") is kernel("add_one")
    assert kernel("add_one") is not kernel("cluster_shape")


@pytest.mark.parametrize("cluster", [1, 2, 4, 8, 16])
def test_cluster_dimensions(cluster: int) -> None:
    out = torch.full((32, 2), -1, dtype=torch.int32, device="cuda")
    kernel("cluster_shape").launch(32, 32, (out,), cluster=cluster)
    assert out[:, 0].tolist() == [block % cluster for block in range(32)]
    assert out[:, 1].tolist() == [cluster] * 32


@pytest.mark.parametrize("kilobytes", [16, 64, 227, 100])
def test_dynamic_shared_memory_above_the_default_limit(kilobytes: int) -> None:
    words = kilobytes * 256
    out = torch.full((words,), -1, dtype=torch.int32, device="cuda")
    kernel("dynamic_smem").launch(1, 256, (out, ctypes.c_uint32(words)), smem=words * 4)
    assert torch.equal(out.cpu(), torch.arange(words - 1, -1, -1, dtype=torch.int32) * 3)


def test_too_much_shared_memory_is_named_before_the_launch() -> None:
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match=r"232449 bytes of dynamic .* within 232448"):
        kernel("dynamic_smem").launch(1, 32, (out, ctypes.c_uint32(0)), smem=232449)


def test_cooperative_launch_and_its_limit() -> None:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    seen = torch.zeros(sms, dtype=torch.int32, device="cuda")
    kernel("grid_sum").launch(sms, 64, (counter, seen), cooperative=True)
    assert seen.tolist() == [sms] * sms
    with pytest.raises(CudaError, match="CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE") as info:
        kernel("grid_sum").launch(sms * 64, 1024, (counter, seen), cooperative=True)
    assert info.value.result == "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"


def test_programmatic_dependent_launch_sees_the_kernel_before_it() -> None:
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    for value in range(1, 6):
        kernel("slow_write").launch(1, 1, (flag, ctypes.c_int32(value)))
        kernel("dependent_read").launch(1, 1, (flag, out), pdl=True)
        assert out.item() == value


@pytest.mark.parametrize("how", ["current", "argument", "handle"])
def test_launches_go_to_the_chosen_stream(how: str) -> None:
    x = torch.zeros(1 << 20, device="cuda")
    stream = torch.cuda.Stream()
    add_one = kernel("add_one")
    args = (x, ctypes.c_uint32(x.numel()))
    # Everything runs once before, so that loading code does not outlast the sleep.
    add_one.launch(64, 256, args)
    x.mul_(2).add_(5).zero_()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        x.mul_(2).add_(5)
    if how == "current":
        with torch.cuda.stream(stream):
            add_one.launch(64, 256, args)
    else:
        add_one.launch(64, 256, args, stream=stream if how == "argument" else stream.cuda_stream)
    assert not stream.query()
    stream.synchronize()
    # 0 * 2 + 5, and then the kernel: on any other stream it would have run first (1 * 2 + 5).
    assert x.unique().tolist() == [6.0]


def test_a_thread_without_a_context_can_launch() -> None:
    x = torch.zeros(1024, device="cuda")
    add_one = kernel("add_one")
    failures: list[Exception] = []

    def work() -> None:
        try:
            for _ in range(50):
                add_one.launch(4, 256, (x, ctypes.c_uint32(1024)), stream=0)
        except Exception as error:  # noqa: BLE001 (raised again in the main thread)
            failures.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for failure in failures:
        raise failure
    assert x.unique().tolist() == [200.0]


def test_capture_and_replay_in_a_graph_even_when_loaded_inside() -> None:
    x = torch.zeros(4096, device="cuda")
    fresh = KernelSource("test_graph", CODE + "// loaded during the capture", "add_one", "sm_90a")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        load_kernel(fresh).launch(8, 256, (x, ctypes.c_uint32(4096)))
        kernel("add_one").launch(8, 256, (x, ctypes.c_uint32(4096)))
    torch.cuda.synchronize()
    assert x.count_nonzero() == 0
    for _ in range(5):
        graph.replay()
    assert x.unique().tolist() == [10.0]


def test_launch_overhead_on_the_host() -> None:
    x = torch.zeros(32, device="cuda")
    add_one = kernel("add_one")
    args = (x, ctypes.c_uint32(32))
    assert host_us(lambda: add_one.launch(1, 32, args)) < 20


def test_a_cubin_of_another_architecture_names_the_driver_error() -> None:
    source = KernelSource(
        "test_other_arch", CODE.split("extern")[0] + 'extern "C" __global__ void none() {}', "none", "sm_100a"
    )
    with pytest.raises(CudaError, match=r"cuModuleLoadData.*CUDA_ERROR_NO_BINARY_FOR_GPU"):
        load_kernel(source)


def test_devices_and_limits_are_read_from_the_driver() -> None:
    limits = kernel("add_one").limits
    assert limits.max_smem == 227 * 1024
    assert limits.max_threads == 1024
    assert driver.driver_version() >= (12, 4)
