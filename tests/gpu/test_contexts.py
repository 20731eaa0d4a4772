"""On which GPUs a process gets a CUDA context: none by the import, and only the one that it uses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sm90_cases import compile_all

pytestmark = pytest.mark.gpu

REPO = Path(__file__).resolve().parents[2]

ACTIVE = """
from cuda.bindings import driver

def active():
    (error,) = driver.cuInit(0)
    assert error == driver.CUresult.CUDA_SUCCESS, error
    _, count = driver.cuDeviceGetCount()
    states = [driver.cuDevicePrimaryCtxGetState(driver.cuDeviceGet(index)[1]) for index in range(count)]
    assert all(state[0] == driver.CUresult.CUDA_SUCCESS for state in states)
    return [index for index, state in enumerate(states) if state[2]]
"""

IMPORT = """
import prime_kernels, prime_kernels.jit, prime_kernels.warmup, prime_kernels.op
print(active())
"""

RUN = """
import torch
import prime_kernels
torch.cuda.set_device(int(DEVICE))
import sm90_cases
sm90_cases.DEVICE = torch.device("cuda", int(DEVICE))
import test_sm90_bf16
case = sm90_cases.make_case(64, 4, 2, 512, 256)
test_sm90_bf16.run_both(test_sm90_bf16.make_buffer(case), case)
print(active())
"""


def run(code: str) -> str:
    """What a new process prints."""
    paths = [str(REPO), str(REPO / "tests" / "gpu"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", ACTIVE + code],
        capture_output=True, text=True, env=environment, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_creates_no_context() -> None:
    assert run(IMPORT) == "[]"


def test_the_context_of_the_gpu_in_use_and_no_other() -> None:
    compile_all()
    last = torch.cuda.device_count() - 1
    assert run(f"DEVICE = {last}\n" + RUN) == f"[{last}]"
