"""The vendored SM90 BF16 grouped GEMM, as the public functions instantiate it, compiles to what was meant."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from prime_kernels.gemm import HOPPER_SXM_SMS, kernel_sources
from prime_kernels.gemm_heuristics import GemmKind, choose_config
from prime_kernels.gemm_kernel import GemmProblem, kernel_source
from prime_kernels.jit import Cubin, KernelSource, compile_kernel

pytestmark = pytest.mark.compile

SMEM_PER_BLOCK = 227 * 1024
REGISTERS_PER_SM = 65536


def variant(kind: GemmKind, m: int, n: int, psum: bool, compiled: bool) -> KernelSource:
    """A kernel beyond the standard set; ``compiled`` compiles the dimensions in."""
    config = choose_config(kind, m, n, 32, HOPPER_SXM_SMS, psum)
    shape = (m, n) if compiled else (0, 0)
    problem = GemmProblem(kind, *shape, 0, 32, psum, False, HOPPER_SXM_SMS)
    return kernel_source(problem, config)


LAYER = kernel_sources(2048, 768, 16)
VARIANTS = {
    "m-grouped psum, dimensions at run time": variant(GemmKind.M_NT, 0, 1536, True, False),
    "m-grouped psum without multicast": variant(GemmKind.M_NN, 0, 768, True, True),
    "k-grouped, 64-row tiles (H 2880)": variant(GemmKind.K_TN, 2880, 2880, False, True),
}
SOURCES = {f"{index} {source.name}": source for index, source in enumerate(LAYER)} | VARIANTS


def disassemble(cubin: Cubin, directory: Path) -> str:
    """The SASS of a cubin; skips where no disassembler is installed."""
    packaged = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13" / "bin"
    tool = shutil.which("cuobjdump") or shutil.which("cuobjdump", path=str(packaged))
    if tool is None:
        pytest.skip("no cuobjdump: pip install nvidia-cuda-cuobjdump")
    path = directory / "kernel.cubin"
    path.write_bytes(cubin.data)
    return subprocess.run([tool, "--dump-sass", str(path)], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("name", list(SOURCES))
def test_registers_shared_memory_and_instructions(name: str, tmp_path: Path) -> None:
    source = SOURCES[name]
    fields = source.entry.split(", ")
    block_n, threads = fields[7], int(fields[13]) + int(fields[14])
    cubin = compile_kernel(source)
    resources = cubin.resources
    assert resources.spill_store_bytes == resources.spill_load_bytes == 0
    assert resources.stack_bytes == resources.local_bytes == 0
    # One block per SM: the launch bounds leave each thread its share of the register file, in steps of 8.
    assert resources.registers <= min(REGISTERS_PER_SM // threads // 8 * 8, 255)
    # ptxas says so when it ignores setmaxnreg; the math warpgroups then run short of registers.
    assert cubin.warnings == ()

    sass = disassemble(cubin, tmp_path)
    assert f"HGMMA.64x{block_n}x16.F32.BF16" in sass
    assert "USETMAXREG" in sass
    assert "UTMALDG" in sass
    assert "HMMA." not in sass
    # A local store would be a spill the resource report missed.
    assert "STL" not in sass
    assert ("UTMALDG.2D.MULTICAST" in sass) == (fields[15] == "2")
    assert ("UTMAREDG" in sass) == (fields[19] == "true")


@pytest.mark.parametrize("name", list(SOURCES))
def test_static_and_dynamic_shared_memory_fit_one_block(name: str) -> None:
    source = SOURCES[name]
    fields = source.entry.split(", ")
    block_m, block_n, block_k, stages = int(fields[6]), int(fields[7]), int(fields[8]), int(fields[12])
    output_bytes = 4 if fields[-1].startswith("float") else 2
    dynamic = block_m * block_n * output_bytes + stages * ((block_m + block_n) * block_k * 2 + 16)
    assert compile_kernel(source).resources.static_smem + dynamic <= SMEM_PER_BLOCK
