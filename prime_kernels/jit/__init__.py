"""Kernel compiler and launcher: NVRTC, cache, cubin inspection, driver launches. Knows nothing of MoE."""

from __future__ import annotations

from .cache import CACHE_DIR_VARIABLE, KernelCache, compile_kernel, default_cache_dir
from .cubin import Cubin, Resources
from .driver import CudaError
from .errors import CacheWarning, CompileError, CompileWarning, CubinError, ToolchainError
from .launch import Kernel, load_kernel
from .source import KernelSource
from .tensormap import TensorMap, TensorMapSpec, tensor_map
from .toolchain import Toolchain, find_toolchain

__all__ = [
    "CACHE_DIR_VARIABLE",
    "CacheWarning",
    "CompileError",
    "CompileWarning",
    "Cubin",
    "CubinError",
    "CudaError",
    "Kernel",
    "KernelCache",
    "KernelSource",
    "Resources",
    "TensorMap",
    "TensorMapSpec",
    "Toolchain",
    "ToolchainError",
    "compile_kernel",
    "default_cache_dir",
    "find_toolchain",
    "load_kernel",
    "tensor_map",
]
