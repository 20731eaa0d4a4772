"""What a kernel is, before it is compiled."""

from __future__ import annotations

import re
from dataclasses import dataclass

SUPPORTED_ARCHS = ("sm_90a", "sm_100a")
_NAME = re.compile(r"[A-Za-z0-9_]+")
# Options that would bring in files the cache key does not see.
_INCLUDE_OPTIONS = ("-I", "--include-path", "-include", "--pre-include")


@dataclass(frozen=True)
class KernelSource:
    """One kernel: a CUDA translation unit and which of its functions to keep.

    name: short name for messages and file names (letters, digits, underscores).
    code: the translation unit, usually a few ``#include <prime_kernels/...>`` or ``<deep_gemm/...>``.
    entry: C++ expression that names the one ``__global__`` function (a template instantiation is allowed and
        is instantiated by naming it here).
    arch: ``sm_90a`` or ``sm_100a``.
    options: further NVRTC options, for example ``-DNAME=1``.
    include_dirs: directories searched before those of the package; for kernels that live elsewhere.

    Everything in here is part of the cache key. Numbers that change from call to call (token counts) must
    therefore be kernel arguments and never template parameters or macros.
    """

    name: str
    code: str
    entry: str
    arch: str
    options: tuple[str, ...] = ()
    include_dirs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"kernel name {self.name!r} may hold letters, digits and underscores only")
        for option in self.options:
            if option.startswith(_INCLUDE_OPTIONS):
                raise ValueError(
                    f"option {option!r} of kernel {self.name!r}: use include_dirs for include paths"
                )
        if self.arch not in SUPPORTED_ARCHS:
            raise ValueError(
                f"arch {self.arch!r} of kernel {self.name!r} is not one of {', '.join(SUPPORTED_ARCHS)}"
            )
