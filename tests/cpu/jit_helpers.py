"""Small kernels, and Python processes with a chosen environment, for the compiler tests."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from prime_kernels.jit import KernelSource

REPOSITORY = Path(__file__).resolve().parents[2]
PROCESS_TIMEOUT_SECONDS = 120

PR_CAPBSET_DROP = 24
CAP_DAC_OVERRIDE = 1


def tiny_source(value: int = 1, *, name: str = "tiny", include_dir: Path | None = None) -> KernelSource:
    """A kernel that stores `value`, or VALUE of `value.h` when `include_dir` holds one."""
    include = '#include "value.h"\n' if include_dir is not None else f"#define VALUE {value}\n"
    code = f'{include}extern "C" __global__ void tiny(int* out) {{ *out = VALUE; }}\n'
    directories = (str(include_dir),) if include_dir is not None else ()
    return KernelSource(name, code, "tiny", "sm_90a", include_dirs=directories)


# The same source for a child process.
TINY_IN_CHILD = """
from prime_kernels.jit import KernelSource, cache, compile_kernel
CODE = '#define VALUE 1\\nextern "C" __global__ void tiny(int* out) { *out = VALUE; }\\n'
SOURCE = KernelSource("tiny", CODE, "tiny", "sm_90a")
"""


def start_python(
    code: str,
    *arguments: str | Path,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    site: bool = True,
    before_exec: Callable[[], None] | None = None,
) -> subprocess.Popen[str]:
    """Starts this interpreter on `code` with nothing but `environment` and what Python itself needs.

    site=False leaves out site-packages: PYTHONPATH then is all there is.
    """
    base = {"PYTHONPATH": str(REPOSITORY), "HOME": os.environ.get("HOME", "/"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *([] if site else ["-S"]), "-c", code, *(str(a) for a in arguments)]
    return subprocess.Popen(
        command,
        env={**base, **(environment or {})},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=before_exec,
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Output and errors of a process that must succeed."""
    output, errors = process.communicate(timeout=PROCESS_TIMEOUT_SECONDS)
    assert process.returncode == 0, f"exit code {process.returncode}\n{output}\n{errors}"
    return output, errors


def run_python(code: str, *arguments: str | Path, **options: object) -> tuple[str, str]:
    return finish(start_python(code, *arguments, **options))  # type: ignore[arg-type]


def obey_permissions() -> None:
    """Takes from a root process, at its next exec, the right to write where permissions forbid it."""
    if os.geteuid() == 0:
        ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0)


def site_packages_without(target: Path, *left_out: str) -> Path:
    """A directory that links to every installed package except those whose name starts with `left_out`."""
    import torch

    installed = Path(torch.__file__).resolve().parent.parent
    target.mkdir(parents=True, exist_ok=True)
    for entry in installed.iterdir():
        if not entry.name.startswith((*left_out, "__pycache__")) and entry.suffix != ".pth":
            (target / entry.name).symlink_to(entry)
    return target
