"""The manifest of kernels, and for each one whether this machine can run it, or why not.

Nothing here compiles, allocates GPU memory or creates a CUDA context.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

from ._dropin import MANIFEST
from ._version import __version__

AVAILABLE = "available"
NO_DEVICE = "and there is no usable CUDA device"
VENDOR_FIX = "reinstall the package, or run scripts/vendor_deepgemm.py in its source tree"


@dataclass(frozen=True)
class KernelInfo:
    """One kernel of the package.

    summary: what it computes.
    capability: the compute capability it is written for; its machine code runs on no other.
    module: the module that launches it, relative to this package; None while this version has no such kernel.
    """

    summary: str
    capability: tuple[int, int]
    module: str | None = None


SM90 = (9, 0)
SM100 = (10, 0)
GPU_FAMILIES = {SM90: "Hopper", SM100: "Blackwell"}

KERNELS: dict[str, KernelInfo] = {
    "mega_moe_bf16": KernelInfo("Mega MoE forward, BF16", SM90, ".sm90_mega_moe"),
    "mega_moe_bf16_backward": KernelInfo(
        "Mega MoE backward, BF16, fp32 or BF16 weight gradients", SM90, ".sm90_mega_moe"
    ),
    "mega_moe_fp8": KernelInfo("Mega MoE forward, FP8 with 1x128 and 128x128 scales", SM90),
    "mega_moe_fp8_backward": KernelInfo("Mega MoE backward, FP8 with fp32 weight gradients", SM90),
    "mega_moe_mxfp8": KernelInfo("Mega MoE forward, MXFP8", SM100),
    "mega_moe_mxfp8_backward": KernelInfo("Mega MoE backward, MXFP8", SM100),
    "m_grouped_bf16_gemm_nt_contiguous": KernelInfo("Grouped GEMM over rows, B as [N, K]", SM90, ".gemm"),
    "m_grouped_bf16_gemm_nn_contiguous": KernelInfo("Grouped GEMM over rows, B as [K, N]", SM90, ".gemm"),
    "k_grouped_bf16_gemm_tn_contiguous": KernelInfo("Grouped GEMM over the K dim (wgrad)", SM90, ".gemm"),
}


def status() -> dict[str, str]:
    """Every kernel's name -> "available", or why this machine cannot run it and what would help."""
    return {name: _problem(info) or AVAILABLE for name, info in KERNELS.items()}


def is_available(name: str) -> bool:
    """Whether kernel `name` can run on the current CUDA device. ValueError for an unknown name."""
    return _problem(_info(name)) is None


def load(name: str) -> ModuleType:
    """The module that launches kernel `name`.

    Raises:
        ValueError: there is no kernel of that name.
        RuntimeError: it cannot run here; the message is the reason that `status` gives.
    """
    info = _info(name)
    problem = _problem(info)
    if problem is not None:
        raise RuntimeError(f"kernel {name} is not available: {problem}")
    assert info.module is not None
    return importlib.import_module(info.module, __package__)


def _info(name: str) -> KernelInfo:
    if name not in KERNELS:
        raise ValueError(f"unknown kernel {name!r}; known are {', '.join(KERNELS)}")
    return KERNELS[name]


def _problem(info: KernelInfo) -> str | None:
    """The first thing that keeps a kernel from running here, with its fix; None when nothing does."""
    if info.module is None:
        return f"not in version {__version__}"
    return _device_problem(info) or _compile_problem()


def _device_problem(info: KernelInfo) -> str | None:
    from .jit import driver

    needed = f"needs an SM{info.capability[0]}{info.capability[1]} GPU ({GPU_FAMILIES[info.capability]})"
    try:
        device = _current_device()
        major = driver.device_attribute(device, "COMPUTE_CAPABILITY_MAJOR")
        minor = driver.device_attribute(device, "COMPUTE_CAPABILITY_MINOR")
    except RuntimeError as error:
        return f"{needed}, {NO_DEVICE}: {error}"
    if (major, minor) != info.capability:
        return f"{needed}, and device {device} is SM{major}{minor}"
    return None


def _current_device() -> int:
    """torch's current device, without starting CUDA in a process that has not done so."""
    import torch

    return torch.cuda.current_device() if torch.cuda.is_initialized() else 0


def _compile_problem() -> str | None:
    """What keeps a kernel from being compiled here; ready cubins in the wheel stand in for a compiler."""
    from .jit import ToolchainError, cache, toolchain

    if not MANIFEST.is_file():
        return f"the vendored headers are missing; {VENDOR_FIX}"
    try:
        _, problem = toolchain.inspect_toolchain()
    except ToolchainError as error:
        problem = str(error)
    if problem is not None and any(cache.KernelCache(cache.aot_dir()).entries()):
        return None
    return problem
