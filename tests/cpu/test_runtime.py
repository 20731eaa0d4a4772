"""Process-wide settings, each from code and from the environment."""

from __future__ import annotations

import types

import pytest
import torch

from prime_kernels import _dropin, registry, runtime


@pytest.fixture(autouse=True)
def _fresh_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_pool_capacity_factor", runtime._UNSET)
    for name in ("_backend", "_device", "_num_sms", "_timeout_seconds", "_synchronous_checks"):
        monkeypatch.setattr(runtime, name, None)
    for name in (runtime.BACKEND_ENV, runtime.DEVICE_ENV, runtime.TIMEOUT_ENV):
        monkeypatch.delenv(name, raising=False)
    # The SM limit is passed on to a deep_gemm in use, which may be a stand-in of another test.
    monkeypatch.setattr(_dropin, "_adopted", None)


def test_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runtime.get_backend() == "auto"
    monkeypatch.setenv(runtime.BACKEND_ENV, "sm90")
    assert runtime.get_backend() == "sm90"
    runtime.set_backend("reference")
    assert runtime.get_backend() == "reference"


def test_unknown_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match="set_backend: unknown backend 'cuda'; use one of auto, reference, sm90"
    ):
        runtime.set_backend("cuda")
    monkeypatch.setenv(runtime.BACKEND_ENV, "hip")
    with pytest.raises(ValueError, match=r"\$PRIME_KERNELS_BACKEND: unknown backend 'hip'"):
        runtime.get_backend()


def test_num_sms() -> None:
    if not torch.cuda.is_available():
        assert runtime.get_num_sms() == 0
    runtime.set_num_sms(100)
    assert runtime.get_num_sms() == 100
    for bad in (0, -1, 1.5, True, "8"):
        with pytest.raises(ValueError, match="needs an integer of at least 1"):
            runtime.set_num_sms(bad)


def test_pool_capacity_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runtime.get_pool_capacity_factor() is None
    monkeypatch.setenv(runtime.POOL_CAPACITY_ENV, "1.25")
    assert runtime.get_pool_capacity_factor() == 1.25
    runtime.set_pool_capacity_factor(None)  # a choice, which the variable does not override
    assert runtime.get_pool_capacity_factor() is None
    runtime.set_pool_capacity_factor(2)
    assert runtime.get_pool_capacity_factor() == 2.0
    for bad in (0, -1.0, float("nan"), float("inf"), "much"):
        with pytest.raises(ValueError, match=r"set_pool_capacity_factor: got .* a finite number above 0"):
            runtime.set_pool_capacity_factor(bad)
    runtime._pool_capacity_factor = runtime._UNSET
    monkeypatch.setenv(runtime.POOL_CAPACITY_ENV, "all")
    with pytest.raises(ValueError, match=r"\$PRIME_KERNELS_POOL_CAPACITY_FACTOR: got 'all'"):
        runtime.get_pool_capacity_factor()


def test_synchronous_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not runtime.get_synchronous_checks()
    monkeypatch.setenv(runtime.SYNCHRONOUS_ENV, "1")
    assert runtime.get_synchronous_checks()
    runtime.set_synchronous_checks(False)
    assert not runtime.get_synchronous_checks()
    for bad in ("0", 1, None):
        with pytest.raises(ValueError, match=r"set_synchronous_checks: got .*, needs True or False"):
            runtime.set_synchronous_checks(bad)
    runtime._synchronous_checks = None
    monkeypatch.setenv(runtime.SYNCHRONOUS_ENV, "yes")
    with pytest.raises(ValueError, match=r"\$PRIME_KERNELS_SYNCHRONOUS_CHECKS: got 'yes', needs 0 or 1"):
        runtime.get_synchronous_checks()


def test_device_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    for bad in ("grass", "", object()):
        with pytest.raises(ValueError, match=r"set_device: got .*, needs a device such as 'cpu' or 'cuda:0'"):
            runtime.set_device(bad)
    assert runtime.get_device() is None
    monkeypatch.setenv(runtime.DEVICE_ENV, "grass")
    with pytest.raises(ValueError, match=r"\$PRIME_KERNELS_DEVICE: got 'grass', needs a device"):
        runtime.get_device()


def test_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runtime.get_timeout_seconds() == runtime.DEFAULT_TIMEOUT_SECONDS
    monkeypatch.setenv(runtime.TIMEOUT_ENV, "12.5")
    assert runtime.get_timeout_seconds() == 12.5
    runtime.set_timeout_seconds(3)
    assert runtime.get_timeout_seconds() == 3.0
    for bad in (0, -1, float("inf"), float("nan"), 1e30, "soon", None):
        with pytest.raises(ValueError, match="needs a finite number of seconds above 0 and at most 1e"):
            runtime.set_timeout_seconds(bad)


CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_cpu_runs_the_reference_and_nothing_else() -> None:
    assert runtime.resolve_backend(CPU, "bf16xbf16") == "reference"
    runtime.set_backend("sm90")
    with pytest.raises(
        RuntimeError, match='backend "sm90" needs an SM90 GPU and this buffer is on the CPU; use set'
    ):
        runtime.resolve_backend(CPU, "bf16xbf16")


def test_gpu_needs_the_right_sm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(
        RuntimeError, match=r"needs an SM90 GPU \(Hopper\), cuda:0 is SM80; set_backend\(.reference"
    ):
        runtime.resolve_backend(GPU, "bf16xbf16")
    runtime.set_backend("reference")
    assert runtime.resolve_backend(GPU, "bf16xbf16") == "reference"


def test_gpu_has_no_kernel_for_reference_types() -> None:
    with pytest.raises(
        RuntimeError, match="'f64xf64' has no GPU kernel, only the reference runs it; set_backend"
    ):
        runtime.resolve_backend(GPU, "f64xf64")


def test_unavailable_kernel_gives_the_registry_s_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(registry, "is_available", lambda name: False)
    monkeypatch.setattr(registry, "status", lambda: {"mega_moe_bf16": "the driver is too old"})
    with pytest.raises(
        RuntimeError, match="kernel mega_moe_bf16 is not available here: the driver is too old; set_"
    ):
        runtime.resolve_backend(GPU, "bf16xbf16")
    monkeypatch.setattr(registry, "is_available", lambda name: name == "mega_moe_bf16")
    assert runtime.resolve_backend(GPU, "bf16xbf16") == "sm90"


def test_a_deep_gemm_without_an_sm_limit_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dropin, "_adopted", types.ModuleType("deep_gemm"))
    monkeypatch.setattr(runtime, "_num_sms", None)
    runtime.set_num_sms(64)
    assert runtime.get_num_sms() == 64
