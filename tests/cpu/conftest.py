"""These tests run on the CPU, also where there is a GPU. Child processes inherit the setting."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gloo_world import GlooWorld

from prime_kernels.runtime import DEVICE_ENV


@pytest.fixture(autouse=True, scope="module")
def _buffers_on_the_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DEVICE_ENV, "cpu")
        yield


@pytest.fixture(scope="session", params=[1, 2, 4, 8], ids=lambda size: f"{size}ranks")
def world(request: pytest.FixtureRequest) -> Iterator[GlooWorld]:
    """Processes of one gloo group."""
    with GlooWorld(request.param) as result:
        yield result
