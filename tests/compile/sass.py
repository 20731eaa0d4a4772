"""What NVIDIA's own tools say about a cubin: resource usage and machine instructions."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from prime_kernels.jit import Cubin

# "REG:168 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:960 ..."
_USAGE = re.compile(r"(REG|STACK|SHARED|LOCAL|CONSTANT\[0\]):(\d+)")


def find_tool(name: str) -> str:
    """A tool of the packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm, or of a CUDA toolkit on PATH."""
    for entry in sys.path:
        for candidate in sorted(Path(entry or ".").glob(f"nvidia/*/bin/{name}"), reverse=True):
            return str(candidate)
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: pip install nvidia-cuda-{name}")
    return found


def _run(tool: str, *arguments: str) -> str:
    result = subprocess.run([find_tool(tool), *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def resource_usage(cubin: Cubin, folder: Path) -> dict[str, int]:
    """cuobjdump's figures for the kernel of `cubin`, by the names it prints."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin.data)
    lines = _run("cuobjdump", "-res-usage", str(path)).splitlines()
    (index,) = (number for number, line in enumerate(lines) if line.strip() == f"Function {cubin.symbol}:")
    return {name: int(value) for name, value in _USAGE.findall(lines[index + 1])}


def instructions(cubin: Cubin, folder: Path) -> dict[str, int]:
    """How often each instruction, with its suffixes, stands in the machine code of `cubin`."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin.data)
    counts: dict[str, int] = {}
    # An instruction stands after its address comment and an optional predicate.
    pattern = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.a-z]*)")
    for line in _run("nvdisasm", "-c", str(path)).splitlines():
        match = pattern.match(line)
        if match is not None:
            counts[match.group(1)] = counts.get(match.group(1), 0) + 1
    assert counts, "nvdisasm printed no instructions"
    return counts


def count(found: dict[str, int], *prefix: str) -> int:
    """Instructions whose name starts with one of `prefix`."""
    return sum(number for name, number in found.items() if name.startswith(prefix))
