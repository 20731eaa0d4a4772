"""No deadlock in a cluster of the SM90 kernels, no operand stage filled while in use: on a model of them.

Random mixes of tasks run through ``ring_model.py`` at random speeds. Mistakes that are put into it on purpose
must be found.
"""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
from kernel_headers import CONSTANTS, COUNTS, LEAST_HIDDEN
from ring_clock import Deadlock, Fault
from ring_model import (
    ATOM,
    CTAS,
    DIRECTIONS,
    MATH_WARPS,
    MAX_OUTPUTS,
    STAGES,
    WARPGROUPS,
    Cluster,
    Mutation,
    Out,
    Phase,
    Task,
)

from prime_kernels.sizes import SIZE_LIMITS

LEAST_DEPTH = LEAST_HIDDEN // CONSTANTS["kBlockK"]
RUNS = 40  # for each direction and depth
TRIES = 60  # in which a mistake must show
KEEPS_Z = "forward that keeps z"


def random_tasks(name: str, depth: int, rng: random.Random) -> list[Task]:
    """3 to 12 tasks of a kernel; half of those behind the first phase read what an earlier one stored."""
    phases = [Phase.FIRST, Phase.FIRST, Phase.FIRST, Phase.ROWS]
    if name.startswith("backward"):
        phases.append(Phase.WEIGHTS)
    rows_depth = rng.choice((1, 2, 3, 6)) * (2 if name.startswith("backward") else 1)
    tasks: list[Task] = []
    for _ in range(rng.randint(3, 12)):
        phase = rng.choice(phases)
        earlier = [i for i, task in enumerate(tasks) if task.phase is Phase.FIRST]
        reads = rng.choice(earlier) if phase is not Phase.FIRST and earlier and rng.random() < 0.5 else None
        if phase is Phase.WEIGHTS:
            weight_depth = rng.choice((0, 0, 1, 2, 5))
            tasks.append(Task(phase, weight_depth, reads=reads if weight_depth else None))
            continue
        splits_n = rng.random() < 0.3
        idle = splits_n and rng.random() < 0.6
        tasks.append(Task(phase, depth if phase is Phase.FIRST else rows_depth, splits_n, idle, reads))
    return tasks


def run(name: str, depth: int, seed: int, mutation: Mutation = Mutation.NONE) -> None:
    direction = DIRECTIONS[name]
    tasks = random_tasks(name, depth, random.Random(seed))
    stored = Cluster(direction, tasks, seed, mutation).run()
    assert stored == Counter(
        (cta, index, part, warpgroup)
        for cta in range(CTAS)
        for index, task in enumerate(tasks)
        if task.phase is Phase.FIRST and task.has_rows(cta)
        for part in range(direction.parts)
        for warpgroup in range(WARPGROUPS)
    )


def test_the_headers_and_the_host_mean_the_same_limits() -> None:
    assert SIZE_LIMITS["sm90"].hidden.least == LEAST_HIDDEN
    assert SIZE_LIMITS["sm90"].hidden.multiple == SIZE_LIMITS["sm90"].intermediate.multiple == ATOM
    assert COUNTS["empty"] == CTAS * MATH_WARPS
    assert LEAST_DEPTH >= STAGES
    assert all(direction.parts <= min(STAGES, MAX_OUTPUTS) for direction in DIRECTIONS.values())


@pytest.mark.parametrize("depth", range(LEAST_DEPTH, LEAST_DEPTH + 5))
@pytest.mark.parametrize("name", DIRECTIONS)
def test_every_tile_is_stored_once_and_nothing_deadlocks(name: str, depth: int) -> None:
    for seed in range(RUNS):
        run(name, depth, seed)


@pytest.mark.parametrize("depth", [2, 3])
def test_a_product_shorter_than_the_ring_hangs_a_forward_that_keeps_z(depth: int) -> None:
    """A part is announced twice before the store warp has seen it: the reason for the least H."""
    found = []
    for seed in range(TRIES):
        try:
            run(KEEPS_Z, depth, seed)
        except Deadlock as deadlock:
            found.append(str(deadlock))
    assert found
    for waits in found:
        assert re.search(r"store warp of CTA (\d): CTA \1 output_full", waits)


@pytest.mark.parametrize(
    ("name", "mutation"),
    [
        (name, mutation)
        for name, direction in DIRECTIONS.items()
        for mutation, outs in {
            Mutation.MATH_RELEASES_EARLY: set(Out),
            Mutation.A_WARP_DOES_NOT_ARRIVE: set(Out),
            Mutation.IDLE_CTA_DOES_NOT_SKIP: set(Out),
            Mutation.PEER_IS_NOT_TOLD: set(Out),
            Mutation.STORE_RELEASES_EARLY: {Out.HELD, Out.Z_STAGES},
            Mutation.STORE_ARRIVES_FOR_ONE_WARP_LESS: {Out.HELD, Out.Z_STAGES},
            Mutation.HOLDS_ONE_TOO_FEW: {Out.HELD},
            Mutation.HOLDS_ONE_TOO_MANY: {Out.HELD},
            Mutation.NO_BARRIER_BEFORE_TILES: {Out.HELD},
            Mutation.SLOT_IS_NOT_AWAITED: {Out.SLOTS},
        }.items()
        if direction.out in outs
    ],
    ids=str,
)
def test_a_mistake_is_found(name: str, mutation: Mutation) -> None:
    for seed in range(TRIES):
        try:
            run(name, LEAST_DEPTH, seed, mutation)
        except Fault:
            return
    pytest.fail(f"{mutation}: unseen in {TRIES} runs")
