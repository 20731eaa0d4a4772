"""`doctor`: names what is there and what is missing, with the command that fixes it."""

from __future__ import annotations

import os
import re

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


SETTINGS = {
    "BACKEND": ("reference", "hip", "unknown backend 'hip'; use one of auto, reference, sm90"),
    "DEVICE": ("cuda:1", "grass", "got 'grass', needs a device such as 'cpu' or 'cuda:0'"),
    "TIMEOUT_SECONDS": ("0.5", "-1", "got '-1', needs a finite number of seconds above 0 and at most 1e+09"),
    "POOL_CAPACITY_FACTOR": (
        "1.25", "all", "got 'all', needs a finite number above 0 (times the rows of even routing)"
    ),
    "SYNCHRONOUS_CHECKS": ("1", "yes", "got 'yes', needs 0 or 1"),
    "DEEPGEMM_WHEEL": (__file__, "/no/such/wheel", "got '/no/such/wheel', needs the path of a file"),
}  # fmt: skip


def environment_rows(monkeypatch, values):
    for name in [name for name in os.environ if name.startswith(doctor.ENVIRONMENT_PREFIX)]:
        monkeypatch.delenv(name)
    for name, value in values.items():
        monkeypatch.setenv(doctor.ENVIRONMENT_PREFIX + name, value)
    return doctor._environment_rows()


def test_settings_that_are_allowed_are_listed(monkeypatch):
    good = {name: values[0] for name, values in SETTINGS.items()}
    expected = {doctor.ENVIRONMENT_PREFIX + name: repr(value) for name, value in good.items()}
    rows = environment_rows(monkeypatch, good)
    assert {row.name: row.detail for row in rows} == expected
    assert {(row.state, row.fix) for row in rows} == {(doctor.OK, "")}
    assert [row.state for row in environment_rows(monkeypatch, dict.fromkeys(SETTINGS, ""))] == (
        [doctor.OK] * len(SETTINGS)
    )  # an empty variable counts as unset


def test_settings_that_are_not_allowed_are_found(monkeypatch, capsys):
    rows = environment_rows(monkeypatch, {name: values[1] for name, values in SETTINGS.items()})
    assert {row.name.removeprefix(doctor.ENVIRONMENT_PREFIX): row.detail for row in rows} == {
        name: values[2] for name, values in SETTINGS.items()
    }
    assert {row.state for row in rows} == {doctor.WRONG}
    assert cli.main(["doctor"]) == doctor.EXIT_MISSING
    printed = capsys.readouterr().out
    assert printed.count("fix: set another value or none\n") == len(SETTINGS)
    assert printed.endswith(f"{len(SETTINGS)} problems found\n")


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("TIMEOUT", "unset it, or did you mean PRIME_KERNELS_TIMEOUT_SECONDS?"),
        ("SYNCHRONOUS_CHECK", "unset it, or did you mean PRIME_KERNELS_SYNCHRONOUS_CHECKS?"),
        ("QUUX", "unset it; there are PRIME_KERNELS_BACKEND, "),
    ],
)
def test_names_that_set_nothing_are_found(monkeypatch, name, fix):
    (row,) = environment_rows(monkeypatch, {name: "7"})
    assert (row.name, row.state) == (doctor.ENVIRONMENT_PREFIX + name, doctor.WRONG)
    assert row.detail == "'7': this version has no setting of that name"
    assert row.fix.startswith(fix)


def test_every_setting_is_known_to_doctor_and_to_the_page():
    sources = [*(REPOSITORY / "prime_kernels").rglob("*.py"), *(REPOSITORY / "scripts").glob("*.py")]
    code = {
        name
        for path in sources
        for name in re.findall(r'"(PRIME_KERNELS_[A-Z_]*[A-Z])"', path.read_text(encoding="utf-8"))
    }
    page = (REPOSITORY / "docs" / "settings.md").read_text(encoding="utf-8")
    assert code == set(re.findall(r" \| `(PRIME_KERNELS_\w+)` \| ", page))
    assert code == set(doctor._environment_readers())


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
