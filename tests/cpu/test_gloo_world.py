"""GlooWorld: an error of a rank is told at once, and the next test gets a whole group."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import gloo_world
import pytest
import torch
import torch.distributed as dist
from gloo_world import GRACE_SECONDS, GlooWorld


@pytest.fixture(scope="module")
def pair() -> Iterator[GlooWorld]:
    with GlooWorld(2) as result:
        yield result


def _sum_of_ranks(rank: int, size: int) -> float:
    total = torch.tensor(float(rank + 1))
    dist.all_reduce(total)
    return total.item()


def _raise_while_a_peer_waits(rank: int, size: int) -> float:
    if rank == 1:
        raise ValueError("planted on rank 1")
    return _sum_of_ranks(rank, size)


def _end_the_process(rank: int, size: int) -> float:
    if rank == 1:
        os._exit(7)
    return _sum_of_ranks(rank, size)


def _cannot_be_sent(rank: int, size: int) -> Any:
    return (lambda: None) if rank == 1 else None


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (_raise_while_a_peer_waits, "ValueError: planted on rank 1"),
        (_end_the_process, "the process ended, exit code 7"),
        (_cannot_be_sent, "Can't pickle"),
    ],
)
def test_an_error_is_told_and_the_group_built_again(
    pair: GlooWorld, function: Callable[..., Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gloo_world, "GRACE_SECONDS", 1.0)
    assert pair.run(_sum_of_ranks) == [3.0, 3.0]
    started = time.monotonic()
    with pytest.raises(AssertionError, match="rank 1 of 2") as caught:
        pair.run(function)
    assert time.monotonic() - started < GRACE_SECONDS
    assert words in str(caught.value)
    assert pair.run(_sum_of_ranks) == [3.0, 3.0]


def test_a_group_that_cannot_be_joined_is_told(pair: GlooWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.close()
    with monkeypatch.context() as patch:
        patch.setattr(gloo_world, "STORE_NAME", "store?not a query")
        with pytest.raises(AssertionError, match="rank 0 of 2"):
            pair.run(_sum_of_ranks)
    assert pair.run(_sum_of_ranks) == [3.0, 3.0]


def test_ranks_that_never_answer_are_named(pair: GlooWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.run(_sum_of_ranks)
    with monkeypatch.context() as patch:
        patch.setattr(gloo_world, "ANSWER_SECONDS", 0.5)
        with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2"):
            pair.run(_sleep_on_rank_1)
    assert pair.run(_sum_of_ranks) == [3.0, 3.0]


def _sleep_on_rank_1(rank: int, size: int) -> None:
    if rank == 1:
        time.sleep(GRACE_SECONDS)
