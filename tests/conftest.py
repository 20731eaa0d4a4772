"""What a machine must have for the marked tests: a GPU for `gpu`, NVRTC with its headers for `compile`.

Without it these tests are skipped with the reason, except where that would hide a broken set-up: with the
variable CI set, `compile` tests run (and fail) whatever is missing. GPU runners set REQUIRE_GPU=1 for the
same effect on `gpu`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from prime_kernels.jit.toolchain import inspect_toolchain

CI = "CI"
REQUIRE_GPU = "REQUIRE_GPU"


def why_no_gpu() -> str | None:
    """The reason to skip GPU tests here, or None."""
    if torch.cuda.is_available():
        return None
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU"
    return f"needs a GPU: torch {torch.__version__} ({build}) finds none; `pytest -m gpu tests/gpu` runs them"


def why_no_compiler() -> str | None:
    """The reason to skip compile tests here, or None."""
    toolchain, problem = inspect_toolchain()
    return None if toolchain is not None else f"needs NVRTC: {problem}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run."""
    checks = {"gpu": (REQUIRE_GPU, why_no_gpu), "compile": (CI, why_no_compiler)}
    for marker, (required, why_not) in checks.items():
        marked = [item for item in items if item.get_closest_marker(marker) is not None]
        reason = why_not() if marked and not os.environ.get(required) else None
        if reason is not None:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def no_shared_buffers() -> Iterator[None]:
    """Layers of the test find no buffer of another test, and leave none."""
    from prime_kernels.module import release_buffers

    release_buffers()
    yield
    release_buffers()
