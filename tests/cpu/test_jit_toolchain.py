"""Finding the compiler: missing parts, stray environment variables, and an import that touches nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from jit_helpers import REPOSITORY, TINY_IN_CHILD, run_python, site_packages_without, tiny_source

from prime_kernels import warmup
from prime_kernels.jit import cache, compile_kernel, find_toolchain, keys, toolchain
from prime_kernels.jit.toolchain import HEADER_COMPONENTS, HeaderComponent

CCCL, RUNTIME, CRT = HEADER_COMPONENTS

REPORT = """
from prime_kernels.jit import ToolchainError, find_toolchain
try:
    print("found", find_toolchain().nvrtc_version)
except ToolchainError as error:
    print(error)
"""


def install(root: Path, component: HeaderComponent, *, below: str, cuda: str | None = None) -> Path:
    """`root`/`below` made to look as if it held `component`, with a cuda.h of version `cuda`."""
    directory = root / below
    probe = directory / component.probe
    probe.parent.mkdir(parents=True, exist_ok=True)
    probe.write_text("")
    if cuda is not None:
        major, minor = cuda.split(".")
        (directory / "cuda.h").write_text(f"#define CUDA_VERSION {int(major) * 1000 + int(minor) * 10}\n")
    return directory


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(toolchain, "_pip_nvidia_dirs", list)
    monkeypatch.setattr(toolchain, "toolkit_roots", list)
    monkeypatch.setattr(toolchain, "bindings_major", lambda: 13)
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: None)
    return monkeypatch


def test_one_message_names_every_missing_package(nothing_installed):
    found, problem = toolchain.inspect_toolchain()
    assert found is None
    assert problem is not None
    assert "\n" not in problem
    assert problem.endswith(
        "pip install 'nvidia-cuda-nvrtc==13.*' 'nvidia-cuda-cccl==13.*' 'nvidia-cuda-runtime==13.*' "
        "'nvidia-cuda-crt==13.*'"
    )


def test_message_for_cuda_12_names_its_packages(nothing_installed):
    nothing_installed.setattr(toolchain, "bindings_major", lambda: 12)
    _, problem = toolchain.inspect_toolchain()
    assert problem is not None
    for package in ("nvrtc", "cccl", "runtime", "nvcc"):
        assert f"'nvidia-cuda-{package}-cu12==12.*'" in problem


def test_headers_are_asked_for_in_the_version_of_nvrtc(nothing_installed, tmp_path):
    nothing_installed.setattr(toolchain, "nvrtc_version", lambda: (13, 0))
    install(tmp_path, RUNTIME, below="include", cuda="13.0")
    install(tmp_path, CRT, below="include")
    nothing_installed.setattr(toolchain, "toolkit_roots", lambda: [tmp_path])
    _, problem = toolchain.inspect_toolchain()
    assert problem is not None
    assert "cuda/std/cstdint" in problem
    assert problem.endswith("pip install 'nvidia-cuda-cccl==13.0.*'")


def test_unknown_cuda_version_is_refused(nothing_installed):
    nothing_installed.setattr(toolchain, "bindings_major", lambda: 14)
    _, problem = toolchain.inspect_toolchain()
    assert problem == "cuda-bindings of CUDA 14 is installed; CUDA 12 and 13 are supported"


def test_headers_of_another_major_version_are_not_used(nothing_installed, tmp_path):
    old = install(tmp_path / "old", RUNTIME, below="include", cuda="12.4")
    new = install(tmp_path / "new", RUNTIME, below="include", cuda="13.1")
    same = install(tmp_path / "same", RUNTIME, below="include", cuda="13.0")
    nothing_installed.setattr(toolchain, "toolkit_roots", lambda: [tmp_path / "old"])
    assert toolchain.find_headers(RUNTIME, (13, 0)) is None
    assert toolchain.find_headers(RUNTIME, (12, 9)) == old
    nothing_installed.setattr(
        toolchain, "toolkit_roots", lambda: [tmp_path / name for name in ("old", "new")]
    )
    assert toolchain.find_headers(RUNTIME, (13, 0)) == new
    nothing_installed.setattr(
        toolchain, "toolkit_roots", lambda: [tmp_path / name for name in ("old", "new", "same")]
    )
    assert toolchain.find_headers(RUNTIME, (13, 0)) == same


def test_pip_packages_come_before_a_toolkit(nothing_installed, tmp_path):
    toolkit, packages = tmp_path / "toolkit", tmp_path / "site" / "nvidia"
    in_toolkit = install(toolkit, RUNTIME, below="include", cuda="13.0")
    in_packages = install(packages, RUNTIME, below="cu13/include", cuda="13.0")
    in_packages_12 = install(packages, RUNTIME, below="cuda_runtime/include", cuda="12.9")
    nothing_installed.setattr(toolchain, "_pip_nvidia_dirs", lambda: [packages])
    nothing_installed.setattr(toolchain, "toolkit_roots", lambda: [toolkit])
    assert toolchain.header_candidates(RUNTIME, 13) == [in_packages, in_toolkit]
    assert toolchain.find_headers(RUNTIME, (13, 0)) == in_packages
    assert toolchain.find_headers(RUNTIME, (12, 9)) == in_packages_12


def test_layout_of_the_cuda_12_packages(nothing_installed, tmp_path):
    expected = [
        install(tmp_path, CCCL, below="cuda_cccl/include"),
        install(tmp_path, RUNTIME, below="cuda_runtime/include", cuda="12.9"),
        install(tmp_path, CRT, below="cuda_nvcc/include"),
    ]
    nothing_installed.setattr(toolchain, "_pip_nvidia_dirs", lambda: [tmp_path])
    nothing_installed.setattr(toolchain, "bindings_major", lambda: 12)
    nothing_installed.setattr(toolchain, "nvrtc_version", lambda: (12, 9))
    found, problem = toolchain.inspect_toolchain()
    assert problem is None
    assert found is not None
    assert list(found.include_dirs) == expected


def test_toolkit_of_cuda_home_with_cccl_in_a_folder_of_its_own(nothing_installed, tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(toolchain, "_pip_nvidia_dirs", list)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    cccl = install(tmp_path, CCCL, below="include/cccl")
    install(tmp_path, RUNTIME, below="include", cuda="13.0")
    assert toolchain.find_headers(CCCL, (13, 0)) == cccl
    assert toolchain.find_headers(RUNTIME, (13, 0)) == tmp_path / "include"


# What follows runs in processes that really lack something; a toolkit of this machine is hidden from them.
HIDE_TOOLKITS = "from prime_kernels.jit import toolchain\ntoolchain.toolkit_roots = list\n"


# A torch built for CUDA brings NVRTC into the process, wherever its packages lie: hide it where cuda-bindings
# asks for it.
HIDE_NVRTC = """
from cuda import pathfinder
def find_nothing(name):
    raise pathfinder.DynamicLibNotFoundError(f"{name} is hidden")
