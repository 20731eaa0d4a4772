"""quickstart.sh and test.sh, run over an interpreter that records what it is asked to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
INSTALLATION_SOURCES = (
    "pyproject.toml",
    "hatch_build.py",
    "scripts/vendor_deepgemm.py",
    "scripts/header_patch.py",
    "patches/0001.patch",
)
TORCHTITAN = "tests/requirements-torchtitan.txt"
SCRIPTS = ("environment.sh", "quickstart.sh", "test.sh")

# Stands for the base interpreter and for the environment's. It writes down every call, "makes" an environment
# by copying itself there, has a torch once pip was told to install one, and fails where a call holds FAIL_ON.
INTERPRETER = """#!/usr/bin/env bash
echo "$*" >> "$LOG"
if [[ -n "${{FAIL_ON:-}}" && "$*" == *"$FAIL_ON"* ]]; then exit 3; fi
case "$*" in
    *python_version*) echo "$VERSION" ;;
    *torch.version.cuda*) echo cu13 ;;
    *cuda.is_available*) exit 1 ;;
    *'print(torch.__version__)'*) [[ -e "$TORCH" ]] && cat "$TORCH" ;;
    *'pip install torch=='*) echo 2.13.0 > "$TORCH" ;;
    '-m venv'*) mkdir -p "${{@: -1}}/bin" && cp "$0" "${{@: -1}}/bin/python" ;;
    -\\ *) exec "{python}" "$@" ;;
esac
"""


class Checkout:
    """A copy of the scripts in a folder with a space, and what they called."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a checkout"
        (self.root / "scripts").mkdir(parents=True)
        (self.root / "patches").mkdir()
        (self.root / "tests").mkdir()
        (self.root / "prime_kernels" / "_vendor").mkdir(parents=True)
        (self.root / "prime_kernels" / "_vendor" / "manifest.json").touch()
        for name in SCRIPTS:
            shutil.copy(REPO / "scripts" / name, self.root / "scripts" / name)
        for name in (*INSTALLATION_SOURCES, TORCHTITAN):
            (self.root / name).write_text(name)
        self.log, self.torch = folder / "log", folder / "torch"
        self.python = folder / "python"
        self.python.write_text(INTERPRETER.format(python=sys.executable))
        self.python.chmod(0o755)
        self.settings = {"PYTHON": str(self.python), "VERSION": "3.11.7", "LOG": str(self.log)}

    def run(
        self, script: str, *arguments: str, **settings: str
    ) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        """Run a script from another folder; returns its outcome and the calls it made."""
        self.log.write_text("")
        environment = {**os.environ, **self.settings, "TORCH": str(self.torch), **settings}
        done = subprocess.run(
            [self.root / "scripts" / script, *arguments],
            capture_output=True, text=True, cwd="/", env=environment, timeout=60, check=False,
        )  # fmt: skip
        return done, self.log.read_text().splitlines()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def with_words(calls: list[str], words: str) -> list[str]:
    return [call for call in calls if words in call]


def test_quickstart_on_a_fresh_machine(checkout: Checkout) -> None:
    done, calls = checkout.run("quickstart.sh", "--steps", "3")
    assert done.returncode == 0, done.stderr
    assert with_words(calls, "-m venv") == [f"-m venv {checkout.root}/.venv"]
    assert with_words(calls, "pip install torch") == ["-m pip install torch==2.13.0"]
    assert len(with_words(calls, f"--editable {checkout.root}[cli,cu13]")) == 1
    assert calls[-2:] == [
        "-m prime_kernels doctor",
        f"-m prime_kernels train --out {checkout.root}/runs/quickstart --steps 3",
    ]


def test_a_path_with_a_space_is_noted(checkout: Checkout) -> None:
    done, _ = checkout.run("quickstart.sh")
    assert done.stdout.count(f"note: the path {checkout.root} has a space; torch.compile's inductor") == 1
    plain = checkout.root.with_name("checkout")
    checkout.root.rename(plain)
    checkout.root = plain
    done, _ = checkout.run("quickstart.sh")
    assert done.returncode == 0, done.stderr
    assert "note:" not in done.stdout


def test_a_second_run_installs_nothing(checkout: Checkout) -> None:
    checkout.run("quickstart.sh")
    done, calls = checkout.run("quickstart.sh")
    assert done.returncode == 0, done.stderr
    assert not with_words(calls, "-m venv")
    assert not with_words(calls, "pip install")
    assert "2.13.0 is already there" in done.stdout
    assert with_words(calls, "-m prime_kernels train")


@pytest.mark.parametrize("name", INSTALLATION_SOURCES)
def test_a_changed_source_of_the_installation_installs_again(checkout: Checkout, name: str) -> None:
    checkout.run("quickstart.sh")
    (checkout.root / name).write_text("changed")
    _, calls = checkout.run("quickstart.sh")
    assert len(with_words(calls, "--editable")) == 1
    assert not with_words(calls, "pip install torch")


