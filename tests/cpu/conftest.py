"""These tests run on the CPU, also where there is a GPU. Child processes inherit the setting."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gloo_world import GlooWorld

from prime_kernels import _dropin, runtime
from prime_kernels.runtime import DEVICE_ENV


@pytest.fixture(autouse=True, scope="module")
def _buffers_on_the_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DEVICE_ENV, "cpu")
        yield


@pytest.fixture(autouse=True)
def _process_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test leaves set in this process (a device, a stand-in for deep_gemm) ends with it."""
    for name in ("_device", "_num_sms"):
        monkeypatch.setattr(runtime, name, None)
    monkeypatch.setattr(_dropin, "_adopted", None)


@pytest.fixture(scope="session", params=[1, 2, 4, 8], ids=lambda size: f"{size}ranks")
def world(request: pytest.FixtureRequest) -> Iterator[GlooWorld]:
    """Processes of one gloo group."""
    with GlooWorld(request.param) as result:
        yield result
