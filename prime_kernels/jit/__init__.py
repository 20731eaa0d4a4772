"""Kernel compiler: NVRTC, cache and cubin inspection. Knows nothing of MoE."""

from __future__ import annotations

from .compiler import compile_kernel
from .cubin import Cubin, Resources
from .errors import CacheWarning, CompileError, CompileWarning, CubinError, ToolchainError
from .source import KernelSource
from .toolchain import Toolchain, find_toolchain

__all__ = [
    "CacheWarning",
    "CompileError",
    "CompileWarning",
    "Cubin",
    "CubinError",
    "KernelSource",
    "Resources",
    "Toolchain",
    "ToolchainError",
    "compile_kernel",
    "find_toolchain",
]
