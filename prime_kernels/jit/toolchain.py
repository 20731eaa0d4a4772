"""Finds what a kernel compile needs: NVRTC and the CUDA headers, from pip packages or a CUDA toolkit.

Nothing here creates a CUDA context or needs a driver. The search for headers looks at the pip packages of the
running interpreter first, then at ``CUDA_HOME``, ``CUDA_PATH`` and ``/usr/local/cuda``; compiler variables
such as ``CPATH`` are never read. NVRTC itself is located by ``cuda-bindings`` (through ``cuda-pathfinder``),
whose major version decides whether CUDA 12 or CUDA 13 packages are needed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from .errors import ToolchainError

SUPPORTED_CUDA_MAJORS = (12, 13)
# CUDA_VERSION in cuda.h is 1000 * major + 10 * minor.
_CUDA_VERSION_MAJOR = 1000
_CUDA_VERSION_MINOR = 10


@dataclass(frozen=True)
class HeaderComponent:
    """Headers that one pip package ships, recognised by ``probe``, a file that every version of it has."""

    name: str
    probe: str
    pip_cuda12: str
    pip_cuda13: str
    # Where the CUDA 12 packages keep it, below site-packages/nvidia (CUDA 13 packages share one folder).
    cuda12_folder: str

    def pip_package(self, cuda_major: int) -> str:
        """The pip package that has these headers for a CUDA major version."""
        return self.pip_cuda12 if cuda_major == 12 else self.pip_cuda13


# The order is the order of the include path: CCCL first, because toolkits also carry a copy of it.
HEADER_COMPONENTS = (
    HeaderComponent("cccl", "cuda/std/cstdint", "nvidia-cuda-cccl-cu12", "nvidia-cuda-cccl", "cuda_cccl"),
    HeaderComponent(
        "runtime", "cuda_bf16.h", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime", "cuda_runtime"
    ),
    HeaderComponent("crt", "crt/host_defines.h", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-crt", "cuda_nvcc"),
)
NVRTC_PACKAGES = {12: "nvidia-cuda-nvrtc-cu12", 13: "nvidia-cuda-nvrtc"}


@dataclass(frozen=True)
class Toolchain:
    """A usable compiler: NVRTC's version and the directories of the CUDA headers, in include order.

    build: tells builds of one version apart (NVRTC itself only reports major and minor).
    """

    nvrtc_version: tuple[int, int]
    build: str
    include_dirs: tuple[Path, ...]

    @property
    def version_string(self) -> str:
        """The compiler as messages and keys name it."""
        return f"NVRTC {self.nvrtc_version[0]}.{self.nvrtc_version[1]}"


def package_root() -> Path:
    """Directory of the installed package (whatever name it was installed under)."""
    return Path(__file__).resolve().parent.parent


def package_include_dirs() -> tuple[Path, ...]:
    """Include directories of the package: standard-header shims, own headers, vendored headers."""
    root = package_root()
    return (root / "include" / "nvrtc_std", root / "include", root / "_vendor" / "include")


def import_nvrtc() -> ModuleType:
    """The NVRTC bindings of cuda-python. Raises ToolchainError when cuda-python is not installed."""
    try:
        return importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise ToolchainError(
            f"compiling a kernel needs cuda-python, which cannot be imported ({error}): "
            "pip install 'cuda-python>=12.9,<14'"
        ) from error


def bindings_major() -> int | None:
    """Major version of the installed cuda-bindings (12 or 13), which is also that of the NVRTC it loads."""
    try:
        return int(importlib.metadata.version("cuda-bindings").split(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return None


def nvrtc_version() -> tuple[int, int] | None:
    """(major, minor) of the NVRTC library cuda-bindings loads, None when the library is not installed."""
    nvrtc = import_nvrtc()
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError:
        # cuda-bindings reports a library it cannot find as a RuntimeError or a subclass of it.
        return None
    if int(status) != 0:
        raise ToolchainError(f"NVRTC was found but nvrtcVersion() returned {status!r}")
    return int(major), int(minor)


def _loaded_nvrtc_build(major: int) -> str:
    """File name and size of the NVRTC library this process has loaded."""
    names = set()
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            path = line.split(maxsplit=5)[-1].rstrip("\n")
            if f"/libnvrtc.so.{major}" in path:
                names.add(f"{Path(path).name}:{Path(path).stat().st_size}")
    return ",".join(sorted(names))


def _pip_nvidia_dirs() -> list[Path]:
    found = []
    for entry in sys.path:
        candidate = Path(entry or os.curdir) / "nvidia"
        if candidate.is_dir() and candidate not in found:
            found.append(candidate)
    return found


def toolkit_roots() -> list[Path]:
    """CUDA toolkits on this machine, in the order they are tried after the pip packages."""
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    return [Path(root) for root in dict.fromkeys(roots) if root and Path(root).is_dir()]


def header_candidates(component: HeaderComponent, cuda_major: int) -> list[Path]:
    """Every directory that holds ``component``, best first."""
    candidates = []
    for base in _pip_nvidia_dirs():
        if cuda_major == 12:
            candidates.append(base / component.cuda12_folder / "include")
        else:
            candidates += [
                base / f"cu{cuda_major}" / "include",
                base / f"cu{cuda_major}" / "include" / "cccl",
            ]
    for root in toolkit_roots():
        candidates += [root / "include", root / "include" / "cccl"]
    return [path for path in candidates if (path / component.probe).is_file()]


def cuda_header_version(include_dir: Path) -> tuple[int, int] | None:
    """(major, minor) that ``cuda.h`` in ``include_dir`` declares, None when there is no such file."""
    header = include_dir / "cuda.h"
    if not header.is_file():
        return None
    match = re.search(r"^#define\s+CUDA_VERSION\s+(\d+)", header.read_text(errors="replace"), re.MULTILINE)
    if match is None:
        return None
    value = int(match.group(1))
    return value // _CUDA_VERSION_MAJOR, value % _CUDA_VERSION_MAJOR // _CUDA_VERSION_MINOR


def find_headers(component: HeaderComponent, version: tuple[int, int]) -> Path | None:
    """Directory of ``component`` for an NVRTC of ``version``, of the same minor version if there is one."""
    same_major = []
    for path in header_candidates(component, version[0]):
        declared = cuda_header_version(path)
        if declared is None or declared == version:
            return path
        if declared[0] == version[0]:
            same_major.append(path)
    return same_major[0] if same_major else None


def pip_install_line(packages: list[str], version: tuple[int, int] | None, major: int) -> str:
    """The pip command for ``packages`` that match NVRTC of ``version``, or CUDA ``major`` when there is
    none.
    """
    pin = f"=={major}.*" if version is None else f"=={version[0]}.{version[1]}.*"
    return "pip install " + " ".join(f"'{package}{pin}'" for package in packages)


def inspect_toolchain() -> tuple[Toolchain | None, str | None]:
    """The toolchain, or None and one message naming what is missing and the pip line that installs it."""
    major = bindings_major()
    version = nvrtc_version()
    if major is None:
        major = version[0] if version is not None else max(SUPPORTED_CUDA_MAJORS)
    if major not in SUPPORTED_CUDA_MAJORS:
        supported = " and ".join(str(m) for m in SUPPORTED_CUDA_MAJORS)
        return None, f"cuda-bindings of CUDA {major} is installed; CUDA {supported} are supported"
    missing: list[str] = []
    packages: list[str] = []
    if version is None:
        missing.append(f"NVRTC (libnvrtc.so.{major})")
        packages.append(NVRTC_PACKAGES[major])
    include_dirs: list[Path] = []
    # Without NVRTC any minor version of the headers counts as present.
    for component in HEADER_COMPONENTS:
        path = find_headers(component, version if version is not None else (major, 0))
        if path is None:
            missing.append(f"the {component.name} headers ({component.probe})")
            packages.append(component.pip_package(major))
        elif path not in include_dirs:
            include_dirs.append(path)
    if missing:
        line = pip_install_line(packages, version, major)
        return None, f"kernels cannot be compiled here, missing: {', '.join(missing)}. Install with: {line}"
    assert version is not None
    return Toolchain(version, _loaded_nvrtc_build(major), tuple(include_dirs)), None


@functools.lru_cache(maxsize=1)
def find_toolchain() -> Toolchain:
    """The toolchain of this process, looked up once. Raises ToolchainError naming what to install."""
    toolchain, problem = inspect_toolchain()
    if toolchain is None:
        raise ToolchainError(problem)
    return toolchain
