"""The command line: dispatch, exit codes, laziness, and what a missing extra says."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from prime_kernels import cli, extras

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPO = Path(__file__).resolve().parents[2]
EXTRA_MODULES = sorted(cli.CLI_EXTRA_MODULES)


def targets(commands: Mapping[str, cli.Command]) -> Iterator[str]:
    for command in commands.values():
        if command.commands is not None:
            yield from targets(command.commands)
        else:
            yield command.target


def run_without(modules: list[str], *argv: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process where importing `modules` fails as if they were not installed."""
    code = (
        "import sys\n"
        f"for name in {modules!r}: sys.modules[name] = None\n"
        "from prime_kernels.cli import main\n"
        f"sys.exit(main({list(argv)!r}))\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replace the commands by `plain` and `group inner`, which record their arguments and return 7."""
    calls: list[list[str]] = []

    def function(argv: list[str]) -> int:
        calls.append(argv)
        return 7

    module = types.ModuleType("prime_kernels.planted")
    module.run = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "prime_kernels.planted", module)
    command = cli.Command("planted", "planted:run")
    monkeypatch.setattr(
        cli, "COMMANDS", {"plain": command, "group": cli.Command("group", commands={"inner": command})}
    )
    return calls


@pytest.mark.parametrize("target", sorted(targets(cli.COMMANDS)))
def test_every_command_exists(target: str) -> None:
    module, _, function = target.partition(":")
    assert callable(getattr(importlib.import_module(f"prime_kernels.{module}"), function))


def test_arguments_reach_the_command_unchanged(planted: list[list[str]]) -> None:
    words = ["--flag", "value", "-x", "--", "positional", "--help", "--flag=a b"]
    assert cli.main(["plain", *words]) == 7
    assert cli.main(["group", "inner", *words]) == 7
    assert planted == [words, words]


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main(["--help"])
    assert raised.value.code == 0
    text = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert name in text
        assert command.summary in text


