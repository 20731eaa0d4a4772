"""The wheel: what is in it, that it is reproducible, and that it works without the rest of the repository."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
BUILD = REPO / "scripts" / "build_wheel.sh"
SMOKE_SECONDS = 300


def build(output: Path, *arguments: str) -> list[Path]:
    """Build with the build requirements of this environment: faster, and it needs no network."""
    environment = {**os.environ, "PYTHON": sys.executable, "PIP_NO_BUILD_ISOLATION": "0"}
    result = subprocess.run(
        [BUILD, "--output", output, *arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
    wheels = sorted(output.glob("*.whl"))
    told = [line for line in result.stdout.splitlines() if line.startswith("wheel: ")]
    assert sorted(told) == sorted(
        f"wheel: {path} ({path.stat().st_size} bytes)" for path in wheels
    )
    return wheels


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The package's wheel and the shim's."""
    return build(tmp_path_factory.mktemp("dist"), "--shim")


@pytest.fixture(scope="module")
def installed(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with both wheels; it sees this environment's other packages."""
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", python]
    subprocess.run([*command, "install", "--no-deps", "--no-index", *wheels], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    # A line in a .pth file adds a folder to the path, but not what that folder's own .pth files name: an
    # editable install of this repository stays out.
    packages = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    (site / "packages_of_the_test_environment.pth").write_text("\n".join(packages) + "\n")
    return python


def run(python: Path, *arguments: str, cwd: Path, timeout: float = 120) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment["OMP_NUM_THREADS"] = "1"
    result = subprocess.run(
        [python, *arguments],
        capture_output=True, text=True, cwd=cwd, env=environment, timeout=timeout, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_one_wheel_for_every_platform(wheels: list[Path]) -> None:
    assert [path.name.partition("-0.")[0] for path in wheels] == ["prime_kernels", "prime_kernels_deep_gemm"]
    for path in wheels:
        assert path.name.endswith("-py3-none-any.whl")
        with zipfile.ZipFile(path) as wheel:
            names = wheel.namelist()
        assert not [name for name in names if name.endswith((".so", ".pyc", ".cubin"))]


def test_wheel_holds_the_package_its_headers_and_the_licences(wheels: list[Path]) -> None:
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = set(wheel.namelist())
        manifest = json.loads(wheel.read("prime_kernels/_vendor/manifest.json"))
        for name, digest in manifest["files"].items():
            assert hashlib.sha256(wheel.read(f"prime_kernels/_vendor/{name}")).hexdigest() == digest
        notices = wheel.read("prime_kernels/_vendor/licenses/THIRD_PARTY_NOTICES.txt").decode()
        licence = wheel.read("prime_kernels/_vendor/licenses/LICENSE.deepgemm").decode()
    sources = [*(REPO / "prime_kernels").rglob("*.py"), *(REPO / "prime_kernels" / "include").rglob("*")]
    files = {path.relative_to(REPO).as_posix() for path in sources if path.is_file()}
    assert len(files) > 30
    assert files <= names
    assert "prime_kernels/py.typed" in names
    assert "SPDX-License-Identifier: BSD-3-Clause" in notices
    assert "Apache License" in licence
    # Nothing outside the package but its metadata, and no trace of how it was built.
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"prime_kernels"}
    assert not [name for name in names if "/._" in name or "__pycache__" in name or "/_aot/" in name]


def test_metadata(wheels: list[Path]) -> None:
    def metadata(path: Path) -> dict[str, list[str]]:
        with zipfile.ZipFile(path) as wheel:
            name = next(entry for entry in wheel.namelist() if entry.endswith(".dist-info/METADATA"))
            message = Parser().parsestr(wheel.read(name).decode())
        return {key: message.get_all(key) or [] for key in message}

    package, shim = (metadata(path) for path in wheels)
    core = [requirement for requirement in package["Requires-Dist"] if "extra ==" not in requirement]
    assert sorted(requirement.partition(">")[0].partition("<")[0] for requirement in core) == [
        "cuda-python", "filelock", "packaging", "torch",
    ]  # fmt: skip
    assert set(package["Provides-Extra"]) >= {"cli", "cu12", "cu13", "test"}
    assert package["Requires-Python"] == [">=3.10"]
    assert package["License-Expression"] == ["Apache-2.0 AND BSD-3-Clause"]
    assert shim["Requires-Dist"] == [f"prime-kernels=={package['Version'][0]}"]


def test_the_same_sources_give_the_same_bytes(wheels: list[Path], tmp_path: Path) -> None:
    again = build(tmp_path, "--shim")
    assert [path.name for path in again] == [path.name for path in wheels]
    for first, second in zip(wheels, again, strict=True):
        assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--aot", "qwen3-30b-a3b"], "--aot takes MODEL:EP:PRECISION:ARCH"),
        (["--aot"], "--aot takes MODEL:EP:PRECISION:ARCH"),
        (["--output"], "--output takes a folder"),
        (["--wheel"], "unknown argument '--wheel'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], said: str) -> None:
    result = subprocess.run([BUILD, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert said in result.stderr


USE_BOTH_WHEELS = """
import json, sys
import prime_kernels, deep_gemm
import torch
buffer = deep_gemm.get_symm_buffer_for_mega_moe(None, 4, 8, 2, 256, 128, mma_type="bf16xbf16")
x = torch.randn(3, 256).bfloat16().requires_grad_()
indices, scores = torch.tensor([[0, 1], [2, -1], [3, 3]]), torch.rand(3, 2)
gate_up, down = torch.randn(4, 256, 256).bfloat16(), torch.randn(4, 256, 128).bfloat16()
prime_kernels.mega_moe(x, indices, scores, gate_up, down, buffer=buffer).float().sum().backward()
print(json.dumps({
    "places": [prime_kernels.__file__, deep_gemm.__file__],
    "path": sys.path,
    "grad": bool(x.grad.abs().sum() > 0),
    "status": prime_kernels.status(),
    "shim": deep_gemm.mega_moe is prime_kernels.mega_moe,
}))
"""


def test_installed_wheel_works_alone(installed: Path, tmp_path: Path) -> None:
    out = json.loads(run(installed, "-c", USE_BOTH_WHEELS, cwd=tmp_path).splitlines()[-1])
    assert all(place.startswith(str(installed.parent.parent)) for place in out["places"])
    assert not [
        entry for entry in out["path"] if entry and Path(entry).is_relative_to(REPO / "prime_kernels")
    ]
    assert str(REPO) not in out["path"]
    assert out["grad"] is True
    assert out["shim"] is True
    assert "m_grouped_bf16_gemm_nt_contiguous" in out["status"]


def test_parity_smoke_from_the_installed_wheel(installed: Path, tmp_path: Path) -> None:
    said = run(installed, "-m", "prime_kernels", "parity", "--smoke", cwd=tmp_path, timeout=SMOKE_SECONDS)
    assert re.search(r"parity: [1-9]\d* passed, 0 failed", said)


TAKE_FROM_WHEEL = """
import sys
sys.path.insert(0, {site!r})
from prime_kernels import jit, warmup

def refuse(*arguments):
    raise AssertionError("compiled although the wheel has the cubin")

jit.cache.compile_uncached = jit.cache.find_toolchain = refuse
for source in warmup.kernel_sources(*{target!r}):
    print(jit.compile_kernel(source).path)
"""


@pytest.mark.compile
@pytest.mark.slow
def test_ready_cubins_travel_in_the_wheel_and_are_found_first(tmp_path: Path) -> None:
    target = ("qwen3-30b-a3b", 8, "bf16", "sm_90a")
    (wheel,) = build(tmp_path / "dist", "--aot", ":".join(map(str, target)))
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    shipped = sorted(str(path) for path in (site / "prime_kernels" / "_aot").glob("*.cubin"))
    assert shipped
    environment = {**os.environ, "PRIME_KERNELS_CACHE_DIR": str(tmp_path / "empty")}
    result = subprocess.run(
        [sys.executable, "-c", TAKE_FROM_WHEEL.format(site=str(site), target=target)],
        capture_output=True, text=True, cwd=tmp_path, env=environment, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.split()) == shipped
    assert not (tmp_path / "empty").exists()
    assert not (REPO / "prime_kernels" / "_aot").exists()
