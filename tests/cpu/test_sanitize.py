"""ci/sanitize.sh over a program that stands for compute-sanitizer: what it lets pass, and what not."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
SUMMARIES = {
    "memcheck": "========= ERROR SUMMARY: 0 errors",
    "racecheck": "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
    "synccheck": "========= ERROR SUMMARY: 0 errors",
    "initcheck": "========= ERROR SUMMARY: 0 errors",
}
# Prints the summary of its tool, except where BEHAVIOUR says otherwise for one of them.
SANITIZER = """#!/usr/bin/env bash
echo "$*" >> "$LOG"
case "$2:$BEHAVIOUR" in
    racecheck:reports) echo '========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)'; exit 0 ;;
    memcheck:reports) echo '========= ERROR SUMMARY: 12 errors'; exit 1 ;;
    initcheck:silent) echo '========= Error: Device not supported' ; exit 0 ;;
    synccheck:hangs) sleep 60 ;;
    memcheck:*) echo '{memcheck}' ;;
    racecheck:*) echo '{racecheck}' ;;
    synccheck:*) echo '{synccheck}' ;;
    initcheck:*) echo '{initcheck}' ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "a checkout"
    (root / "ci").mkdir(parents=True)
    script = root / "ci" / "sanitize.sh"
    script.write_text((REPO / "ci" / "sanitize.sh").read_text())
    for name, text in (("sanitizer", SANITIZER.format(**SUMMARIES)), ("python", "#!/bin/sh\nexit $WRONG\n")):
        program = root / name
        program.write_text(text)
        program.chmod(0o755)
    script.chmod(0o755)
    return root


def run(
    checkout: Path, *tools: str, behaviour: str = "", wrong: int = 0
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Outcome, and the calls of the sanitizer."""
    log = checkout / "log"
    environment = {
        **os.environ, "PYTHON": str(checkout / "python"), "SANITIZER": str(checkout / "sanitizer"),
        "LOG": str(log), "BEHAVIOUR": behaviour, "WRONG": str(wrong), "SECONDS_PER_TOOL": "2",
    }  # fmt: skip
    done = subprocess.run(
        [checkout / "ci" / "sanitize.sh", *tools],
        capture_output=True, text=True, cwd="/", env=environment, timeout=60, check=False,
    )  # fmt: skip
    return done, log.read_text().splitlines() if log.exists() else []


def test_all_tools_run_over_our_kernels(checkout: Path) -> None:
    done, calls = run(checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [call.split()[1] for call in calls] == list(SUMMARIES)
    assert all("kns=sm90_bf16" in call and "kns=route_plan" in call for call in calls)
    assert [call.split()[-1] for call in calls] == ["odd", "odd", "odd", "full"]
    assert ["--report-api-errors no" in call for call in calls] == [True, False, False, False]
    assert sorted(path.name for path in (checkout / "runs" / "gpu").iterdir()) == [
        f"sanitize-{tool}.log" for tool in sorted(SUMMARIES)
    ]


@pytest.mark.parametrize(
    ("behaviour", "lines"),
    [
        ("reports", ["memcheck: exit code 1", "racecheck: no clean summary", "synccheck: clean"]),
        ("silent", ["initcheck: no clean summary", "memcheck: clean"]),
        ("hangs", ["synccheck: longer than 2 s", "initcheck: clean"]),
    ],
)
def test_whatever_is_not_clean_fails(checkout: Path, behaviour: str, lines: list[str]) -> None:
    """A report without an exit code, a tool that could not run, and one that does not end, too."""
    done, calls = run(checkout, behaviour=behaviour)
    assert done.returncode == 1
    assert len(calls) == len(SUMMARIES)
    for line in lines:
        assert line in done.stdout


def test_some_tools(checkout: Path) -> None:
    done, calls = run(checkout, "synccheck")
    assert done.returncode == 0
    assert len(calls) == 1
    assert run(checkout, "valgrind")[0].returncode == 1


def test_a_wrong_result_fails_before_any_tool(checkout: Path) -> None:
    done, calls = run(checkout, wrong=1)
    assert done.returncode == 1
    assert calls == []
