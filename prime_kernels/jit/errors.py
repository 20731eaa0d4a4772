"""Exceptions and warnings of the kernel compiler."""

from __future__ import annotations


class ToolchainError(RuntimeError):
    """NVRTC, CUDA headers or vendored headers are missing; the message says how to install them."""


class CompileError(RuntimeError):
    """The compiler refused a kernel. ``log`` holds its complete output."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log


class CubinError(RuntimeError):
    """A cubin that cannot be read: not an ELF image of a GPU, or without the kernel that was asked for."""


class CompileWarning(UserWarning):
    """The assembler accepted a kernel but warned, for example that it ignores a ``setmaxnreg``."""


class CacheWarning(UserWarning):
    """The kernel cache cannot be used as configured; kernels are compiled for this process only."""
