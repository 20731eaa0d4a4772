"""The SM90 BF16 kernels compile to what was meant: shapes of public models, and two that no tile divides."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from sass import _run, count, instructions

from prime_kernels import sm90
from prime_kernels.backward import sm90_bf16 as backward_kernel
from prime_kernels.forward import sm90_bf16 as forward_kernel
from prime_kernels.jit import Cubin, KernelSource, compile_kernel
from prime_kernels.models import model_shape

pytestmark = pytest.mark.compile

# 65,536 registers of an SM over 384 threads, in steps of 8; setmaxnreg moves them between the roles later.
REGISTERS = 168
PLAN_SHARED_BYTES = 48 * 1024

MODELS = ("qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3")
# (H, I, clamped, z kept). Here the ends of rows and tiles are found at run time.
EDGES = {"320x192": (320, 192, False, False), "gpt-oss clamped z kept": (2880, 2880, True, True)}


def _sources() -> dict[str, KernelSource]:
    found = {}
    for model in MODELS:
        shape = model_shape(model)
        for clamped in (False, True):
            for direction, module in (("forward", forward_kernel), ("backward", backward_kernel)):
                name = f"{direction} {model}{' clamped' if clamped else ''}"
                found[name] = module.source(shape.hidden, shape.intermediate, clamped)
    shape = model_shape(MODELS[0])
    for clamped in (False, True):
        for direction, module in (("forward", forward_kernel), ("backward", backward_kernel)):
            name = f"{direction} {MODELS[0]}{' clamped' if clamped else ''} z kept"
            found[name] = module.source(shape.hidden, shape.intermediate, clamped, True)
    for shape_name, arguments in EDGES.items():
        for direction, module in (("forward", forward_kernel), ("backward", backward_kernel)):
            found[f"{direction} {shape_name}"] = module.source(*arguments)
    return found


SOURCES = _sources()


@functools.cache
def compiled(name: str) -> Cubin:
    return compile_kernel(SOURCES[name])


def sass_lines(cubin: Cubin, folder: Path) -> list[str]:
    path = folder / "kernel.cubin"
    path.write_bytes(cubin.data)
    return _run("nvdisasm", "-c", str(path)).splitlines()


def main_loops(lines: list[str]) -> list[list[str]]:
    """The innermost loops with tensor core instructions: from a label to the branch back to it."""
    labels: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    for index, line in enumerate(lines):
        label = re.match(r"^(\.L_\S+):", line)
        if label is not None:
            labels[label.group(1)] = index
        branch = re.search(r"\bBRA\b.*`\((\.L_\S+)\)", line)
        if branch is not None and branch.group(1) in labels:
            start = labels[branch.group(1)]
            if any("HGMMA" in inside for inside in lines[start:index]):
                loops.append((start, index))

    # Blocks that retry a barrier stand behind everything and branch back, which spans loops but is none: of
    # spans that overlap, the shortest is a loop.
    found: list[tuple[int, int]] = []
    for start, end in sorted(loops, key=lambda loop: loop[1] - loop[0]):
        if all(end < first or last < start for first, last in found):
            found.append((start, end))
    return [lines[start : end + 1] for start, end in found]


@pytest.mark.parametrize("name", SOURCES)
def test_registers_and_instructions(name: str, tmp_path: Path) -> None:
    cubin = compiled(name)
    resources = cubin.resources
    assert resources.registers == REGISTERS
    # ptxas says so when it ignores setmaxnreg; the math warpgroups then run short of registers.
    assert cubin.warnings == ()
    assert resources.static_smem == 0
    # At edges a few values lie in memory between the main loops; those are looked at below.
    if name.startswith("forward") and name.removeprefix("forward ") not in EDGES:
        assert resources.spill_store_bytes == resources.spill_load_bytes == 0
        assert resources.stack_bytes == resources.local_bytes == 0
    found = instructions(cubin, tmp_path)
    assert count(found, "HGMMA.64x256x16.F32.BF16") > 0
    assert count(found, "UTMALDG") > 0
    assert count(found, "UTMALDG.3D.MULTICAST") > 0
    assert count(found, "UTMASTG") > 0
    assert count(found, "USETMAXREG") > 0
    assert count(found, "HMMA") == 0
    # A call would spill around it; a trap in a kernel kills the context of the whole process.
    assert count(found, "CALL", "BPT", "TRAP") == 0


@pytest.mark.parametrize("name", SOURCES)
def test_main_loops_touch_no_local_memory(name: str, tmp_path: Path) -> None:
    loops = main_loops(sass_lines(compiled(name), tmp_path))
    # Forward: one loop for both products. Backward: gate|up (unless z is kept), da', dX, weight gradients.
    products = 1 if name.startswith("forward") else 3 if name.endswith("z kept") else 4
    assert len(loops) >= products
    for loop in loops:
        local = [line for line in loop if re.search(r"\b(LDL|STL)\b", line)]
        assert not local, "\n".join(local)


@pytest.mark.parametrize("entry", sm90.PLAN_ENTRIES)
def test_route_plan(entry: str, tmp_path: Path) -> None:
    cubin = compile_kernel(sm90.plan_source(entry))
    assert not cubin.resources.spills
    assert cubin.resources.stack_bytes == 0
    found = instructions(cubin, tmp_path)
    assert count(found, "CALL", "BPT", "TRAP") == 0
