"""TorchTitan for the tests, also where Triton is not installed.

Its MoE modules import Triton (1 GB) in one place: the kernels of a token dispatcher for GPUs, which no test
uses. Without Triton a stand-in takes the place of that module; its functions raise when they are called.

Nothing stands in for Triton itself: torch looks for it while it is imported, and remembers what it found.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

# What tests/requirements-torchtitan.txt installs and the MoE modules import.
PACKAGES = ("torchtitan", "spmd_types", "tyro", "docstring_parser")
PYTHON_MINIMUM = (3, 11)
INSTALL = "pip install --no-deps -r tests/requirements-torchtitan.txt"

MOE = "torchtitan.models.common.moe"
KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"
KERNEL_NAMES = (
    "copy_full_counts_to_peers_kernel",
    "copy_rows_to_peers_kernel",
    "expand_topk_grad_kernel",
    "fill_combine_metadata_kernel",
    "fill_dispatch_metadata_kernel",
    "invert_flat_indices_kernel",
    "reduce_topk_slots_kernel",
    "topk_scores_grad_kernel",
)


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def stand_in_for_kernels() -> None:
    """Let the MoE modules be imported without Triton. Does nothing where it is installed."""
    if has_triton() or KERNELS in sys.modules:
        return
    module = ModuleType(KERNELS, "Stands in for Triton kernels, which need Triton.")
    for name in KERNEL_NAMES:
        setattr(module, name, _kernel_that_raises(name))
    sys.modules[KERNELS] = module


def _kernel_that_raises(name: str) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{name} needs Triton, which is not installed; the tests have a stand-in for it")

    return kernel


def why_missing() -> str | None:
    """Why TorchTitan's MoE modules cannot be imported here, or None."""
    if sys.version_info < PYTHON_MINIMUM:
        return f"TorchTitan needs Python {'.'.join(map(str, PYTHON_MINIMUM))}"
    stand_in_for_kernels()
    try:
        importlib.import_module(MOE)
    except ImportError as error:
        return f"needs TorchTitan, which cannot be imported ({error}); {INSTALL}"
    return None
