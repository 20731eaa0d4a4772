"""Reading a cubin without a driver: registers, stack, spills, shared and constant memory, damaged images."""

from __future__ import annotations

import re
import warnings

import pytest

from prime_kernels.jit import CompileWarning, Cubin, CubinError, KernelSource, find_toolchain
from prime_kernels.jit.compiler import compile_uncached
from prime_kernels.jit.cubin import ptxas_spills, ptxas_warnings, read_resources

pytestmark = pytest.mark.compile

SHARED_WORDS = 777
WORD_BYTES = 4
# Parameters follow the driver's own constants in bank 0.
CONSTANT_BYTES_OF_THE_DRIVER = 528

SHARED = f"""
extern "C" __global__ void kernel(int* out, int n) {{
    __shared__ int words[{SHARED_WORDS}];
    words[threadIdx.x] = out[threadIdx.x];
    __syncthreads();
    out[0] = words[n];
}}
"""
SPILLING = """
extern "C" __global__ __launch_bounds__(1024, 1) void kernel(float* p, int n) {
    float a[150];
    for (int i = 0; i < 150; ++i) a[i] = p[i * 1024 + threadIdx.x];
    for (int j = 0; j < n; ++j)
        for (int i = 0; i < 150; ++i) a[i] = a[i] * a[(i + 7) % 150] + p[j];
    for (int i = 0; i < 150; ++i) p[i * 1024 + threadIdx.x] = a[i];
}
"""
DYNAMIC_INDEX = """
extern "C" __global__ void kernel(int* p, const int* order) {
    int a[64];
    for (int i = 0; i < 64; ++i) a[order[i] & 63] = p[i];
    for (int i = 0; i < 64; ++i) p[i] = a[order[i + 64] & 63];
}
"""
UNBOUND_SETMAXNREG = """
extern "C" __global__ void kernel(int* p) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    *p = 1;
}
"""
BOUND_SETMAXNREG = UNBOUND_SETMAXNREG.replace("__global__", "__global__ __launch_bounds__(384, 1)")


def build(code: str, arch: str = "sm_90a") -> Cubin:
    return compile_uncached(KernelSource("kernel", code, "kernel", arch), find_toolchain())


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_shared_memory_and_parameters(arch):
    resources = build(SHARED, arch).resources
    assert resources.static_smem == SHARED_WORDS * WORD_BYTES
    assert not resources.spills
    assert resources.stack_bytes == 0
    # A pointer and an int.
    if arch == "sm_90a":
        assert resources.constant_bytes == CONSTANT_BYTES_OF_THE_DRIVER + 8 + 4


def test_registers_follow_the_launch_bound():
    body = '{ asm volatile("setmaxnreg.inc.sync.aligned.u32 232;"); *p = 1; }'
    registers = [
        build(
            f'extern "C" __global__ __launch_bounds__({threads}, 1) void kernel(int* p) {body}'
        ).resources.registers
        for threads in (384, 512)
    ]
    # 65536 registers shared by the threads, in steps of 8.
    assert registers == [168, 128]


def test_spills_are_seen():
    cubin = build(SPILLING)
    assert cubin.resources.registers == 64
    assert cubin.resources.spills
    assert cubin.resources.spill_store_bytes > 0
    assert cubin.resources.stack_bytes > 0
    printed = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", cubin.log
    )
    assert printed is not None
    assert [int(value) for value in printed.groups()] == [
        cubin.resources.stack_bytes,
        cubin.resources.spill_store_bytes,
        cubin.resources.spill_load_bytes,
    ]


def test_an_indexed_array_is_stack_but_no_spill():
    resources = build(DYNAMIC_INDEX).resources
    assert resources.stack_bytes == 64 * WORD_BYTES
    assert not resources.spills


def test_ignored_setmaxnreg_is_loud():
    with pytest.warns(CompileWarning, match="setmaxnreg.*ignored"):
        cubin = build(UNBOUND_SETMAXNREG)
    assert len(cubin.warnings) == 1
    assert "setmaxnreg" in cubin.warnings[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build(BOUND_SETMAXNREG).warnings == ()


def test_warning_lines():
    log = (
        "ptxas info    : Used 8 registers\n"
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized\n"
        "ptxas warning : something\n"
        "note: a warning of the front end\n"
    )
    assert [line.split(":")[0].strip() for line in ptxas_warnings(log)] == ["ptxas info", "ptxas warning"]


def test_spill_figures_belong_to_the_kernel_that_is_asked_for():
    log = "".join(
        f"ptxas info    : Function properties for {name}\n"
        f"ptxas . 0 bytes stack frame, {stores} bytes spill stores, {stores + 1} bytes spill loads\n"
        for name, stores in (("first", 8), ("second", 16))
    )
    assert ptxas_spills(log, "second") == (16, 17)
    with pytest.raises(CubinError, match="third"):
        ptxas_spills(log, "third")


def test_damaged_images_raise_one_kind_of_error():
    cubin = build(SHARED)
    with pytest.raises(CubinError, match="not an ELF image"):
        read_resources(b"nonsense" * 100, "kernel", cubin.log)
    with pytest.raises(CubinError, match="no kernel other"):
        read_resources(cubin.data, "other", cubin.log)
    host = bytearray(cubin.data)
    host[18:20] = (62).to_bytes(2, "little")
    with pytest.raises(CubinError, match="machine 62"):
        read_resources(bytes(host), "kernel", cubin.log)
    for length in range(0, len(cubin.data), 97):
        with pytest.raises(CubinError):
            read_resources(cubin.data[:length], "kernel", cubin.log)