pathfinder.load_nvidia_dynamic_lib = find_nothing
"""


def test_process_without_any_cuda_package(tmp_path):
    packages = site_packages_without(tmp_path / "packages", "nvidia")
    output, _ = run_python(
        HIDE_NVRTC
        + HIDE_TOOLKITS
        + "if toolchain.nvrtc_version(): raise SystemExit('found')\n"
        + REPORT,
        site=False,
        environment={"PYTHONPATH": f"{REPOSITORY}:{packages}", "PATH": ""},
    )
    major = toolchain.bindings_major()
    assert major is not None
    assert output.startswith("kernels cannot be compiled here, missing: NVRTC")
    assert output.count("\n") == 1
    for package in (toolchain.NVRTC_PACKAGES[major], *(c.pip_package(major) for c in HEADER_COMPONENTS)):
        assert f"'{package}==" in output


@pytest.mark.compile
def test_process_without_the_crt_headers(tmp_path):
    """A real set of packages in which one is missing."""
    major, minor = find_toolchain().nvrtc_version
    for component in (CCCL, RUNTIME):
        real = toolchain.find_headers(component, (major, minor))
        assert real is not None
        folder = component.cuda12_folder if major == 12 else f"cu{major}"
        partial = tmp_path / "packages" / "nvidia" / folder / "include"
        partial.mkdir(parents=True, exist_ok=True)
        for entry in real.iterdir():
            if entry.name != "crt" and not (partial / entry.name).exists():
                (partial / entry.name).symlink_to(entry)
    narrow = (
        "import sys\n"
        "sys.path = [p for p in sys.path if not p.endswith('site-packages')] + [sys.argv[1]]\n"
        "toolchain.bindings_major = lambda: int(sys.argv[2])\n"
    )
    output, _ = run_python(HIDE_TOOLKITS + narrow + REPORT, tmp_path / "packages", str(major))
    assert "missing: the crt headers (crt/host_defines.h)" in output
    assert output.strip().endswith(f"pip install '{CRT.pip_package(major)}=={major}.{minor}.*'")


def test_process_without_cuda_python(tmp_path):
    packages = site_packages_without(tmp_path / "packages", "cuda")
    output, _ = run_python(REPORT, site=False, environment={"PYTHONPATH": f"{REPOSITORY}:{packages}"})
    assert "pip install 'cuda-python>=12.9,<14'" in output


@pytest.mark.compile
def test_environment_and_working_directory_lend_no_headers(tmp_path):
    """Poisoned headers wherever a compiler might look; no PATH, so no nvcc and no cuobjdump; no CUDA_HOME."""
    poison = tmp_path / "poison"
    (poison / "prime_kernels").mkdir(parents=True)
    for name in ("cstdint", "cuda_bf16.h", "cuda_device_runtime_api.h", "prime_kernels/nvrtc_prelude.cuh"):
        (poison / name).write_text("#error poisoned\n")
    variables = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "INCLUDE", "CUDA_INC_PATH")
    flags = dict.fromkeys(("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CFLAGS"), "--no-such-option")
    code = TINY_IN_CHILD + (
        "import dataclasses, hashlib, sys, pathlib\n"
        "CODE = '#include <cstdint>\\n#include <cuda_bf16.h>\\n' + CODE\n"
        "SOURCE = dataclasses.replace(SOURCE, code=CODE)\n"
        "cubin = compile_kernel(SOURCE, cache_dir=pathlib.Path(sys.argv[1]))\n"
        "print(cubin.path.name, hashlib.sha256(cubin.data).hexdigest())\n"
    )
    clean, _ = run_python(code, tmp_path / "clean", environment={"PATH": ""})
    dirty, _ = run_python(
        code,
        tmp_path / "dirty",
        environment={"PATH": "", **dict.fromkeys(variables, str(poison)), **flags},
        cwd=poison,
    )
    assert clean == dirty


@pytest.mark.compile
def test_shipped_cubin_needs_no_compiler(tmp_path):
    """A copy of the package under another name, with ready cubins, in a process without CUDA packages."""
    copy = tmp_path / "another place" / "renamed_kernels"
    shutil.copytree(
        toolchain.package_root(), copy, ignore=shutil.ignore_patterns("__pycache__", "_vendor", "_aot")
    )
    (copy / "_vendor").symlink_to(toolchain.package_root() / "_vendor")
    (shipped,) = warmup.write_aot([tiny_source()], copy / "_aot", cache_dir=tmp_path / "cache")
    packages = site_packages_without(tmp_path / "packages", "nvidia")
    child = TINY_IN_CHILD.replace("prime_kernels", "renamed_kernels") + (
        "cubin = compile_kernel(SOURCE)\n"
        "print(cubin.origin, cubin.path.name, cubin.symbol, cubin.resources.registers)\n"
    )
    output, _ = run_python(
        child, site=False, environment={"PYTHONPATH": f"{copy.parent}:{packages}", "PATH": ""}
    )
    registers = compile_kernel(tiny_source(), cache_dir=tmp_path / "cache").resources.registers
    assert output.split() == ["aot", shipped.name, "tiny", str(registers)]
    assert keys.source_key(tiny_source()) in shipped.name


@pytest.mark.compile
def test_shipped_cubin_is_looked_up_first(tmp_path, monkeypatch):
    warmup.write_aot([tiny_source(1)], tmp_path / "aot", cache_dir=tmp_path / "first")
    monkeypatch.setattr(cache, "aot_dir", lambda: tmp_path / "aot")
    assert compile_kernel(tiny_source(1), cache_dir=tmp_path / "second").origin == "aot"
    assert not (tmp_path / "second").exists()
    assert compile_kernel(tiny_source(2), cache_dir=tmp_path / "second").origin == "compiled"


def test_import_loads_no_driver_no_compiler_and_creates_no_context():
    """Nothing beyond what `import torch` brings by itself: a torch built for CUDA is linked to NVRTC."""
    report = """
import sys, torch
maps = open("/proc/self/maps").read()
print([name for name in ("libcuda.so", "libnvrtc.so") if f"/{name}" in maps])
print(sorted(name for name in sys.modules if name.startswith("cuda.")))
print(torch.cuda.is_initialized())
"""
    ours = "import prime_kernels, prime_kernels.jit, prime_kernels.warmup, prime_kernels.doctor\n"
    alone, _ = run_python(report)
    output, _ = run_python(ours + report)
    assert output == alone
    assert output.splitlines()[-1] == "False"
