"""`python -m prime_kernels doctor`: what is installed, what is missing or set wrong, and what fixes it.

Creates no CUDA context. A machine without a GPU is not a fault: the reference backend runs there, and kernels
can be compiled for other machines.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.version import Version

from . import extras
from ._dropin import MANIFEST
from ._version import __version__

OK = "ok"
MISSING = "missing"
WRONG = "wrong"
PROBLEMS = (MISSING, WRONG)
# Worth knowing, and nothing that has to be fixed.
NOTE = "note"

EXIT_OK = 0
EXIT_MISSING = 1

MINIMUM_PYTHON = (3, 10)
MINIMUM_TORCH = Version("2.9")
# A kernel that uses the prelude and nothing else: proves that NVRTC and its headers work together.
PROBE_CODE = '#include <cuda_bf16.h>\nextern "C" __global__ void probe(__nv_bfloat16* x) { *x = 1.0f; }\n'
PROBE_ARCH = "sm_90a"
SHIPPED = "shipped cubins"
CACHE_LOW_BYTES = 100 * 1024 * 1024
PIP = "pip install "
MEBIBYTE = 1024 * 1024
ENVIRONMENT_PREFIX = "PRIME_KERNELS_"
# Read by `scripts/vendor_deepgemm.py`, which is no part of the package.
WHEEL_ENV = "PRIME_KERNELS_DEEPGEMM_WHEEL"


@dataclass(frozen=True)
class Row:
    """One line of the report. `fix` is a command or an instruction, empty when nothing needs fixing."""

    name: str
    state: str
    detail: str
    fix: str = ""


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python_rows() -> list[Row]:
    python = ".".join(str(part) for part in sys.version_info[:3])
    good = sys.version_info >= MINIMUM_PYTHON
    fix = "" if good else f"use Python {MINIMUM_PYTHON[0]}.{MINIMUM_PYTHON[1]} or newer"
    rows = [
        Row("package", OK, f"{__package__} {__version__} in {Path(__file__).resolve().parent}"),
        Row("python", OK if good else MISSING, f"{python} ({sys.executable})", fix),
    ]
    torch = _version("torch")
    if torch is None:
        rows.append(Row("torch", MISSING, "not installed", f"pip install 'torch>={MINIMUM_TORCH}'"))
    elif Version(torch) < MINIMUM_TORCH:
        rows.append(Row("torch", MISSING, f"{torch} is too old", f"pip install 'torch>={MINIMUM_TORCH}'"))
    else:
        rows.append(Row("torch", OK, torch))
    bindings = _version("cuda-bindings")
    if bindings is None:
        rows.append(Row("cuda-python", MISSING, "not installed", "pip install 'cuda-python>=12.9,<14'"))
    else:
        rows.append(Row("cuda-python", OK, f"cuda-bindings {bindings}"))
    return rows


def _existing_file(value: str, source: str) -> Path:
    if not Path(value).is_file():
        raise ValueError(f"{source}: got {value!r}, needs the path of a file")
    return Path(value)


def _environment_readers() -> Mapping[str, Callable[[str, str], object]]:
    """Every environment variable of the package -> what refuses its value, as `runtime.ENVIRONMENT`."""
    from .jit import CACHE_DIR_VARIABLE
    from .runtime import ENVIRONMENT

    # Any text is a path; whether the directory can be written is a row of its own.
    return {**ENVIRONMENT, CACHE_DIR_VARIABLE: lambda value, _: value, WHEEL_ENV: _existing_file}


def _environment_rows() -> list[Row]:
    """The variables that are set. One with an unknown name does nothing, which nobody else would say."""
    readers = _environment_readers()
    rows = []
    for name, value in sorted(os.environ.items()):
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        if name not in readers:
            # Without the prefix, which alone would make any two names alike.
            settings = [known.removeprefix(ENVIRONMENT_PREFIX) for known in readers]
            close = difflib.get_close_matches(name.removeprefix(ENVIRONMENT_PREFIX), settings, n=1)
            fix = (
                f"unset it, or did you mean {ENVIRONMENT_PREFIX}{close[0]}?"
                if close
                else (f"unset it; there are {', '.join(readers)}")
            )
            rows.append(Row(name, WRONG, f"{value!r}: this version has no setting of that name", fix))
            continue
        try:
            if value:
                readers[name](value, f"${name}")
            rows.append(Row(name, OK, repr(value)))
        except ValueError as error:
            rows.append(Row(name, WRONG, str(error).removeprefix(f"${name}: "), "set another value or none"))
    return rows


def _toolchain_rows() -> list[Row]:
    from .jit import toolchain

    major = toolchain.bindings_major()
    if major not in toolchain.SUPPORTED_CUDA_MAJORS:
        return [
            Row("NVRTC", MISSING, f"cuda-bindings of CUDA {major}", "pip install 'cuda-python>=12.9,<14'")
        ]
    version = toolchain.nvrtc_version()
    if version is None:
        fix = toolchain.pip_install_line([toolchain.NVRTC_PACKAGES[major]], None, major)
        rows = [Row("NVRTC", MISSING, f"libnvrtc.so.{major} was not found", fix)]
    else:
        rows = [Row("NVRTC", OK, f"{version[0]}.{version[1]}")]
    for component in toolchain.HEADER_COMPONENTS:
        name = f"{component.name} headers"
        path = toolchain.find_headers(component, version if version is not None else (major, 0))
        if path is None:
            fix = toolchain.pip_install_line([component.pip_package(major)], version, major)
            rows.append(Row(name, MISSING, f"{component.probe} was not found", fix))
            continue
        declared = toolchain.cuda_header_version(path)
        if declared is not None and version is not None and declared != version:
            detail = f"{path} (CUDA {declared[0]}.{declared[1]}, NVRTC is {version[0]}.{version[1]})"
            rows.append(Row(name, NOTE, detail))
        else:
            rows.append(Row(name, OK, str(path)))
    return rows


def _probe_row() -> Row:
    """Compiles a small kernel without the cache."""
    from .jit import CompileError, CubinError, KernelSource, ToolchainError
    from .jit.compiler import compile_uncached
    from .jit.toolchain import inspect_toolchain

    toolchain, _ = inspect_toolchain()
    if toolchain is None:
        return Row("compile", MISSING, "not tried: the compiler is incomplete, see above")
    try:
        cubin = compile_uncached(KernelSource("probe", PROBE_CODE, "probe", PROBE_ARCH), toolchain)
    except (CompileError, CubinError, ToolchainError) as error:
        lines = str(error).splitlines()
        fix = "install NVRTC and the header packages in one and the same version"
        return Row("compile", MISSING, "; ".join(lines[:3]), fix)
    return Row("compile", OK, f"a small kernel for {PROBE_ARCH}, {cubin.resources.registers} registers")


def _vendored_row() -> Row:
    if not MANIFEST.is_file():
        fix = "reinstall the package with pip, or in a source checkout: python scripts/vendor_deepgemm.py"
        return Row("vendored headers", MISSING, f"{MANIFEST.parent} is incomplete", fix)
    headers = sum(1 for path in (MANIFEST.parent / "include").rglob("*") if path.is_file())
    return Row("vendored headers", OK, f"{headers} files")


def _cache_rows() -> list[Row]:
    from .jit import CACHE_DIR_VARIABLE, KernelCache, default_cache_dir
    from .jit.cache import aot_dir

    rows = []
    shipped = KernelCache(aot_dir()).entries()
    if shipped:
        rows.append(Row(SHIPPED, OK, f"{len(shipped)} in {aot_dir()}"))
    directory = default_cache_dir()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
        free = shutil.disk_usage(directory).free
    except OSError as error:
        fix = f"set {CACHE_DIR_VARIABLE} to a directory that can be written"
        return [*rows, Row("kernel cache", MISSING, f"{directory} cannot be written: {error}", fix)]
    entries = KernelCache(directory).entries()
    size = sum(path.stat().st_size for path in entries)
    detail = f"{directory}: {len(entries)} kernels, {size / MEBIBYTE:.1f} MiB, {free / MEBIBYTE:.0f} MiB free"
    low = free < CACHE_LOW_BYTES
    fix = f"free some space or set {CACHE_DIR_VARIABLE}" if low else ""
    return [*rows, Row("kernel cache", NOTE if low else OK, detail, fix)]


def _gpu_rows() -> list[Row]:
    from .jit import driver

    try:
        api = driver.driver()
        supported = driver.driver_version()
        count = int(driver.check(api.cuDeviceGetCount(), "cuDeviceGetCount"))
    except RuntimeError as error:
        return [Row("driver", NOTE, f"none usable ({error}); the reference backend runs without one")]
    rows = [Row("driver", OK, f"supports CUDA {supported[0]}.{supported[1]}")]
    for index in range(count):
        handle = driver.check(api.cuDeviceGet(index), f"cuDeviceGet({index})")
        name = driver.check(api.cuDeviceGetName(256, handle), "cuDeviceGetName")
        major = driver.device_attribute(index, "COMPUTE_CAPABILITY_MAJOR")
        minor = driver.device_attribute(index, "COMPUTE_CAPABILITY_MINOR")
        processors = driver.device_attribute(index, "MULTIPROCESSOR_COUNT")
        text = name.split(b"\0")[0].decode() if isinstance(name, bytes) else str(name)
        rows.append(Row(f"GPU {index}", OK, f"{text}, SM{major}{minor}, {processors} SMs"))
    return rows


def _driver_fits_row() -> list[Row]:
    """A cubin needs a driver of the compiler's major CUDA version or a newer one."""
    from .jit import driver, toolchain

    version = toolchain.nvrtc_version()
    try:
        driver.driver()
        supported = driver.driver_version()
    except RuntimeError:
        return []
    if version is None or supported[0] >= version[0]:
        return []
    detail = f"NVRTC {version[0]}.{version[1]} is newer than the driver (CUDA {supported[0]}.{supported[1]})"
    older = version[0] - 1
    packages = [toolchain.NVRTC_PACKAGES[older], *(c.pip_package(older) for c in toolchain.HEADER_COMPONENTS)]
    line = toolchain.pip_install_line(packages, None, older)
    fix = f"update the driver, or: {line} 'cuda-python>=12.9,<{version[0]}'"
    return [Row("driver and NVRTC", MISSING, detail, fix)]