@pytest.mark.parametrize("argv", [[], ["group"]])
def test_no_command_prints_help_and_fails(
    argv: list[str], planted: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == cli.EXIT_USAGE
    assert "commands:" in capsys.readouterr().err
    assert planted == []


@pytest.mark.parametrize("argv", [["nonsense"], ["group", "nonsense"]])
def test_unknown_command_names_the_known_ones(
    argv: list[str], planted: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main(argv)
    assert raised.value.code == cli.EXIT_USAGE
    message = capsys.readouterr().err
    assert "'nonsense'" in message
    assert ("inner" if len(argv) == 2 else "plain, group") in message


def test_missing_extra_is_one_message_with_the_pip_line() -> None:
    for module in ("tqdm", "matplotlib"):
        done = run_without([module], "train", "--steps", "1")
        assert done.returncode == cli.EXIT_USAGE, done.stderr
        assert cli.CLI_EXTRA_INSTALL in done.stderr
        assert repr(module) in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("extra", sorted(extras.EXTRAS))
def test_extras_are_those_of_the_project_file(extra: str) -> None:
    """Messages name the packages: the extra's name helps only where the package is on an index."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert list(extras.EXTRAS[extra]) == project["optional-dependencies"][extra]
    assert extras.pip_line(extra) == "pip install " + " ".join(f"'{text}'" for text in extras.EXTRAS[extra])
    assert all(importlib.util.find_spec(name) is not None for name in extras.names(extra))


def test_no_message_installs_this_package_from_an_index() -> None:
    sources = [*(REPO / "prime_kernels").rglob("*.py"), *(REPO / "docs").glob("*.md"), REPO / "README.md"]
    assert len(sources) > 50
    line = re.compile(r"pip install [^\n]*prime-kernels")
    assert not [str(path) for path in sources if line.search(path.read_text())]


def test_other_import_errors_are_shown_as_they_are(
    planted: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(argv: list[str]) -> int:
        return importlib.import_module("prime_kernels.no_such_module").value

    monkeypatch.setattr(sys.modules["prime_kernels.planted"], "run", broken)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        cli.main(["plain"])


def test_an_interrupted_command_leaves_no_traceback(
    planted: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["prime_kernels.planted"], "run", interrupted)
    assert cli.main(["plain"]) == cli.EXIT_INTERRUPTED
    assert capsys.readouterr().err == f"python -m {cli.PACKAGE} plain: interrupted\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("bench gemm", "bench gemm measures a GPU and torch sees none"),
        ("bench layer", "bench layer measures a GPU and torch sees none"),
        ("bench ep", "bench ep measures GPUs and torch sees none"),
        (
            "bench end-to-end",
            "bench end-to-end measures a GPU and torch sees none; --device cpu is for toy sizes",
        ),
    ],
)
def test_a_benchmark_without_a_gpu_cannot_start(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(words.split()) == cli.EXIT_USAGE
    assert capsys.readouterr().err == f"{message}\n"


@pytest.fixture
def unread_pipe() -> Iterator[int]:
    """The writing end of a pipe whose reader has left."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


ALL_HELP_INTO_PIPE = """
import json, os, sys
from prime_kernels import cli
codes = {}
for words in json.loads(sys.argv[1]):
    os.dup2(int(sys.argv[2]), 1)
    try:
        codes[" ".join(words)] = cli.main(words)
    except SystemExit as stop:
        codes[" ".join(words)] = stop.code
print(json.dumps(codes), file=sys.stderr)
"""


def verbs(commands: Mapping[str, cli.Command]) -> Iterator[list[str]]:
    for name, command in commands.items():
        if command.commands is None:
            yield [name]
        else:
            yield from ([name, *inner] for inner in verbs(command.commands))


def test_every_verb_ends_quietly_when_its_reader_has_left(unread_pipe: int) -> None:
    calls = [[*words, "--help"] for words in verbs(cli.COMMANDS)] + [["--help"], ["parity", "--list"]]
    done = subprocess.run(
        [sys.executable, "-c", ALL_HELP_INTO_PIPE, json.dumps(calls), str(unread_pipe)],
        stderr=subprocess.PIPE, pass_fds=[unread_pipe], text=True, timeout=300,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    )  # fmt: skip
    assert done.stderr == json.dumps({" ".join(words): cli.EXIT_PIPE for words in calls}) + "\n"


# Buffered, warmup prints its first lines together with the first kernel, which takes a while.
@pytest.mark.parametrize(
    ("words", "unbuffered"), [("doctor", ""), ("doctor", "1"), ("warmup --model qwen3-30b-a3b --ep 8", "1")]
)
def test_a_reader_that_leaves_early_is_no_error(
    words: str, unbuffered: str, unread_pipe: int, tmp_path: Path
) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered, "PRIME_KERNELS_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "prime_kernels", *words.split()],
        stdout=unread_pipe, stderr=subprocess.PIPE, text=True, timeout=300, env=environment,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (cli.EXIT_PIPE, "")


def test_another_broken_pipe_is_shown_as_it_is(
    planted: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loses_a_peer(argv: list[str]) -> int:
        raise BrokenPipeError("a peer's socket")

    monkeypatch.setattr(sys.modules["prime_kernels.planted"], "run", loses_a_peer)
    with pytest.raises(BrokenPipeError, match="a peer's socket"):
        cli.main(["plain"])


def test_doctor_needs_no_extra() -> None:
    done = run_without(EXTRA_MODULES, "doctor")
    assert "Traceback" not in done.stderr, done.stderr
    assert cli.CLI_EXTRA_INSTALL not in done.stderr
    assert "torch" in done.stdout


def test_importing_the_command_line_imports_no_command() -> None:
    code = (
        "import sys, prime_kernels.cli as cli\n"
        "names = [n for n in sys.modules if n.startswith('prime_kernels.')]\n"
        "assert not any(n.split('.')[1] in ('train', 'bench', 'doctor', 'warmup') for n in names), names\n"
        "assert not cli.CLI_EXTRA_MODULES & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_waiting_threads_of_the_training_job_sleep() -> None:
    code = (
        "import contextlib, os, sys, prime_kernels.cli as cli, prime_kernels.train\n"
        "assert 'torch' not in sys.modules  # which would have read the setting\n"
        "with contextlib.suppress(SystemExit): cli.main(['train', '--help'])\n"
        "assert os.environ['OMP_WAIT_POLICY'] == sys.argv[1], os.environ['OMP_WAIT_POLICY']\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    command = [sys.executable, "-c", code]
    subprocess.run([*command, "PASSIVE"], check=True, timeout=300, env=environment)
    environment["OMP_WAIT_POLICY"] = "ACTIVE"  # the user's choice stands
    subprocess.run([*command, "ACTIVE"], check=True, timeout=300, env=environment)


def test_python_dash_m() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "prime_kernels", "train", "--help"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "usage: python -m prime_kernels train" in done.stdout
    assert "--experts" in done.stdout
