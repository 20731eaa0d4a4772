"""Processes of one gloo group that run functions on request: many tests share the cost of starting them."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Generous for two cores that run other tests beside these; a deadlock ends here.
ANSWER_SECONDS = 120.0
# How long the other ranks have once one has failed: they may wait for it in a collective that never ends.
GRACE_SECONDS = 10.0
GROUP_TIMEOUT = timedelta(seconds=60)
STORE_NAME = "store"


class GlooWorld:
    """``size`` processes with an initialised default group. Use as a context manager.

    Processes that failed a function are ended; the next function gets new ones.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._connections: list[Connection] = []
        self._processes: list[Any] = []

    def _start(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        # A server that has imported torch once forks the ranks: about a second less for each of them.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed"])
        store = str(Path(self._directory.name) / STORE_NAME)
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """``function(rank, size, *arguments)`` on every rank; the results by rank.

        The function must be importable by its module's name. If any rank raises, so does this, with the
        tracebacks of all of them.
        """
        message = pickle.dumps((function, arguments))
        if not self._processes:
            self._start()
        for connection in self._connections:
            # A rank that has already ended left the reason in the connection.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.send_bytes(message)
        results, errors = self._answers()
        silent = sorted(set(range(self.size)) - set(results) - set(errors))
        if not errors and not silent:
            return [results[rank] for rank in range(self.size)]
        self.close()
        if not errors:
            raise TimeoutError(f"ranks {silent} of {self.size} did not answer in {ANSWER_SECONDS} s")
        report = [f"rank {rank} of {self.size}:\n{errors[rank]}" for rank in sorted(errors)]
        if silent:
            report.append(f"ranks {silent} of {self.size} did not answer within {GRACE_SECONDS} s after that")
        raise AssertionError("\n".join(report))

    def _answers(self) -> tuple[dict[int, Any], dict[int, str]]:
        """What the ranks answer in time, in any order: results and errors by rank."""
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        pending = {connection: rank for rank, connection in enumerate(self._connections)}
        deadline = time.monotonic() + ANSWER_SECONDS
        while pending:
            ready = multiprocessing.connection.wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                try:
                    result, error = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    process = self._processes[rank]
                    process.join(GRACE_SECONDS)
                    result, error = None, f"the process ended, exit code {process.exitcode}"
                if error is None:
                    results[rank] = result
                    continue
                if not errors:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                errors[rank] = error
        return results, errors

    def wait(self, seconds: float = ANSWER_SECONDS) -> list[int | None]:
        """Ask all ranks to return, without any clean-up; their exit codes, None for one that hangs."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(seconds)
        return [process.exitcode for process in self._processes]

    def close(self) -> None:
        """End the processes, whatever they do."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._connections, self._processes = [], []
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def __enter__(self) -> GlooWorld:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _serve(rank: int, size: int, store: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    try:
        join_group(rank, size, store)
    except BaseException:  # noqa: BLE001 -- the parent raises it again, in the test that needed the group
        connection.send_bytes(pickle.dumps((None, traceback.format_exc())))
        return
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        try:
            function, arguments = pickle.loads(message)
            answer = pickle.dumps((function(rank, size, *arguments), None))
        except BaseException:  # noqa: BLE001 -- also what pytest.raises raises; the parent raises it again
            answer = pickle.dumps((None, traceback.format_exc()))
        connection.send_bytes(answer)


def join_group(rank: int, size: int, store: str) -> None:
    """Initialise the default group over a file."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=GROUP_TIMEOUT
    )
