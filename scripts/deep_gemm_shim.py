"""`deep_gemm`, for images that have no other: every name and module is that of prime_kernels.

`build_wheel.sh --shim` packs this file as `deep_gemm/__init__.py`.
"""

from __future__ import annotations

import importlib
import sys

# Set before prime_kernels is imported: it must never look here for the names it does not have.
__prime_kernels_shim__ = True

import prime_kernels
from prime_kernels._dropin import AliasFinder

__version__ = prime_kernels.__version__
__all__ = list(prime_kernels.__all__)

# Only names below `deep_gemm.` are answered, and whether prime_kernels has such a module, its import says.
sys.meta_path.insert(
    0,
    AliasFinder(__name__, lambda _: True, lambda module: importlib.import_module(f"prime_kernels.{module}")),
)


def __getattr__(name: str) -> object:
    try:
        return getattr(prime_kernels, name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return dir(prime_kernels)
