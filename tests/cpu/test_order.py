"""The order of work on a CPU, from the header the kernels compile: complete, consistent, without deadlock."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

DRIVER = Path(__file__).with_name("order_driver.cpp")
INCLUDE = Path(__file__).resolve().parents[2] / "prime_kernels" / "include"
BLOCK_M, CLUSTER = 128, 2
FIRST, PUSH = 0, 1  # phases
DYNAMIC, IN_TURN, BACKWARDS = range(3)
FIELDS = 8

Ask = Callable[..., str]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """Sends one line of words to the compiled driver and returns its answer."""
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("needs a C++ compiler (c++, g++ or clang++) on the PATH")
    binary = tmp_path_factory.mktemp("order") / "driver"
    command = [compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{INCLUDE}", str(DRIVER)]
    subprocess.run([*command, "-o", str(binary)], check=True)

    def ask_driver(*words: object) -> str:
        line = " ".join(map(str, words)) + "\n"
        done = subprocess.run([str(binary)], input=line, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return ask_driver


@dataclass(frozen=True)
class Direction:
    """A direction and its numbers of n blocks, as the driver takes them."""

    name: str
    by_rows: tuple[int, int]  # n blocks of the phases over rows
    weights: tuple[tuple[int, int, bool], ...] = ()  # block groups, n blocks, switched on

    def words(self) -> list[int]:
        counts = [number for groups, n_blocks, _ in self.weights for number in (groups, n_blocks)]
        return [*self.by_rows, *counts, *(int(on) for *_, on in self.weights)]

    def expected(self, blocks: int) -> Counter[tuple[int, int, int]]:
        """(phase, m block, n block) of an expert with so many row blocks, once each."""
        tiles = [
            (p, m, n)
            for p, n_blocks in enumerate(self.by_rows)
            for m in range(blocks)
            for n in range(n_blocks)
        ]
        for phase, (groups, n_blocks, on) in enumerate(self.weights, start=len(self.by_rows)):
            tiles += [(phase, m, n) for m in range(groups * CLUSTER) for n in range(n_blocks if on else 0)]
        return Counter(tiles)


@dataclass(frozen=True)
class Task:
    """One task, as the order hands it out."""

    phase: int
    expert: int
    rows: int
    pool_block: int
    block: int
    n_block: int
    splits_n: int
    pushes_passed: int

    def tiles(self, direction: Direction) -> list[tuple[int, int, int]]:
        """(phase, m block, n block) of the cluster's CTAs."""
        if not self.splits_n:
            return [(self.phase, self.block + cta, self.n_block) for cta in range(CLUSTER)]
        n_blocks = direction.by_rows[self.phase]
        return [
            (self.phase, self.block, n) for n in range(self.n_block, min(self.n_block + CLUSTER, n_blocks))
        ]


def tasks_of(answer: str) -> list[Task]:
    numbers = list(map(int, answer.split()))
    return [Task(*numbers[i : i + FIELDS]) for i in range(0, len(numbers), FIELDS)]


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


n_blocks = st.integers(1, 9)
forwards = st.builds(Direction, st.just("forward"), st.tuples(n_blocks, n_blocks))
backwards = st.builds(
    Direction,
    st.just("backward"),
    st.tuples(n_blocks, n_blocks),
    st.tuples(*[st.tuples(st.integers(1, 4), st.integers(1, 4), st.booleans())] * 2),
)
directions = forwards | backwards
# Few rows, none, exactly whole blocks, and many.
counts = st.sampled_from([0, 0, 1, 5, 127, 128, 129, 256]) | st.integers(0, 700)


@st.composite
def tables(draw: st.DrawFn, max_groups: int = 10, max_ranks: int = 4) -> list[list[int]]:
    """Rows of each group (expert) from each rank."""
    ranks = draw(st.integers(1, max_ranks))
    return draw(st.lists(st.lists(counts, min_size=ranks, max_size=ranks), min_size=1, max_size=max_groups))


def order(
    ask: Ask,
    direction: Direction,
    table: Sequence[Sequence[int]],
    min_wave_tasks: int,
    first: int = 0,
    stride: int = 1,
) -> list[Task]:
    shape = (len(table), len(table[0]))
    rows = [count for expert in table for count in expert]
    return tasks_of(
        ask("order", direction.name, *direction.words(), first, stride, min_wave_tasks, *shape, *rows)
    )


many = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
wave_sizes = st.sampled_from([1, 2, 7, 60, 10_000])


