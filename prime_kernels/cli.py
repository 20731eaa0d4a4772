"""The command line: `python -m prime_kernels <command> [arguments]`.

Every command lives in a module of its own and is imported when it is called, so that `doctor` works with the
core dependencies alone. A command's `main(argv)` takes its arguments and returns the exit code.

Exit codes: 0 success, 1 the command ran and found something wrong, 2 it could not start (arguments, a missing
package), 130 interrupted, 141 whoever read the output has left (`... | head`).
"""

from __future__ import annotations

import argparse
import importlib
import os
import select
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from . import extras

PACKAGE = __package__ or "prime_kernels"

# What the optional extra `cli` installs. A command that misses one of these is answered with the line that
# installs them; any other import error is a fault of ours and is shown as it is.
CLI_EXTRA_MODULES = frozenset(extras.names("cli"))
CLI_EXTRA_INSTALL = extras.pip_line("cli")

EXIT_OK = 0
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # what shells use for a program ended by Ctrl-C
EXIT_PIPE = 141  # what shells use for a program ended by the signal that a pipe without reader sends


@dataclass(frozen=True)
class Command:
    """One command: where its `main(argv)` is ("module:function" inside this package), or its sub-commands."""

    summary: str
    target: str = ""
    commands: Mapping[str, Command] | None = None


COMMANDS: Mapping[str, Command] = {
    "doctor": Command("what is installed, what is missing or set wrong, and what fixes it", "doctor:main"),
    "warmup": Command("compile the kernels of a model into the cache; needs no GPU", "warmup:main"),
    "train": Command("train a small MoE language model on real text and check its gradients", "train:main"),
    "parity": Command(
        "compare the kernels with the float64 reference over a matrix of cases", "bench.parity:main"
    ),
    "bench": Command(
        "measure kernels on this machine's GPU, and their memory",
        commands={
            "gemm": Command("the grouped BF16 GEMMs, in TFLOP/s", "bench.gemm:main"),
            "layer": Command("one layer, both directions, beside its GEMMs and torch", "bench.layer:main"),
            "ep": Command("one layer over several GPUs, beside torch's all-to-all", "bench.ep:main"),
            "memory": Command("memory of a rank against the number of ranks", "bench.memory:main"),
            "end-to-end": Command(
                "train a Transformers model with its experts and with ours", "bench.end_to_end:main"
            ),
        },
    ),
}


def _parser(prog: str, commands: Mapping[str, Command]) -> argparse.ArgumentParser:
    width = max(len(name) for name in commands)
    listing = "\n".join(f"  {name:<{width}}  {command.summary}" for name, command in commands.items())
    parser = argparse.ArgumentParser(
        prog=prog,
        description=f"commands:\n{listing}",
        epilog=f"`{prog} COMMAND --help` describes the arguments of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", metavar="COMMAND", help="one of the commands above")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the command")
    return parser


def _load(target: str) -> object:
    module_name, _, function_name = target.partition(":")
    module = importlib.import_module(f".{module_name}", PACKAGE)
    return getattr(module, function_name)


def _dispatch(prog: str, commands: Mapping[str, Command], argv: Sequence[str]) -> int:
    parser = _parser(prog, commands)
    if not argv:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    parsed = parser.parse_args(argv)
    command = commands.get(parsed.command)
    if command is None:
        parser.error(f"unknown command {parsed.command!r}; choose from {', '.join(commands)}")
    name = f"{prog} {parsed.command}"
    if command.commands is not None:
        return _dispatch(name, command.commands, parsed.arguments)
    try:
        function = _load(command.target)
        assert callable(function), command.target
        return int(function(parsed.arguments))
    except SystemExit as stop:
        if not isinstance(stop.code, str):
            raise
        # A command's last words. By itself Python would print them too, and end with 1.
        print(stop.code, file=sys.stderr)
        return EXIT_USAGE
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in CLI_EXTRA_MODULES:
            raise
        print(f"{name}: the package {missing!r} is not installed; {CLI_EXTRA_INSTALL}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _reader_has_left(stream: TextIO) -> bool:
    """Whether `stream` is a pipe (or a socket) that nobody reads any more."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # closed, or a stand-in without a descriptor
        return False
    poll = select.poll()
    poll.register(descriptor, 0)  # errors are reported without being asked for
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `argv` defaults to `sys.argv[1:]`.

    Raises SystemExit as argparse does (0 for `--help`, 2 for an unknown command).
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            code = _dispatch(f"python -m {PACKAGE}", COMMANDS, words)
        except SystemExit:
            sys.stdout.flush()
            raise
        # Here and not when the interpreter ends, which shows the error.
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Not the signal's own way, which would also end a process that loses the socket of a peer.
        left = [stream for stream in (sys.stdout, sys.stderr) if _reader_has_left(stream)]
        if not left:
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in left:
            os.dup2(nowhere, stream.fileno())
        return EXIT_PIPE
