"""The patches on vendored headers are needed: without each of them, the compiler shows the fault it mends."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from prime_kernels import vendored_forward
from prime_kernels.jit import CompileError, KernelSource, compiler, find_toolchain, headers
from prime_kernels.models import model_shape

REPO = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.compile


@pytest.fixture(scope="module")
def vendor() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "vendor_deepgemm_for_patches", REPO / "scripts" / "vendor_deepgemm.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def wheel(vendor: ModuleType) -> object:
    """The pinned wheel, which vendoring this checkout needed too."""
    try:
        return vendor.read_wheel()
    except vendor.VendorError as error:
        pytest.skip(f"needs the pinned wheel: {error}")


@pytest.fixture(scope="module")
def kernel() -> KernelSource:
    """DeepGEMM's SM100 BF16 Mega MoE forward, which both patches reach."""
    (source,) = vendored_forward.sm100_bf16(model_shape("qwen3-30b-a3b"), 8)
    return source


def compile_log(
    kernel: KernelSource,
    vendor: ModuleType,
    wheel: object,
    folder: Path,
    leave_out: str,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """What the compiler prints with every patch but those whose name holds `leave_out`."""
    patches = [found for found in vendor.read_patches(vendor.PATCHES) if leave_out not in found.name]
    vendor.write_tree(folder / "_vendor", wheel, patches)
    directories = headers.package_include_dirs()
    own = tuple(path for path in directories if "_vendor" not in path.parts)
    assert len(own) == len(directories) - 1
    monkeypatch.setattr(headers, "package_include_dirs", lambda: (*own, folder / "_vendor" / "include"))
    return compiler.compile_image(kernel, find_toolchain()).log


def test_all_patches_compile_without_a_warning_of_the_assembler(
    kernel: KernelSource, vendor: ModuleType, wheel: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = compile_log(kernel, vendor, wheel, tmp_path, "no such patch", monkeypatch)
    assert "warning" not in log


def test_without_the_offsetof_patch_nvrtc_refuses(
    kernel: KernelSource, vendor: ModuleType, wheel: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CompileError, match="expression must have a constant value") as caught:
        compile_log(kernel, vendor, wheel, tmp_path, "offsetof", monkeypatch)
    assert "offsetof" in caught.value.log


def test_without_the_st_async_patch_the_assembler_warns(
    kernel: KernelSource, vendor: ModuleType, wheel: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = compile_log(kernel, vendor, wheel, tmp_path, "st-async", monkeypatch)
    assert "Vector Type not specified properly" in log
