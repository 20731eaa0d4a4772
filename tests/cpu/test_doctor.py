"""`doctor`: names what is there and what is missing, with the command that fixes it."""

from __future__ import annotations

import pytest
from jit_helpers import REPOSITORY, run_python, site_packages_without

from prime_kernels import cli, doctor
from prime_kernels.jit import CACHE_DIR_VARIABLE, KernelCache, cache, compile_kernel, toolchain
from prime_kernels.registry import KERNELS


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path / "cache"))


def rows_by_name() -> dict[str, doctor.Row]:
    return {row.name: row for row in doctor.diagnose()[0]}


@pytest.mark.compile
def test_a_complete_machine(capsys):
    rows, code = doctor.diagnose()
    states = {row.name: row.state for row in rows}
    for name in ("python", "torch", "cuda-python", "NVRTC", "cccl headers", "runtime headers", "crt headers"):
        assert states[name] == doctor.OK, name
    assert states["compile"] == states["kernel cache"] == states["vendored headers"] == doctor.OK
    assert KERNELS.keys() <= states.keys()
    assert code == doctor.EXIT_OK
    assert cli.main(["doctor"]) == doctor.EXIT_OK
    printed = capsys.readouterr().out
    assert all(row.name in printed for row in rows)
    assert printed.endswith("everything needed is there\n")


def test_missing_compiler_and_headers(monkeypatch, capsys):
    monkeypatch.setattr(toolchain, "bindings_major", lambda: 13)
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: None)
    monkeypatch.setattr(toolchain, "header_candidates", lambda component, major: [])
    monkeypatch.setattr(cache, "aot_dir", lambda: toolchain.package_root() / "none")
    assert cli.main(["doctor"]) == doctor.EXIT_MISSING
    printed = capsys.readouterr().out
    packages = [f"'nvidia-cuda-{name}==13.*'" for name in ("nvrtc", "cccl", "runtime", "crt")]
    for package in packages:
        assert f"fix: pip install {package}\n" in printed
    assert f"all of them at once: pip install {' '.join(packages)}\n" in printed


def test_shipped_cubins_make_the_compiler_optional(monkeypatch, tmp_path):
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: None)
    monkeypatch.setattr(KernelCache, "entries", lambda self: [tmp_path] if self.directory == tmp_path else [])
    monkeypatch.setattr(cache, "aot_dir", lambda: tmp_path)
    rows = rows_by_name()
    assert rows["NVRTC"].state == doctor.NOTE
    assert rows[doctor.SHIPPED].state == doctor.OK
    assert doctor.diagnose()[1] == doctor.EXIT_OK


def test_vendored_headers_that_are_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "MANIFEST", tmp_path / "manifest.json")
    row = rows_by_name()["vendored headers"]
    assert row.state == doctor.MISSING
    assert "scripts/vendor_deepgemm.py" in row.fix


def test_cache_directory_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path / "file"))
    row = rows_by_name()["kernel cache"]
    assert row.state == doctor.MISSING
    assert CACHE_DIR_VARIABLE in row.fix
    assert doctor.diagnose()[1] == doctor.EXIT_MISSING


@pytest.mark.compile
def test_cache_contents_are_counted(tmp_path):
    from jit_helpers import tiny_source

    compile_kernel(tiny_source(1), cache_dir=tmp_path / "cache")
    compile_kernel(tiny_source(2), cache_dir=tmp_path / "cache")
    assert "2 kernels" in rows_by_name()["kernel cache"].detail


def test_compiler_that_fails_is_shown(monkeypatch):
    if toolchain.inspect_toolchain()[0] is None:
        pytest.skip("needs NVRTC")
    monkeypatch.setattr(doctor, "PROBE_CODE", "#error headers of two versions\n")
    row = rows_by_name()["compile"]
    assert row.state == doctor.MISSING
    assert "headers of two versions" in row.detail
    assert "one and the same version" in row.fix


def test_driver_older_than_the_compiler(monkeypatch):
    from prime_kernels.jit import driver

    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(driver, "driver", lambda: None)
    monkeypatch.setattr(driver, "driver_version", lambda: (12, 8))
    (row,) = doctor._driver_fits_row()
    assert row.state == doctor.MISSING
    assert "NVRTC 13.0 is newer than the driver (CUDA 12.8)" in row.detail
    packages = ("nvrtc", "cccl", "runtime", "nvcc")
    words = " ".join(f"'nvidia-cuda-{package}-cu12==12.*'" for package in packages)
    assert row.fix == f"update the driver, or: pip install {words} 'cuda-python>=12.9,<13'"
    monkeypatch.setattr(driver, "driver_version", lambda: (13, 0))
    assert doctor._driver_fits_row() == []


def test_a_missing_driver_is_explained_once(monkeypatch, capsys):
    from prime_kernels.jit import driver

    def missing():
        raise RuntimeError("no driver, planted")

    monkeypatch.setattr(driver, "driver", missing)
    cli.main(["doctor"])
    printed = capsys.readouterr().out
    assert printed.count("no driver, planted") == 1
    assert printed.count("needs an SM90 GPU (Hopper), and there is no GPU\n") > 1


@pytest.mark.parametrize(
    ("left_out", "fix"), [("torch", "pip install 'torch>=2.9'"), ("cuda", "pip install 'cuda-")]
)
def test_process_without_a_required_package(tmp_path, left_out, fix):
    packages = site_packages_without(tmp_path / "packages", left_out)
    code = "from prime_kernels import cli\nprint(cli.main(['doctor']))"
    output, _ = run_python(code, site=False, environment={"PYTHONPATH": f"{REPOSITORY}:{packages}"})
    assert f"fix: {fix}" in output
    assert output.splitlines()[-1] == str(doctor.EXIT_MISSING)
