"""CI has TorchTitan, and what stands in for its Triton kernels is never used unseen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torchtitan_library as library

TESTS = Path(library.__file__).parent

# As on a machine without Triton, wherever this runs.
WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torchtitan_library as library
assert library.why_missing() is None, library.why_missing()

import torch.utils._triton
from torchtitan.distributed.minimal_async_ep import api
assert not torch.utils._triton.has_triton_package()
kernels = sys.modules[library.KERNELS]
assert kernels.__doc__.startswith("Stands in")
for name in library.KERNEL_NAMES:
    assert getattr(api, name) is getattr(kernels, name)
    try:
        getattr(api, name)(1, grid=2)
    except RuntimeError as error:
        assert str(error).startswith(f"{name} needs Triton"), error
    else:
        raise AssertionError(f"{name} returned")
"""


def test_torchtitan_is_installed() -> None:
    """Without it all its tests are skipped; in CI that would hide a broken set-up, and this one fails."""
    reason = library.why_missing()
    if reason is not None and (sys.version_info < library.PYTHON_MINIMUM or not os.environ.get("CI")):
        pytest.skip(reason)
    assert reason is None, reason


def test_kernels_raise_where_there_is_no_triton() -> None:
    reason = library.why_missing()
    if reason is not None:
        pytest.skip(reason)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON], cwd=TESTS, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_triton_that_is_there_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "has_triton", lambda: True)
    monkeypatch.delitem(sys.modules, library.KERNELS, raising=False)
    library.stand_in_for_kernels()
    assert library.KERNELS not in sys.modules


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "PYTHON_MINIMUM", (3, 10))
    monkeypatch.setattr(library, "MOE", "torchtitan_that_is_not_there")
    reason = library.why_missing()
    assert reason is not None
    assert "No module named 'torchtitan_that_is_not_there'" in reason
    assert reason.endswith("pip install --no-deps -r tests/requirements-torchtitan.txt")
    monkeypatch.setattr(library, "PYTHON_MINIMUM", (99, 1))
    assert library.why_missing() == "TorchTitan needs Python 99.1"
