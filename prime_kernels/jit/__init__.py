"""Kernel compiler: NVRTC, cache and cubin inspection. Knows nothing of MoE."""

from __future__ import annotations

from .cache import CACHE_DIR_VARIABLE, KernelCache, compile_kernel, default_cache_dir
from .cubin import Cubin, Resources
from .errors import CacheWarning, CompileError, CompileWarning, CubinError, ToolchainError
from .source import KernelSource
from .toolchain import Toolchain, find_toolchain

__all__ = [
    "CACHE_DIR_VARIABLE",
    "CacheWarning",
    "CompileError",
    "CompileWarning",
    "Cubin",
    "CubinError",
    "KernelCache",
    "KernelSource",
    "Resources",
    "Toolchain",
    "ToolchainError",
    "compile_kernel",
    "default_cache_dir",
    "find_toolchain",
]
