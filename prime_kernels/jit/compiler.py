"""Runs NVRTC: one translation unit with one kernel in, one cubin out."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from .cubin import Cubin, ptxas_warnings, read_resources
from .errors import CompileError, CompileWarning, ToolchainError
from .headers import PRELUDE, HeaderSet, all_headers, embedded_headers
from .source import KernelSource
from .toolchain import Toolchain, import_nvrtc

# What every kernel is compiled with. CUTLASS needs C++20 and 128-bit integers here; unannotated functions of
# its headers must count as device functions, because NVRTC has no host side.
BASE_OPTIONS = (
    "--std=c++20",
    "--device-int128",
    "--device-as-default-execution-space",
    "--ptxas-options=--verbose",
    # The working directory must not lend headers.
    "--no-source-include",
    # Unused variables and functions, unreachable code and sign changes of the vendored headers.
    "--diag-suppress=39,161,174,177,186,940",
)

_COMPILE_TIME = "Compile time ="


@dataclass(frozen=True)
class CompiledImage:
    """What the compiler returned: the cubin, the lowered name of the kernel and everything it printed."""

    data: bytes
    symbol: str
    log: str


def _text(nvrtc: ModuleType, size_of: Any, read: Any, program: Any) -> bytes:
    status, size = size_of(program)
    _check(nvrtc, status)
    # The bindings fill the bytes object in place.
    data = bytes(size)
    (status,) = read(program, data)
    _check(nvrtc, status)
    return data


def _without_times(log: str) -> str:
    """The log without how long the assembler took, so that equal sources give equal records."""
    return "\n".join(line for line in log.splitlines() if _COMPILE_TIME not in line)


def _check(nvrtc: ModuleType, status: Any) -> None:
    if int(status) != 0:
        _, text = nvrtc.nvrtcGetErrorString(status)
        raise ToolchainError(f"NVRTC failed: {text.decode() if text else status!r}")


def command_line(source: KernelSource, toolchain: Toolchain) -> list[str]:
    """Options NVRTC is called with, the CUDA include directories last."""
    return [
        f"--gpu-architecture={source.arch}",
        *BASE_OPTIONS,
        *source.options,
        *(f"--include-path={directory}" for directory in toolchain.include_dirs),
    ]


def compile_image(
    source: KernelSource, toolchain: Toolchain, headers: HeaderSet | None = None
) -> CompiledImage:
    """Compiles ``source`` now, without any cache. Raises CompileError with the compiler's log.

    headers: what ``all_headers`` found, when the caller has it already.
    """
    nvrtc = import_nvrtc()
    headers = headers if headers is not None else all_headers(source, toolchain)
    embedded = embedded_headers(source, headers)
    # An option for this would also look in the working directory.
    code = f"#include <{PRELUDE}>\n#line 1\n{source.code}".encode()
    file_name = f"{source.name}.cu".encode()
    status, program = nvrtc.nvrtcCreateProgram(
        code, file_name, len(embedded), list(embedded.values()), [name.encode() for name in embedded]
    )
    _check(nvrtc, status)
    try:
        expression = source.entry.encode()
        (status,) = nvrtc.nvrtcAddNameExpression(program, expression)
        _check(nvrtc, status)
        options = [option.encode() for option in command_line(source, toolchain)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _text(nvrtc, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        log_text = _without_times(log.rstrip(b"\0").decode(errors="replace"))
        if int(status) != 0:
            raise CompileError(
                f"kernel {source.name!r} does not compile for {source.arch} "
                f"with {toolchain.version_string}:\n{log_text}",
                log_text,
            )
        status, symbol = nvrtc.nvrtcGetLoweredName(program, expression)
        _check(nvrtc, status)
        cubin = _text(nvrtc, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        return CompiledImage(cubin, symbol.decode(), log_text)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def compile_uncached(source: KernelSource, toolchain: Toolchain, headers: HeaderSet | None = None) -> Cubin:
    """Compiles ``source`` and reads its resources. Warnings of the assembler become CompileWarnings."""
    image = compile_image(source, toolchain, headers)
    for line in ptxas_warnings(image.log):
        warnings.warn(f"kernel {source.name!r} for {source.arch}: {line}", CompileWarning, stacklevel=3)
    resources = read_resources(image.data, image.symbol, image.log)
    return Cubin(image.data, image.symbol, source.arch, resources, image.log)