def test_lost_headers_install_again(checkout: Checkout) -> None:
    checkout.run("quickstart.sh")
    (checkout.root / "prime_kernels" / "_vendor" / "manifest.json").unlink()
    _, calls = checkout.run("quickstart.sh")
    assert len(with_words(calls, "--editable")) == 1


def test_a_failed_installation_is_not_remembered(checkout: Checkout) -> None:
    done, calls = checkout.run("quickstart.sh", FAIL_ON="--editable")
    assert done.returncode != 0
    assert not with_words(calls, "-m prime_kernels")
    _, calls = checkout.run("quickstart.sh")
    assert len(with_words(calls, "--editable")) == 1


def test_the_torch_of_the_machine_is_used_and_named(checkout: Checkout) -> None:
    checkout.torch.write_text("2.11.0+cu130")
    done, calls = checkout.run("quickstart.sh")
    assert done.returncode == 0, done.stderr
    assert "torch: 2.11.0+cu130 is already there" in done.stdout
    assert with_words(calls, "-m venv") == [f"-m venv --system-site-packages {checkout.root}/.venv"]
    assert not with_words(calls, "pip install torch")


def test_a_torch_that_is_too_old_is_refused(checkout: Checkout) -> None:
    checkout.torch.write_text("2.8.1+cu128")
    done, calls = checkout.run("quickstart.sh")
    assert done.returncode == 2
    assert "torch 2.8.1+cu128, but 2.9 or later" in done.stderr
    assert not with_words(calls, "pip install")


def test_an_interpreter_that_is_missing_or_too_old_is_named(checkout: Checkout) -> None:
    done, _ = checkout.run("quickstart.sh", PYTHON="/no/such/python")
    assert done.returncode == 2
    assert "/no/such/python is not installed" in done.stderr
    done, calls = checkout.run("quickstart.sh", VERSION="3.9.18")
    assert done.returncode == 2
    assert "Python 3.9.18, but 3.10 or later is needed" in done.stderr
    assert not with_words(calls, "-m venv")


def test_quickstart_passes_on_a_failed_training(checkout: Checkout) -> None:
    done, _ = checkout.run("quickstart.sh", FAIL_ON="-m prime_kernels train")
    assert done.returncode == 3


def test_quickstart_trains_where_the_doctor_finds_faults(checkout: Checkout) -> None:
    done, calls = checkout.run("quickstart.sh", FAIL_ON="-m prime_kernels doctor")
    assert done.returncode == 0
    assert "doctor: something is missing" in done.stdout
    assert with_words(calls, "-m prime_kernels train")


STAGES = ("-m ruff check", "-m mypy", "-m pytest", "-m prime_kernels parity")


def test_test_sh_runs_every_stage(checkout: Checkout) -> None:
    done, calls = checkout.run("test.sh", "-k", "some words")
    assert done.returncode == 0, done.stderr
    assert len(with_words(calls, f"--editable {checkout.root}[cli,test,cu13]")) == 1
    assert all(len(with_words(calls, stage)) == 1 for stage in STAGES)
    (tests,) = with_words(calls, "-m pytest")
    assert "tests/cpu tests/compile -k some words" in tests
    assert done.stdout.count(" passed ") == 1 + len(STAGES)
    assert f"reports: {checkout.root}/runs/test" in done.stdout


def test_test_sh_installs_torchtitan_without_its_dependencies_once(checkout: Checkout) -> None:
    installs = [f"-m pip install --quiet --no-deps --requirement {checkout.root}/{TORCHTITAN}"]
    assert with_words(checkout.run("test.sh")[1], "--no-deps") == installs
    assert not with_words(checkout.run("test.sh")[1], "pip install")
    (checkout.root / TORCHTITAN).write_text("changed")
    assert with_words(checkout.run("test.sh")[1], "pip install") == installs


def test_test_sh_runs_every_stage_where_torchtitan_cannot_be_installed(checkout: Checkout) -> None:
    done, calls = checkout.run("test.sh", FAIL_ON="--no-deps")
    assert "TorchTitan: could not be installed" in done.stdout
    assert all(len(with_words(calls, stage)) == 1 for stage in STAGES)
    assert len(with_words(checkout.run("test.sh")[1], "--no-deps")) == 1


@pytest.mark.parametrize("stage", STAGES)
def test_test_sh_runs_on_after_a_failure_and_then_fails(checkout: Checkout, stage: str) -> None:
    done, calls = checkout.run("test.sh", FAIL_ON=stage)
    assert done.returncode == 1
    assert all(len(with_words(calls, other)) == 1 for other in STAGES)
    assert done.stdout.count(" FAILED ") == 1
    assert done.stdout.count(" passed ") == len(STAGES)


def test_test_sh_stops_where_the_set_up_fails(checkout: Checkout) -> None:
    done, calls = checkout.run("test.sh", FAIL_ON="--editable")
    assert done.returncode != 0
    assert not any(with_words(calls, stage) for stage in STAGES)