def _kernel_rows() -> list[Row]:
    """Without a usable device every kernel has the same reason, which the driver's row has told."""
    from .registry import AVAILABLE, NO_DEVICE, status

    rows = []
    for name, text in status().items():
        need, no_device, _ = text.partition(NO_DEVICE)
        detail = f"{need}and there is no GPU" if no_device else text
        rows.append(Row(name, OK if text == AVAILABLE else NOTE, detail))
    return rows


def _extra_rows() -> list[Row]:
    packages = extras.names("cli")
    absent = [name for name in packages if _version(name) is None]
    if not absent:
        return [Row("extra [cli]", OK, ", ".join(packages))]
    return [Row("extra [cli]", NOTE, f"without {', '.join(absent)}", extras.pip_line("cli"))]


def diagnose() -> tuple[list[Row], int]:
    """The rows of the report and the exit code: 0, or 1 when something that has a fix is missing or wrong."""
    rows = _python_rows()
    if all(row.state == OK for row in rows):
        compiler = [*_toolchain_rows(), _vendored_row(), _probe_row()]
        cache = _cache_rows()
        if any(row.name == SHIPPED for row in cache):
            # An image with ready cubins may leave the compiler out on purpose.
            compiler = [replace(row, state=NOTE) if row.state == MISSING else row for row in compiler]
        rows += [*compiler, *cache, *_environment_rows()]
        rows += [*_gpu_rows(), *_driver_fits_row(), *_kernel_rows()]
    rows += _extra_rows()
    return rows, EXIT_MISSING if any(row.state in PROBLEMS for row in rows) else EXIT_OK


def main(argv: Sequence[str]) -> int:
    """Prints the report; the exit code is that of `diagnose`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__} doctor",
        description="Show what is installed, what is missing, and the command that fixes it.",
    )
    parser.parse_args(list(argv))
    rows, code = diagnose()
    width = max(len(row.name) for row in rows)
    for row in rows:
        print(f"{row.state:<8} {row.name:<{width}}  {row.detail}")
        if row.fix:
            print(f"{'':<8} {'':<{width}}  fix: {row.fix}")
    problems = sum(row.state in PROBLEMS for row in rows)
    packages = [row.fix[len(PIP) :] for row in rows if row.state == MISSING and row.fix.startswith(PIP)]
    if len(packages) > 1:
        print(f"all of them at once: {PIP}{' '.join(packages)}")
    print(
        f"{problems} problem{'s' if problems != 1 else ''} found"
        if problems
        else "everything needed is there"
    )
    return code