@many
@given(directions, tables(), wave_sizes)
@example(Direction("forward", (6, 8)), [[0], [0]], 4)
@example(Direction("backward", (6, 8), ((4, 3, False), (6, 8, False))), [[8192], [0], [1]], 132)
def test_every_tile_once_with_the_right_rows(
    ask: Ask, direction: Direction, table: list[list[int]], min_wave_tasks: int
) -> None:
    tasks = order(ask, direction, table, min_wave_tasks)
    rows = [sum(counts) for counts in table]
    pool_block = 0
    for expert, total in enumerate(rows):
        mine = [task for task in tasks if task.expert == expert]
        blocks = ceil_div(total, BLOCK_M)
        assert Counter(tile for task in mine for tile in task.tiles(direction)) == direction.expected(blocks)
        assert {(task.rows, task.pool_block) for task in mine} <= {(total, pool_block)}
        pool_block += blocks
    # A cluster shares one row block exactly where the expert has an odd one.
    for task in tasks:
        odd_block = task.phase <= PUSH and task.block == ceil_div(task.rows, BLOCK_M) - 1
        assert bool(task.splits_n) == (odd_block and task.block % CLUSTER == 0)


@many
@given(directions, tables(), wave_sizes)
def test_what_a_task_reads_lies_earlier_in_the_order(
    ask: Ask, direction: Direction, table: list[list[int]], min_wave_tasks: int
) -> None:
    tasks = order(ask, direction, table, min_wave_tasks)
    written: Counter[tuple[int, int]] = Counter()  # tiles of the first phase of a (group, row block)
    newest_block = -1
    for task in tasks:
        blocks = ceil_div(task.rows, BLOCK_M)
        if task.phase == FIRST:
            for _, block, _ in task.tiles(direction):
                written[task.expert, block] += 1
            # Dispatch fetches blocks in the order in which they are read, and may rely on it.
            assert task.pool_block + task.block >= newest_block
            newest_block = task.pool_block + task.block
        elif task.phase == PUSH:
            assert all(
                written[task.expert, block] == direction.by_rows[FIRST]
                for _, block, _ in task.tiles(direction)
            )
        else:
            assert all(written[task.expert, block] == direction.by_rows[FIRST] for block in range(blocks))


@many
@given(directions, tables(), wave_sizes)
def test_pushes_end_where_the_order_says(
    ask: Ask, direction: Direction, table: list[list[int]], min_wave_tasks: int
) -> None:
    """Behind a position that is past all pushes nothing is pushed, and groups are pushed in rising order."""
    tasks = order(ask, direction, table, min_wave_tasks)
    pushed = [(task.expert, index) for index, task in enumerate(tasks) if task.phase == PUSH]
    assert pushed == sorted(pushed)
    last = pushed[-1][1] if pushed else -1
    assert not any(task.pushes_passed for task in tasks[: last + 1])


