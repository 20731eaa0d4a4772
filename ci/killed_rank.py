#!/usr/bin/env python3
"""One rank of a group is killed between two calls: the others have to raise within the limit, and exit.

    python ci/killed_rank.py --ranks 8 [--device cpu] [--limit 5] [--junit FILE]

Starts the ranks itself, as torchrun would end all of them with the first. The exit code is 0 if the killed
rank died of the signal and every other one ended soon after, with exit code 1 and a RuntimeError that names
the limit. Works in a checkout that is not installed.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Starting Python and torch, joining the group, compiling the kernels and a first step.
START_SECONDS = 300.0
# From the error to the end of the process.
EXIT_SECONDS = 60.0
RAISED = 1  # exit code of a Python program that an exception ended
READY = "ready"
HIDDEN, INTER, LOCAL_EXPERTS, TOKENS, TOPK = 512, 256, 2, 64, 2
TAIL_CHARACTERS = 2000


@dataclass(frozen=True)
class Ended:
    """How a rank's process ended. ``code`` is None for one that had to be ended from outside."""

    rank: int
    code: int | None
    output: str
    seconds: float


def problems(ended: Sequence[Ended], killed: int, limit: float) -> list[str]:
    """What is wrong with how the ranks ended; nothing is: every one did as it should."""
    found = []
    for process in ended:
        name = f"rank {process.rank}"
        if READY not in process.output:
            found.append(f"{name}: failed before any rank was killed, exit code {process.code}")
        elif process.rank == killed:
            if process.code != -signal.SIGKILL:
                found.append(f"{name}: exit code {process.code}, was to be killed by signal {signal.SIGKILL}")
        elif process.code is None:
            found.append(f"{name}: did not exit within {process.seconds:.0f} s")
        elif process.code != RAISED:
            found.append(f"{name}: exit code {process.code}, expected {RAISED} of a RuntimeError")
        elif not re.search(rf"RuntimeError: {name}\b.*(?: within {limit:g} s|gave up)", process.output):
            found.append(f"{name}: no RuntimeError that names the rank and the limit of {limit:g} s")
    survivors = [process.output for process in ended if process.rank != killed]
    if not found and not any(f"peer {killed} did not" in output for output in survivors):
        found.append(f"no rank names peer {killed}, which was killed")
    return found


def work(device: str, killed: int, limit: float) -> None:
    """One rank: a step that works, then one without the rank that is killed."""
    sys.path.insert(0, str(ROOT))
    import torch
    import torch.distributed as dist

    from prime_kernels import SymmBuffer, bf16_mega_moe, set_device, set_timeout_seconds

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    set_device(place)
    if device == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    buffer = SymmBuffer(None, LOCAL_EXPERTS * size, TOKENS, TOPK, HIDDEN, INTER, mma_type="bf16xbf16")
    y = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, device=place)
    gate_up = torch.ones(LOCAL_EXPERTS, 2 * INTER, HIDDEN, dtype=torch.bfloat16, device=place)
    down = torch.ones(LOCAL_EXPERTS, HIDDEN, INTER, dtype=torch.bfloat16, device=place)
    entries = torch.arange(TOKENS * TOPK, device=place).view(TOKENS, TOPK)

    def call() -> None:
        buffer.x.fill_(1)
        buffer.topk_idx.copy_(entries % buffer.num_experts)
        buffer.topk_weights.fill_(1)
        bf16_mega_moe(y, gate_up, down, buffer)
        buffer.check()

    call()
    dist.barrier()
    set_timeout_seconds(limit)
    print(READY, flush=True)
    if rank == killed:
        os.kill(os.getpid(), signal.SIGKILL)
    call()


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run(ranks: int, device: str, killed: int, limit: float) -> list[Ended]:
    """Start the ranks and wait until all have ended, or are ended for taking too long."""
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, str(Path(__file__).resolve()), "--work", "--ranks", str(ranks)]
    command += ["--device", device, "--killed", str(killed), "--limit", str(limit)]
    processes = [
        subprocess.Popen(
            command, env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    victim = _wait(processes[killed], killed, START_SECONDS)
    died = time.monotonic()
    others = [rank for rank in range(ranks) if rank != killed]
    deadline = died + limit + EXIT_SECONDS
    return [victim, *(_wait(processes[rank], rank, deadline - time.monotonic()) for rank in others)]


def _wait(process: subprocess.Popen[str], rank: int, seconds: float) -> Ended:
    """Wait for a process, and end it after that."""
    started = time.monotonic()
    code: int | None = None
    try:
        output, _ = process.communicate(timeout=max(0.0, seconds))
        code = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    return Ended(rank, code, output, time.monotonic() - started)


def write_junit(path: Path, found: Sequence[str], seconds: float) -> None:
    """One test case, which failed if anything was found."""
    suite = ElementTree.Element("testsuite", name="killed_rank", tests="1", failures=str(int(bool(found))))
    case = ElementTree.SubElement(suite, "testcase", name="one rank killed", time=f"{seconds:.1f}")
    if found:
        ElementTree.SubElement(case, "failure", message=found[0]).text = "\n".join(found)
    path.parent.mkdir(parents=True, exist_ok=True)
    ElementTree.ElementTree(suite).write(path, encoding="unicode", xml_declaration=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, required=True, help="processes, at least 2")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default %(default)s")
    parser.add_argument("--killed", type=int, help="the rank that is killed (default: the last)")
    parser.add_argument("--limit", type=float, default=5.0, help="seconds to wait for a peer (%(default)s)")
    parser.add_argument("--junit", type=Path, help="write the verdict as JUnit XML")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.ranks < 2:
        parser.error(f"--ranks is {options.ranks}; a rank alone has no peer to miss")
    killed = options.ranks - 1 if options.killed is None else options.killed
    if not 0 <= killed < options.ranks:
        parser.error(f"--killed is {killed}; needs a rank from 0 to {options.ranks - 1}")
    if options.work:
        work(options.device, killed, options.limit)
        return 0
    started = time.monotonic()
    ended = run(options.ranks, options.device, killed, options.limit)
    found = problems(ended, killed, options.limit)
    for process in ended:
        lines = [line for line in process.output.splitlines() if "RuntimeError:" in line]
        print(f"rank {process.rank}: exit code {process.code}: {lines[-1] if lines else ''}")
    for problem in found:
        print(f"WRONG: {problem}")
    if found:
        for process in ended:
            print(f"--- rank {process.rank}, end of its output\n{process.output[-TAIL_CHARACTERS:]}")
    if options.junit is not None:
        write_junit(options.junit, found, time.monotonic() - started)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
