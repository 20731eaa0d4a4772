"""Fixtures of several files, and settings that CUDA reads once, before anything of it starts.

Virtual ranks need both settings: their kernels wait for each other on streams of their own. A module that
loads lazily would wait for the kernels that are running, and streams that share a hardware queue would run
one after the other.
"""

from __future__ import annotations

import os

import pytest

from prime_kernels import runtime

os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


@pytest.fixture(scope="session")
def sm90_kernels() -> None:
    """The kernels of the shapes in sm90_cases.py are compiled, several at once."""
    from sm90_cases import compile_all

    compile_all()


@pytest.fixture
def settings_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test sets for the process is undone."""
    for name in ("_backend", "_num_sms", "_timeout_seconds", "_pool_capacity_factor", "_synchronous_checks"):
        monkeypatch.setattr(runtime, name, getattr(runtime, name))
