"""Processes of one gloo group that run functions on request: many tests share the cost of starting them."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
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
GROUP_TIMEOUT = timedelta(seconds=60)


class GlooWorld:
    """``size`` processes with an initialised default group. Use as a context manager."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._directory = tempfile.TemporaryDirectory()
        # A server that has imported torch once forks the ranks: about a second less for each of them.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed"])
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            store = str(Path(self._directory.name) / "store")
            process = context.Process(target=_serve, args=(rank, size, store, theirs), daemon=True)
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
        for connection in self._connections:
            connection.send_bytes(message)
        results, errors = [], []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(ANSWER_SECONDS):
                self.close()
                raise TimeoutError(f"rank {rank} of {self.size} did not answer in {ANSWER_SECONDS} s")
            result, error = pickle.loads(connection.recv_bytes())
            results.append(result)
            if error is not None:
                errors.append(f"rank {rank} of {self.size}:\n{error}")
        if errors:
            raise AssertionError("\n".join(errors))
        return results

    def wait(self, seconds: float = ANSWER_SECONDS) -> list[int | None]:
        """Ask all ranks to return, without any clean-up; their exit codes, None for one that hangs."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(seconds)
        return [process.exitcode for process in self._processes]

    def close(self) -> None:
        """End the processes, whatever they do."""
        for process in self._processes:
            process.kill()
            process.join()
        self._directory.cleanup()

    def __enter__(self) -> GlooWorld:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _serve(rank: int, size: int, store: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    join_group(rank, size, store)
    while True:
        try:
            function, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        result, error = None, None
        try:
            result = function(rank, size, *arguments)
        except BaseException:  # noqa: BLE001 -- also what pytest.raises raises; the parent raises it again
            error = traceback.format_exc()
        connection.send_bytes(pickle.dumps((result, error)))


def join_group(rank: int, size: int, store: str) -> None:
    """Initialise the default group over a file."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=GROUP_TIMEOUT
    )
