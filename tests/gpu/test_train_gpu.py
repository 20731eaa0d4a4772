"""The training job on a GPU: on its kernels, or on the reference; either way it says which."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from prime_kernels import runtime
from prime_kernels.train import job

pytestmark = pytest.mark.gpu

SMALL = [
    "--device", "cuda", "--layers", "2", "--steps", "20", "--warmup", "2", "--eval-every", "10",
    "--sample-bytes", "8",
]  # fmt: skip


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets process-wide settings; take them back afterwards."""
    monkeypatch.setattr(runtime, "_backend", None)
    monkeypatch.setattr(runtime, "_device", None)
    monkeypatch.delenv(runtime.BACKEND_ENV, raising=False)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_the_job_on_this_gpu(backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        expected = runtime.resolve_backend(torch.device("cuda", 0), "bf16xbf16")
    except RuntimeError:  # no kernel on this GPU: the job has to say so and run the reference
        expected = "reference"
    assert job.main([*SMALL, "--backend", backend, "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["backend"] == (expected if backend == "auto" else "reference")
    assert record["device"].startswith("cuda")
    assert record["loss"][-1][1] < record["loss"][0][1] - 1.5
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("backend")]
    assert record["backend"] in line
    assert record["backend_reason"] in line