@many
@given(directions, tables(), wave_sizes, st.integers(1, 70))
def test_any_stride_visits_the_same_tasks(
    ask: Ask, direction: Direction, table: list[list[int]], min_wave_tasks: int, stride: int
) -> None:
    """However tasks are handed out, each worker walks the order alone and finds the task of its index."""
    tasks = order(ask, direction, table, min_wave_tasks)
    for first in {0, stride // 2, stride - 1}:
        assert order(ask, direction, table, min_wave_tasks, first, stride) == tasks[first::stride]


def test_weight_gradients_follow_the_pushes_of_their_wave(ask: Ask) -> None:
    """What crosses a link must leave early: an expert returns its rows before its weights are due."""
    direction = Direction("backward", (6, 8), ((8, 3, True), (6, 8, True)))
    tasks = order(ask, direction, [[1024]] * 16, 132)
    last_push = {task.expert: index for index, task in enumerate(tasks) if task.phase == PUSH}
    first_weight = {
        task.expert: index for index, task in reversed(list(enumerate(tasks))) if task.phase > PUSH
    }
    assert all(first_weight[expert] > last_push[expert] for expert in range(16))
    # And work remains for all clusters behind the last push, for the time until every rank is done.
    assert len(tasks) - 1 - max(last_push.values()) > 2 * 66


# --- Ranks at work ---


@dataclass(frozen=True)
class World:
    """R ranks at work; `rows[r]` is rank r's table, [round * local experts][source rank]."""

    direction: Direction
    rows: tuple[tuple[tuple[int, ...], ...], ...]
    rounds: int = 1
    seed: int = 0
    clusters: int = 3
    warps: int = 4
    head_chunks: int = 2
    lead: int = 6
    min_wave_tasks: int = 6
    claims: int = DYNAMIC
    steps: int = 2
    task_slots: int = 3

    def run(self, ask: Ask) -> str:
        experts = len(self.rows[0]) // self.rounds
        numbers = [
            self.seed,
            len(self.rows),
            experts,
            self.rounds,
            self.clusters,
            self.warps,
            self.head_chunks,
        ]
        numbers += [self.lead, self.min_wave_tasks, self.claims, self.steps, self.task_slots]
        numbers += [count for rank in self.rows for group in rank for count in group]
        return ask("simulate", self.direction.name, *self.direction.words(), *numbers)


def draw_world(seed: int) -> World:
    """A random world, from a single worker to eight ranks with skewed and missing rows."""
    choose = random.Random(seed)
    ranks, experts = choose.choice([1, 2, 3, 4, 8]), choose.choice([1, 2, 3, 5, 8])
    forward = choose.random() < 0.5
    rounds = choose.choice([1, 1, 2, 4]) if forward else 1
    if forward:
        direction = Direction("forward", (choose.randint(1, 4), choose.randint(1, 4)))
    else:
        weights = tuple((choose.randint(1, 3), choose.randint(1, 3), choose.random() < 0.7) for _ in range(2))
        direction = Direction("backward", (choose.randint(1, 4), choose.randint(1, 4)), weights)
    kind = choose.choice(["balanced", "skewed", "sparse", "one expert", "nothing"])

    def count(rank: int, group: int) -> int:
        if kind == "nothing" or (kind == "one expert" and (rank, group % experts) != (0, 0)):
            return 0
        if kind == "skewed":
            return choose.choice([0, 1, 3, 400 // ranks])
        return choose.randint(0, 60) if kind == "balanced" else choose.choice([0, 0, 0, 1, 130])

    rows = tuple(
        tuple(tuple(count(rank, group) for _ in range(ranks)) for group in range(rounds * experts))
        for rank in range(ranks)
    )
    return World(
        direction,
        rows,
        rounds,
        seed=choose.randrange(2**31),
        clusters=choose.choice([1, 2, 3, 7]),
        warps=choose.choice([1, 2, 5]),
        head_chunks=choose.choice([0, 1, 4]),
        lead=choose.choice([2, 3, 4, 9, 1000]),
        min_wave_tasks=choose.choice([1, 4, 14, 1000]),
        claims=choose.choice([DYNAMIC, IN_TURN]),
        steps=choose.choice([1, 2, 3]),
        task_slots=choose.choice([1, 2, 3]),
    )


@pytest.mark.parametrize("seeds", [range(start, start + 40) for start in range(0, 240, 40)], ids=str)
def test_no_order_of_progress_deadlocks(ask: Ask, seeds: range) -> None:
    """Every task runs once, every launch of every rank ends, and no rank touches another launch's memory."""
    for seed in seeds:
        world = draw_world(seed)
        assert world.run(ask) == "ok", world


@pytest.mark.parametrize(("claims", "ranks"), list(product([DYNAMIC, IN_TURN], [1, 2, 8])))
def test_the_load_of_a_real_layer(ask: Ask, claims: int, ranks: int) -> None:
    """Qwen3-30B shapes, all ranks alike, the lead and waves that 132 SMs shared by the ranks get."""
    clusters, experts = 66 // ranks, 16 // ranks
    rows = (((512 // ranks,) * ranks,) * experts,) * ranks
    blocks = ((8, 3, True), (6, 8, True))
    world = World(
        Direction("backward", (6, 8), blocks), rows, clusters=clusters, warps=4 * clusters, head_chunks=4
    )
    world = replace(world, lead=2 * clusters, min_wave_tasks=2 * clusters, claims=claims)
    assert world.run(ask) == "ok"
    assert replace(world, direction=Direction("forward", (6, 8))).run(ask) == "ok"


def one_expert(rows: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    return (((rows,),),)


def test_a_lead_below_a_cluster_deadlocks(ask: Ask) -> None:
    """A task reads two blocks at once: the second cannot wait for the first to be worked on."""
    world = World(Direction("forward", (3, 2)), one_expert(4 * BLOCK_M), head_chunks=0, lead=1)
    assert world.run(ask).startswith("deadlock: rank 0 step 1: (phase 0 group 0 block 0)")
    assert replace(world, lead=CLUSTER).run(ask) == "ok"


@pytest.mark.parametrize(
    "direction", [Direction("forward", (3, 2)), Direction("backward", (3, 2), ((2, 1, True),) * 2)]
)
def test_the_reverse_order_deadlocks(ask: Ask, direction: Direction) -> None:
    world = World(direction, one_expert(4 * BLOCK_M), lead=1000, claims=BACKWARDS)
    assert world.run(ask).startswith("deadlock: ")
