"""The vendored kernels compile for their architectures, into the machine code they are written for.

No GPU is needed. The Mega MoE forward kernels are compiled, never run, in this version.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
from sass import count, instructions, resource_usage

from prime_kernels import gemm, vendored_forward
from prime_kernels.jit import CompileWarning, Cubin, KernelSource, compile_kernel
from prime_kernels.jit.cubin import RESERVED_SMEM
from prime_kernels.models import MODELS, model_shape

pytestmark = pytest.mark.compile

EP = 8
QWEN3 = model_shape("qwen3-30b-a3b")
DEEPSEEK = model_shape("deepseek-v3")
# 65536 registers of an SM shared by the threads of a block, in steps of 8.
REGISTERS_OF_384_THREADS = 168
REGISTERS_OF_512_THREADS = 128
# The SM100 kernels index small arrays, which puts a frame of this size at most on the stack.
SM100_STACK_LIMIT = 128
# Some assemblers between CUDA 12.9 and 13.5 spill a few registers of the SM100 kernels.
SM100_SPILL_LIMIT = 128


@dataclass(frozen=True)
class Expectation:
    """What the machine code must hold. `matrix`: the tensor-core instruction it is written for."""

    matrix: str
    registers: int
    stack_limit: int
    spill_limit: int
    multicast: bool


SM90_FP8 = Expectation("QGMMA.64x256x32.F32.E4M3.E4M3", REGISTERS_OF_384_THREADS, 0, 0, multicast=True)
SM90_BF16 = Expectation("HGMMA.64x256x16.F32.BF16", REGISTERS_OF_384_THREADS, 0, 0, multicast=True)
SM100_BF16 = Expectation(
    "UTCHMMA.2CTA", REGISTERS_OF_512_THREADS, SM100_STACK_LIMIT, SM100_SPILL_LIMIT, multicast=False
)
SM100_FP8 = Expectation(
    "UTCQMMA.2CTA", REGISTERS_OF_512_THREADS, SM100_STACK_LIMIT, SM100_SPILL_LIMIT, multicast=False
)


def vendored_cases() -> list[tuple[str, KernelSource, Expectation]]:
    cases: list[tuple[str, KernelSource, Expectation]] = []
    (source,) = vendored_forward.sm90_fp8(QWEN3, EP)
    cases.append(("SM90 FP8 forward", source, SM90_FP8))
    (source,) = vendored_forward.sm100_bf16(QWEN3, EP)
    cases.append(("SM100 BF16 forward", source, SM100_BF16))
    for weights, source in zip(("FP8", "FP4"), vendored_forward.sm100_mxfp8(QWEN3, EP), strict=True):
        cases.append((f"SM100 FP8/{weights} forward", source, SM100_FP8))
    # The other grouped GEMMs have tests of their own.
    source, *_ = gemm.kernel_sources(QWEN3.hidden, QWEN3.intermediate, QWEN3.experts_per_rank(EP))
    cases.append(("SM90 BF16 GEMM", source, SM90_BF16))
    return cases


CASES = vendored_cases()


def build(source: KernelSource, folder: Path) -> Cubin:
    """Compiles without a cache that could hide a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", CompileWarning)
        return compile_kernel(source, cache_dir=folder)


@pytest.mark.parametrize(
    ("source", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_vendored_kernel(source: KernelSource, expected: Expectation, tmp_path: Path) -> None:
    cubin = build(source, tmp_path / "cache")
    resources = cubin.resources
    print(f"{source.name}: {resources}")
    assert cubin.origin == "compiled"
    assert cubin.arch == source.arch
    assert cubin.warnings == ()
    assert resources.registers == expected.registers
    assert resources.stack_bytes <= expected.stack_limit
    assert resources.spill_store_bytes + resources.spill_load_bytes <= expected.spill_limit
    assert resources.local_bytes == 0
    # All of their shared memory is dynamic.
    assert resources.static_smem == 0

    usage = resource_usage(cubin, tmp_path)
    assert usage["REG"] == resources.registers
    assert usage["STACK"] == resources.stack_bytes
    assert usage["LOCAL"] == resources.local_bytes
    assert usage["SHARED"] == resources.static_smem + RESERVED_SMEM
    assert usage["CONSTANT[0]"] == resources.constant_bytes

    found = instructions(cubin, tmp_path)
    assert count(found, expected.matrix) > 0, sorted(found)
    assert count(found, "UTMALDG") > 0, "no TMA loads"
    assert not expected.multicast or any("MULTICAST" in name for name in found)
    # setmaxnreg survived: registers move from the producers to the math warps.
    assert count(found, "USETMAXREG.DEALLOC") > 0
    assert count(found, "USETMAXREG.TRY") > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [vendored_forward.sm90_fp8, vendored_forward.sm100_bf16, vendored_forward.sm100_mxfp8]
)
def test_large_model(make, tmp_path: Path) -> None:
    """DeepSeek-V3: the widest tokens, so the fewest pipeline stages."""
    for source in make(DEEPSEEK, EP):
        cubin = build(source, tmp_path)
        assert cubin.resources.stack_bytes <= SM100_STACK_LIMIT
        assert cubin.warnings == ()


# Columns of two neighbouring blocks, which both GEMMs of a layer must be made of.
REFUSED_BELOW = {
    vendored_forward.sm90_fp8: 512,
    vendored_forward.sm100_bf16: 256,
    vendored_forward.sm100_mxfp8: 256,
}


@pytest.mark.parametrize("make", list(REFUSED_BELOW))
@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_model_has_parameters_or_a_reason(make, name: str) -> None:
    """Shapes the vendored kernels do not take are refused before anything is compiled."""
    shape = model_shape(name)
    ep = min(EP, shape.num_experts)
    if shape.hidden % REFUSED_BELOW[make] or 2 * shape.intermediate % REFUSED_BELOW[make]:
        with pytest.raises(ValueError, match=f"in multiples of {REFUSED_BELOW[make]}"):
            make(shape, ep)
    else:
        sources = make(shape, ep)
        assert len({source.entry for source in sources}) == len(sources) > 0
