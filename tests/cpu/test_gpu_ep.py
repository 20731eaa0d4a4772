"""ci/gpu_ep.sh with a stand-in for Python, and ci/killed_rank.py with ranks on the CPU."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

REPO = Path(__file__).resolve().parents[2]
SCRIPT = REPO / "ci" / "gpu_ep.sh"
LIMIT = 2.0

# Says how many GPUs there are, notes what it was asked to run, and fails where the call contains $FAIL.
STAND_IN = """#!/usr/bin/env bash
if [[ "$1" == -c ]]; then echo "$GPUS"; exit; fi
echo "NVLS=$NCCL_NVLS_ENABLE $*" >>"$CALLS"
[[ -z "$FAIL" || "$*" != *"$FAIL"* ]]
"""


def load_killed_rank() -> ModuleType:
    spec = importlib.util.spec_from_file_location("killed_rank", REPO / "ci" / "killed_rank.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


killed_rank = load_killed_rank()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A tree with the script alone, so that its results go there."""
    (tmp_path / "ci").mkdir()
    (tmp_path / "ci" / SCRIPT.name).write_text(SCRIPT.read_text())
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    return tmp_path


def run_script(
    checkout: Path, gpus: int, *words: str, fail: str = ""
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    calls = checkout / "calls"
    environment = {
        **os.environ,
        "PYTHON": str(checkout / "python"),
        "GPUS": str(gpus),
        "CALLS": str(calls),
        "FAIL": fail,
    }
    command = ["bash", str(checkout / "ci" / SCRIPT.name), *words]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    return result, calls.read_text().splitlines() if calls.exists() else []


def test_one_gpu_says_what_is_left_out(checkout: Path) -> None:
    result, calls = run_script(checkout, 1, "--smoke")
    assert result.returncode == 0, result.stderr
    ranks, parity, bench = calls
    assert "--nproc-per-node 1 --no-python" in ranks
    assert "--ranks 1 --shapes small" in parity
    assert "--nproc-per-node 1 -m prime_kernels bench ep" in bench
    assert bench.endswith("--smoke")
    summary = (checkout / "runs" / "gpu_ep" / "summary.txt").read_text()
    assert "1 of 1 GPUs used" in summary
    for part in ("one rank late", "one rank killed", "growth with EP"):
        assert any(line.startswith(part) and "left out" in line for line in summary.splitlines())


def test_eight_gpus_run_everything(checkout: Path) -> None:
    result, calls = run_script(checkout, 8)
    assert result.returncode == 0, result.stderr
    ranks, killed, parity, *bench = calls
    assert "--nproc-per-node 8 --no-python" in ranks
    assert "test_several_gpus.py" in ranks
    assert "ci/killed_rank.py --ranks 8" in killed
    assert "--device cuda" in parity
    assert parity.endswith("--ranks 1,2,4,8")
    assert len(bench) == 4
    for call, count in zip(bench, (1, 2, 4, 8), strict=True):
        assert f"--nproc-per-node {count} -m prime_kernels bench ep" in call
    assert all(call.startswith("NVLS=0 ") for call in calls)
    assert "left out" not in result.stdout


def test_a_number_of_gpus_that_is_no_power_of_two(checkout: Path) -> None:
    result, calls = run_script(checkout, 7, "--smoke")
    assert "4 of 7 GPUs used" in result.stdout
    assert len(calls) == 4
    assert "--nproc-per-node 4 -m prime_kernels bench ep" in calls[-1]
    result, calls = run_script(checkout, 7, "--gpus", "2", "--smoke")
    assert "2 of 7 GPUs used" in result.stdout


@pytest.mark.parametrize("part", ["test_several_gpus", "killed_rank", "parity.py", "bench ep"])
def test_one_failed_part_fails_the_run_and_the_others_still_run(checkout: Path, part: str) -> None:
    result, calls = run_script(checkout, 2, fail=part)
    assert result.returncode == 1
    assert len(calls) == 5
    summary = (checkout / "runs" / "gpu_ep" / "summary.txt").read_text()
    assert summary.count("FAILED") == (2 if part == "bench ep" else 1)


@pytest.mark.parametrize(
    ("gpus", "words", "message"),
    [
        (0, [], "torch finds no GPU"),
        (2, ["--gpus", "4"], "--gpus 4, but torch finds 2"),
        (2, ["--gpus", "none"], "usage: ci/gpu_ep.sh"),
        (2, ["--gpus"], "usage: ci/gpu_ep.sh"),
        (2, ["--fast"], "usage: ci/gpu_ep.sh"),
    ],
)
def test_runs_that_cannot_start(checkout: Path, gpus: int, words: list[str], message: str) -> None:
    result, calls = run_script(checkout, gpus, *words)
    assert (result.returncode, calls) == (2, [])
    assert message in result.stderr


# --- One rank killed ---


def ended(rank: int, code: int | None, output: str) -> object:
    return killed_rank.Ended(rank, code, output, 1.0)


RAISED = "ready\nRuntimeError: rank 0, step 2: peer 1 did not come within 2 s\n"


def test_ranks_that_end_as_they_should() -> None:
    victim = ended(1, -signal.SIGKILL, "ready\n")
    assert killed_rank.problems([victim, ended(0, 1, RAISED)], 1, LIMIT) == []
    told = ended(2, 1, "ready\nRuntimeError: rank 2, step 2: the peer gave up: peer 0")
    assert killed_rank.problems([victim, ended(0, 1, RAISED), told], 1, LIMIT) == []


@pytest.mark.parametrize(
    ("code", "output", "problem"),
    [
        (None, RAISED, "rank 0: did not exit within 1 s"),
        (0, RAISED, "rank 0: exit code 0, expected 1"),
        (-signal.SIGABRT, RAISED, "rank 0: exit code -6, expected 1"),
        (
            1,
            "ready\nRuntimeError: something else",
            "rank 0: no RuntimeError that names the rank",
        ),
        (1, RAISED.replace("within 2 s", "within 300 s"), "rank 0: no RuntimeError"),
        (1, "ImportError: no torch", "rank 0: failed before any rank was killed, exit code 1"),
        (1, "ready\nRuntimeError: rank 0, step 2: the peer gave up: peer 0", "no rank names peer 1"),
    ],
)
def test_ranks_that_do_not(code: int | None, output: str, problem: str) -> None:
    victim = ended(1, -signal.SIGKILL, "ready\n")
    [found] = killed_rank.problems([victim, ended(0, code, output)], 1, LIMIT)
    assert problem in found


def test_a_rank_that_outlives_its_death_is_noticed() -> None:
    [found] = killed_rank.problems([ended(1, 1, RAISED), ended(0, 1, RAISED)], 1, LIMIT)
    assert "rank 1: exit code 1, was to be killed by signal 9" in found


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--ranks", "1"], "has no peer to miss"), (["--ranks", "2", "--killed", "2"], "from 0 to 1")],
)
def test_arguments_that_cannot_be(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        killed_rank.main(words)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_real_ranks_raise_and_exit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Over gloo, with the reference backend: what the launcher asks of the kernels it gets from it too."""
    words = [
        "--ranks",
        "2",
        "--device",
        "cpu",
        "--limit",
        str(LIMIT),
        "--junit",
        str(tmp_path / "killed.xml"),
    ]
    assert killed_rank.main(words) == 0
    out = capfd.readouterr().out
    assert "rank 0: exit code 1: " in out
    assert "peer 1 did not complete phase 'counts' within 2 s" in out
    assert "rank 1: exit code -9" in out
    [case] = ElementTree.parse(tmp_path / "killed.xml").getroot()
    assert case.find("failure") is None
    killed_rank.write_junit(tmp_path / "wrong.xml", ["rank 0: hung"], 1.0)
    [case] = ElementTree.parse(tmp_path / "wrong.xml").getroot()
    assert case[0].text == "rank 0: hung"
