"""The SM90 BF16 kernels compile to what was meant: shapes of public models, and two that no tile divides."""

from __future__ import annotations

import functools
import itertools
import re
from pathlib import Path

import pytest
from sass import _run, count, instructions

from prime_kernels import sm90
from prime_kernels.backward import sm90_bf16 as backward_kernel
from prime_kernels.forward import sm90_bf16 as forward_kernel
from prime_kernels.jit import Cubin, KernelSource, compile_kernel
from prime_kernels.models import MODELS

pytestmark = pytest.mark.compile

# 65,536 registers of an SM over 384 threads, in steps of 8; setmaxnreg moves them between the roles later.
REGISTERS = 168
TILE_OF_H, TILE_OF_I = 256, 128

# (H, I) beside those of the models. Here the ends of rows and tiles are found at run time, as for GPT-OSS.
EDGE = (320, 192)


def _name(shape: tuple[int, int], clamped: bool, keep_z: bool, trace: bool) -> str:
    flags = {"clamped": clamped, "z kept": keep_z, "traced": trace}
    return " ".join(["x".join(map(str, shape)), *(flag for flag, on in flags.items() if on)])


def _sources() -> dict[str, KernelSource]:
    """Every shape of the known models, as the model needs it; one shape in every way that there is."""
    instances = []
    for model in MODELS.values():
        shape, clamped = (model.hidden, model.intermediate), model.activation_clamp is not None
        instances += [(shape, clamped, keep_z, False) for keep_z in (False, True)]
    first = next(iter(MODELS.values()))
    every_way = itertools.product((False, True), repeat=3)
    instances += [((first.hidden, first.intermediate), *flags) for flags in every_way]
    instances.append((EDGE, False, False, False))
    found = {}
    for shape, *flags in dict.fromkeys(instances):
        for direction, module in (("forward", forward_kernel), ("backward", backward_kernel)):
            found[f"{direction} {_name(shape, *flags)}"] = module.source(*shape, *flags)
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
    # Where tiles are cut or times are taken, a few values lie in memory between the main loops; those are
    # looked at below.
    hidden, inter = map(int, name.split()[1].split("x"))
    whole_tiles = hidden % TILE_OF_H == 0 and inter % TILE_OF_I == 0
    if name.startswith("forward") and whole_tiles and "traced" not in name:
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
    products = 1 if name.startswith("forward") else 3 if "z kept" in name else 4
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
