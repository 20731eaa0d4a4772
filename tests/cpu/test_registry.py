"""status(), is_available() and load(): every reason that keeps a kernel from running is the true one."""

from __future__ import annotations

from pathlib import Path

import pytest

from prime_kernels import _version, is_available, load, registry, status
from prime_kernels.jit import driver, toolchain
from prime_kernels.jit.cache import KernelCache

GEMM = "m_grouped_bf16_gemm_nt_contiguous"
NO_COMPILER = "kernels cannot be compiled here, missing: NVRTC. Install with: pip install x"


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine whose current device is an SM90 GPU and that can compile."""
    capability = {"COMPUTE_CAPABILITY_MAJOR": 9, "COMPUTE_CAPABILITY_MINOR": 0}
    monkeypatch.setattr(driver, "device_attribute", lambda device, name: capability[name])
    monkeypatch.setattr(toolchain, "inspect_toolchain", lambda: (object(), None))
    return monkeypatch


def test_status_names_every_kernel_with_available_or_a_reason() -> None:
    found = status()
    assert list(found) == list(registry.KERNELS)
    assert {"mega_moe_bf16", "mega_moe_bf16_backward", "mega_moe_fp8", "mega_moe_mxfp8", GEMM} <= found.keys()
    for name, text in found.items():
        assert is_available(name) == (text == "available")
        if text != "available":
            with pytest.raises(RuntimeError) as caught:
                load(name)
            assert str(caught.value) == f"kernel {name} is not available: {text}"


def test_kernels_that_are_available_load(hopper: pytest.MonkeyPatch) -> None:
    found = status()
    assert found[GEMM] == "available"
    for name, text in found.items():
        if text == "available":
            module = load(name)
            assert module.__name__.startswith("prime_kernels.")
    assert callable(load(GEMM).m_grouped_bf16_gemm_nt_contiguous)


def test_a_kernel_that_is_not_written_says_so(hopper: pytest.MonkeyPatch) -> None:
    hopper.setitem(registry.KERNELS, "future", registry.KernelInfo("later", registry.SM90))
    assert status()["future"] == f"not in version {_version.__version__}"


def test_another_gpu_is_named(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(driver, "device_attribute", lambda device, name: 10 if name.endswith("MAJOR") else 3)
    assert status()[GEMM] == "needs an SM90 GPU (Hopper), and device 0 is SM103"


def test_a_machine_without_a_gpu_is_told_what_is_needed(hopper: pytest.MonkeyPatch) -> None:
    def fail(device: int, name: str) -> int:
        raise RuntimeError("no driver here")

    hopper.setattr(driver, "device_attribute", fail)
    assert status()[GEMM] == (
        "needs an SM90 GPU (Hopper), and there is no usable CUDA device: no driver here"
    )


def test_a_missing_compiler_comes_with_its_pip_line(hopper: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hopper.setattr(toolchain, "inspect_toolchain", lambda: (None, NO_COMPILER))
    hopper.setattr("prime_kernels.jit.cache.aot_dir", lambda: tmp_path)
    assert status()[GEMM] == NO_COMPILER


def test_ready_cubins_stand_in_for_a_compiler(hopper: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hopper.setattr(toolchain, "inspect_toolchain", lambda: (None, NO_COMPILER))
    hopper.setattr("prime_kernels.jit.cache.aot_dir", lambda: tmp_path)
    for path in KernelCache(tmp_path).paths("some_kernel", "key"):
        path.write_bytes(b"")
    assert is_available(GEMM)


def test_missing_headers_come_with_their_script(hopper: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hopper.setattr(registry, "MANIFEST", tmp_path / "manifest.json")
    assert "scripts/vendor_deepgemm.py" in status()[GEMM]


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    for function in (is_available, load):
        with pytest.raises(ValueError, match=f"unknown kernel 'mega_moe'; known are .*{GEMM}"):
            function("mega_moe")
