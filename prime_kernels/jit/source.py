"""What a kernel is, before it is compiled."""

from __future__ import annotations

from dataclasses import dataclass

SUPPORTED_ARCHS = ("sm_90a", "sm_100a")


@dataclass(frozen=True)
class KernelSource:
    """One kernel: a CUDA translation unit and which of its functions to keep.

    name: short name for messages and file names.
    code: the translation unit, usually ``#include <prime_kernels/...>`` or ``#include <deep_gemm/...>`` lines.
    entry: C++ expression that names the one ``__global__`` function (a template instantiation is allowed and is
        instantiated by naming it here).
    arch: ``sm_90a`` or ``sm_100a``.
    options: further NVRTC options, for example ``-DNAME=1``.

    Everything in here is part of the cache key. Numbers that change from call to call (token counts) must therefore be
    kernel arguments and never template parameters or macros.
    """

    name: str
    code: str
    entry: str
    arch: str
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.arch not in SUPPORTED_ARCHS:
            raise ValueError(f"arch {self.arch!r} of kernel {self.name!r} is not one of {', '.join(SUPPORTED_ARCHS)}")
