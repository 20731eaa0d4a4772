"""The shared-memory protocol of the SM90 kernels, as actors: two CTAs of a cluster, each with a producer, two
math warpgroups and a store warp.

What ``tiles.cuh`` (operand ring), ``tasks.cuh`` (tasks and claims) and ``output.cuh`` (tiles on their way
out) do with the barriers of a cluster, under the names that the headers use. Loads of the copy engine land,
and its stores read, in any order; arrivals at the other CTA come late, but what one CTA tells the other
about a stage comes in its order. Beside the barriers the model knows what lies in each stage and who still
uses it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from kernel_headers import CONSTANTS, COUNTS, GRAD_COLUMNS
from ring_clock import Barrier, Clock, Count, Fault, Position, Steps, Wait

STAGES, CTAS, WARPGROUPS = (CONSTANTS[name] for name in ("kStages", "kClusterSize", "kMathWarpgroups"))
MATH_WARPS, WARPGROUP_THREADS = CONSTANTS["kMathWarps"], CONSTANTS["kWarpgroup"]
TASK_SLOTS, CLAIM_SLOTS, CLAIM_AHEAD = (CONSTANTS[n] for n in ("kTaskSlots", "kClaimSlots", "kClaimAhead"))
OUTPUT_SLOTS, MAX_OUTPUTS = CONSTANTS["kOutputSlots"], CONSTANTS["kMaxOutputs"]
ATOM, NO_MORE_TASKS = CONSTANTS["kAtom"], CONSTANTS["kNoMoreTasks"]


class Out(Enum):
    """How tiles of the first phase (L1, kGrad) leave."""

    SLOTS = auto()  # store_tiles, through the two tiles of each warpgroup
    HELD = auto()  # store_parts, from the last stages of the product, which run_and_hold does not release
    Z_STAGES = auto()  # store_parts, from the stages in which the kept z came


@dataclass(frozen=True)
class Direction:
    """What a kernel's first phase does with the ring."""

    products: int  # over H, one behind the other
    parts: int  # of 64 columns
    out: Out


_FORWARD_PARTS = CONSTANTS["kActivationColumns"] // ATOM
_KEPT_PARTS, _RECOMPUTED_PARTS = (columns // ATOM for columns in GRAD_COLUMNS)
DIRECTIONS = {
    "forward": Direction(1, _FORWARD_PARTS, Out.SLOTS),
    "forward that keeps z": Direction(1, _FORWARD_PARTS, Out.HELD),
    "backward that recomputes z": Direction(2, _RECOMPUTED_PARTS, Out.HELD),
    "backward with kept z": Direction(1, _KEPT_PARTS, Out.Z_STAGES),
}


class Phase(Enum):
    FIRST = auto()  # L1, kGrad
    ROWS = auto()  # L2, kDx
    WEIGHTS = auto()  # kDw2, kDw13


@dataclass(frozen=True)
class Task:
    """A cluster's task; ``reads``: an earlier one of the first phase, whose tiles this one loads."""

    phase: Phase
    depth: int  # k blocks of a product; 0: weight gradient of an expert without rows
    splits_n: bool = False
    idle_cta: bool = False  # the last CTA has no n block
    reads: int | None = None

    def has_rows(self, cta: int) -> bool:
        return not (self.idle_cta and cta == CTAS - 1)


class Mutation(Enum):
    """One mistake each."""

    NONE = auto()
    MATH_RELEASES_EARLY = auto()  # a stage whose product is still under way
    STORE_RELEASES_EARLY = auto()  # a stage that the copy engine is still reading
    HOLDS_ONE_TOO_FEW = auto()
    HOLDS_ONE_TOO_MANY = auto()
    A_WARP_DOES_NOT_ARRIVE = auto()
    STORE_ARRIVES_FOR_ONE_WARP_LESS = auto()
    IDLE_CTA_DOES_NOT_SKIP = auto()
    PEER_IS_NOT_TOLD = auto()
    NO_BARRIER_BEFORE_TILES = auto()  # of all math threads
    SLOT_IS_NOT_AWAITED = auto()  # before a tile is written to it

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


ONE_IN_TEN = 0.1
Tag = tuple[object, ...]


class StageState:
    """What one CTA's stage holds, and who uses it."""

    def __init__(self) -> None:
        self.pieces: dict[str, Tag] = {}  # 64 rows or columns of A or B each
        self.products = 0  # of warpgroups, under way
        self.unread: dict[int, Tag] = {}  # by warpgroup: tiles that the copy engine has not read
        self.released = [0] * WARPGROUPS  # uses that are over


class Cta:
    """Shared memory of one."""

    def __init__(self, cta: int) -> None:
        def barriers(name: str, size: int, extra: str = "") -> list[Barrier]:
            return [Barrier(f"CTA {cta} {name}{extra}[{i}]", COUNTS[name]) for i in range(size)]

        def per_warpgroup(name: str, size: int) -> list[list[Barrier]]:
            return [barriers(name, size, f"[{wg}]") for wg in range(WARPGROUPS)]

        self.stages = [StageState() for _ in range(STAGES)]
        self.full, self.empty = barriers("full", STAGES), barriers("empty", STAGES)
        # Number of the task (NO_MORE_TASKS: the end) and its first stage.
        self.tasks = [(NO_MORE_TASKS, 0)] * TASK_SLOTS
        self.task_full = barriers("task_full", TASK_SLOTS)
        self.task_empty = barriers("task_empty", TASK_SLOTS)
        self.claim_full = barriers("claim_full", CLAIM_SLOTS)
        self.claim_empty = barriers("claim_empty", CLAIM_SLOTS)
        # By warpgroup and slot: a tile that the copy engine has not read.
        self.slots: list[list[Tag | None]] = [[None] * OUTPUT_SLOTS for _ in range(WARPGROUPS)]
        self.output_full = per_warpgroup("output_full", MAX_OUTPUTS)
        self.output_empty = per_warpgroup("output_empty", OUTPUT_SLOTS)
        self.math = Barrier(f"CTA {cta} named barrier of all math threads", WARPGROUPS)


class Math:
    """Where one math warpgroup is."""

    def __init__(self, cta: int, warpgroup: int) -> None:
        self.cta, self.warpgroup = cta, warpgroup
        self.stage = Position(STAGES)
        self.uses = 0  # of its tiles (OutputWriter)
        self.begins = 0  # of the named barrier
        self.under_way: dict[int, Tag] = {}  # products, by stage


class Cluster:
    """Works through ``tasks``, at speeds that depend on ``seed``."""

    def __init__(
        self, direction: Direction, tasks: Sequence[Task], seed: int, mutation: Mutation = Mutation.NONE
    ) -> None:
        self.direction, self.tasks, self.mutation = direction, tuple(tasks), mutation
        self.clock = Clock(seed)
        self.last_arrival: dict[tuple[int, int], float] = {}  # by sending CTA and stage
        self.ctas = [Cta(cta) for cta in range(CTAS)]
        self.tiles_done = [Count(f"tiles_done of task {index}") for index in range(len(tasks))]
        self.stored: Counter[tuple[int, int, int, int]] = Counter()  # (CTA, task, part, warpgroup)
        for cta in range(CTAS):
            self.clock.start(f"producer of CTA {cta}", self._producer(cta))
            self.clock.start(f"store warp of CTA {cta}", self._store(cta))
            for warpgroup in range(WARPGROUPS):
                self.clock.start(f"math warpgroup {warpgroup} of CTA {cta}", self._math(Math(cta, warpgroup)))

    def run(self) -> Counter[tuple[int, int, int, int]]:
        """Returns how often each tile was stored, by (CTA, task, part, warpgroup), or raises a Fault."""
        self.clock.run()
        for cta in self.ctas:
            for barrier in cta.full + cta.empty:
                if not barrier.is_between_phases():
                    raise Fault(f"{barrier.name} ends in the middle of a phase")
        return self.stored

    # --- Ring ---

    def _arrive(self, source: int, stage: int, count: int) -> None:
        """At empty[stage] of both CTAs. What one CTA tells the other about a stage arrives in its order."""
        self.ctas[source].empty[stage].arrive(count)
        for cta in range(CTAS):
            if cta == source or self.mutation is Mutation.PEER_IS_NOT_TOLD:
                continue
            barrier, earlier = self.ctas[cta].empty[stage], self.last_arrival.get((source, stage), 0.0)
            arrive = functools.partial(barrier.arrive, count)
            self.last_arrival[source, stage] = self.clock.message(arrive, not_before=earlier)

    def _release(self, math: Math, stage: int) -> None:
        """OperandRing::release by every warp of a warpgroup."""
        self.ctas[math.cta].stages[stage].released[math.warpgroup] += 1
        warps = MATH_WARPS // WARPGROUPS
        if self.mutation is Mutation.A_WARP_DOES_NOT_ARRIVE and self.clock.random.random() < ONE_IN_TEN:
            warps -= 1
        for _ in range(warps):
            self._arrive(math.cta, stage, 1)

    def _release_for_all(self, cta: int, stage: int) -> None:
        state = self.ctas[cta].stages[stage]
        for warpgroup in range(WARPGROUPS):
            state.released[warpgroup] += 1
        self._arrive(cta, stage, MATH_WARPS - (self.mutation is Mutation.STORE_ARRIVES_FOR_ONE_WARP_LESS))

    def _load(self, cta: int, at: Position, piece: str, tag: Tag) -> None:
        """TMA: lands at some time in that CTA, in the phase that it was meant for."""
        stage, lap = at.index, at.lap

        def land() -> None:
            state, full = self.ctas[cta].stages[stage], self.ctas[cta].full[stage]
            if full.phases != lap:
                raise Fault(f"{full.name}: a load for phase {lap} lands in {full.phases}")
            if state.products or state.unread:
                raise Fault(f"{tag} lands in stage {stage} of CTA {cta}, which is in use")
            state.pieces[piece] = tag
            full.land()

        self.clock.message(land)

    # --- Producer ---

    def _operands(self, task: Task) -> list[Tag]:
        """What comes through the ring for a task, in order."""
        first = task.phase is Phase.FIRST
        products = self.direction.products if first else 1
        operands: list[Tag] = [("product", p, k) for p in range(products) for k in range(task.depth)]
        if first and self.direction.out is Out.Z_STAGES:
            operands += [("z", part) for part in range(self.direction.parts)]
        return operands

    def _loads(self, task: Task, operand: Tag, cta: int) -> list[tuple[str, tuple[int, ...]]]:
        """Pieces that the producer of a CTA loads, each with the CTAs it goes to."""
        both, own = tuple(range(CTAS)), (cta,)
        rows = task.has_rows(cta)
        if operand[0] == "z":
            return [("b0", own), ("b1", own)] if rows else []
        if not task.splits_n:
            return [("a0", own), ("a1", own), (f"b{cta}", both)]
        return [(f"a{cta}", both), *([("b0", own), ("b1", own)] if rows else [])]

    def _expected(self, task: Task, operand: Tag, cta: int) -> int:
        """Pieces that land in a CTA, from either."""
        return sum(cta in to for source in range(CTAS) for _, to in self._loads(task, operand, source))

    def _producer(self, cta: int) -> Steps:
        shared = self.ctas[cta]
        stage, at, claim = Position(STAGES), Position(TASK_SLOTS), Position(CLAIM_SLOTS)
        requested = False

        def request() -> Steps:
            nonlocal requested
            requested = True
            if cta == 0:
                yield shared.claim_empty[claim.index], claim.lap
                self.clock.message(self.ctas[1].claim_full[claim.index].land)

        def take() -> Steps:
            nonlocal requested
            if not requested:
                yield from request()
            requested = False
            if cta != 0:
                full = shared.claim_full[claim.index]
                full.arrive(loads=1)
                yield full, claim.lap + 1
                self.clock.message(self.ctas[0].claim_empty[claim.index].arrive)
            claim.advance()

        def put(index: int) -> Steps:
            yield shared.task_empty[at.index], at.lap
            shared.tasks[at.index] = index, stage.index
            shared.task_full[at.index].arrive()
            at.advance()

        for index, task in enumerate(self.tasks):
            yield from take()
            yield from put(index)
            if task.reads is not None:
                done = sum(self.tasks[task.reads].has_rows(c) for c in range(CTAS))
                yield self.tiles_done[task.reads], done
            operands = self._operands(task)
            for number, operand in enumerate(operands):
                if len(operands) - number <= CLAIM_AHEAD and not requested:
                    yield from request()
                yield shared.empty[stage.index], stage.lap
                for other, peer in enumerate(self.ctas):
                    if min(peer.stages[stage.index].released) < stage.lap:
                        raise Fault(f"stage {stage.index} is filled, but in use by CTA {other}")
                shared.full[stage.index].arrive(loads=self._expected(task, operand, cta))
                for piece, to in self._loads(task, operand, cta):
                    for destination in to:
                        self._load(destination, stage, piece, (index, *operand))
                stage.advance()
        yield from take()  # an index behind the last
        yield from put(NO_MORE_TASKS)
        for _ in range(STAGES):  # drain
            yield shared.empty[stage.index], stage.lap
            stage.advance()

    # --- Math ---

    def _check(self, math: Math, stage: int, tag: Tag, pieces: Sequence[str]) -> StageState:
        state = self.ctas[math.cta].stages[stage]
        for piece in pieces:
            if state.pieces.get(piece) != tag:
                raise Fault(f"CTA {math.cta} finds {state.pieces.get(piece)} in the place of {tag}")
        return state

    def _issue(self, math: Math, tag: Tag) -> None:
        state = self._check(math, math.stage.index, tag, (f"a{math.warpgroup}", "b0", "b1"))
        state.products += 1
        math.under_way[math.stage.index] = tag

    def _retire(self, math: Math, stage: int) -> None:
        tag = math.under_way.pop(stage)
        self._check(math, stage, tag, (f"a{math.warpgroup}", "b0", "b1")).products -= 1

    def _full(self, math: Math) -> Wait:
        return self.ctas[math.cta].full[math.stage.index], math.stage.lap + 1

    def _main_loop(
        self, math: Math, tag: Tag, depth: int, hold: int = 1, pending: int | None = None
    ) -> Generator[Wait | None, None, int]:
        """MainLoop::start: returns the stage of the block that it leaves under way."""
        hold -= hold > 1 and self.mutation is Mutation.HOLDS_ONE_TOO_FEW
        hold += hold > 1 and self.mutation is Mutation.HOLDS_ONE_TOO_MANY
        previous = pending
        for k_block in range(depth):
            yield self._full(math)
            self._issue(math, (*tag, k_block))
            if previous is not None:
                released = k_block == 0 or hold == 1 or k_block + hold <= depth
                early = self.mutation is Mutation.MATH_RELEASES_EARLY
                if early and released:
                    self._release(math, previous)
                yield None
                self._retire(math, previous)
                if released and not early:
                    self._release(math, previous)
            previous = math.stage.index
            math.stage.advance()
        assert previous is not None
        return previous

    def _finish(self, math: Math, last: int, release: bool) -> Steps:
        yield None
        self._retire(math, last)
        if release:
            self._release(math, last)

    def _wait_free(self, math: Math, use: int) -> Steps:
        empty = self.ctas[math.cta].output_empty[math.warpgroup][use % OUTPUT_SLOTS]
        if self.mutation is not Mutation.SLOT_IS_NOT_AWAITED:
            yield empty, use // OUTPUT_SLOTS

    def _own_slot(self, math: Math, use: int) -> list[Tag | None]:
        slots = self.ctas[math.cta].slots[math.warpgroup]
        if slots[use % OUTPUT_SLOTS] is not None:
            raise Fault(f"CTA {math.cta} writes over a tile that is not read: {slots[use % OUTPUT_SLOTS]}")
        return slots

    def _put_tile(self, math: Math, tag: Tag) -> Steps:
        yield from self._wait_free(math, math.uses)
        self._own_slot(math, math.uses)[math.uses % OUTPUT_SLOTS] = tag
        yield None
        full = self.ctas[math.cta].output_full[math.warpgroup][math.uses % OUTPUT_SLOTS]
        full.arrive(WARPGROUP_THREADS)
        math.uses += 1

    def _put_part(self, math: Math, stage: int, part: int, index: int) -> Steps:
        state = self.ctas[math.cta].stages[stage]
        if state.products or math.warpgroup in state.unread:
            raise Fault(f"tiles of task {index} go to stage {stage} of CTA {math.cta}, which is in use")
        state.unread[math.warpgroup] = (index, part)
        yield None
        self.ctas[math.cta].output_full[math.warpgroup][part].arrive(WARPGROUP_THREADS)
        yield None

    def _first_phase(self, math: Math, index: int, depth: int) -> Steps:
        parts, out = self.direction.parts, self.direction.out
        last = None
        for product in range(self.direction.products):
            holds = out is Out.HELD and product + 1 == self.direction.products
            tag = (index, "product", product)
            last = yield from self._main_loop(math, tag, depth, parts if holds else 1, last)
        assert last is not None
        yield from self._finish(math, last, release=out is not Out.HELD)
        first = (math.stage.index - (parts if out is Out.HELD else 0)) % STAGES
        if out is Out.HELD and self.mutation is not Mutation.NO_BARRIER_BEFORE_TILES:
            math.begins += 1
            self.ctas[math.cta].math.arrive()
            yield self.ctas[math.cta].math, math.begins
        for part in range(parts):
            if out is Out.SLOTS:
                yield from self._put_tile(math, (index, part))
                continue
            if out is Out.Z_STAGES:
                yield self._full(math)
                self._check(math, math.stage.index, (index, "z", part), ("b0", "b1"))
                math.stage.advance()
            yield from self._put_part(math, (first + part) % STAGES, part, index)

    def _math(self, math: Math) -> Steps:
        shared, at = self.ctas[math.cta], Position(TASK_SLOTS)
        while True:
            yield shared.task_full[at.index], at.lap + 1
            index, first_stage = shared.tasks[at.index]
            if index == NO_MORE_TASKS:
                return
            task = self.tasks[index]
            if first_stage != math.stage.index:
                raise Fault(f"task {index} starts at stage {first_stage}, its math at {math.stage.index}")
            if not task.has_rows(math.cta):  # skip_operands
                if self.mutation is not Mutation.IDLE_CTA_DOES_NOT_SKIP:
                    for _ in self._operands(task):
                        yield self._full(math)
                        self._release(math, math.stage.index)
                        math.stage.advance()
            elif task.phase is Phase.FIRST:
                yield from self._first_phase(math, index, task.depth)
            elif task.depth:
                last = yield from self._main_loop(math, (index, "product", 0), task.depth)
                yield from self._finish(math, last, release=True)
                for use in range(math.uses, math.uses + OUTPUT_SLOTS):  # store_rows
                    yield from self._wait_free(math, use)
                    self._own_slot(math, use)
                yield None
            shared.task_empty[at.index].arrive(WARPGROUP_THREADS)
            at.advance()
            yield None

    # --- Store ---

    def _bulk_group(self, read: Callable[[], None]) -> tuple[Count, Count]:
        """Stores that the copy engine has been given: `read` and counted when read, counted when written."""
        is_read, is_written = Count("tiles to be read"), Count("tiles to be written")

        def at_read() -> None:
            read()
            is_read.add()
            self.clock.message(is_written.add)

        self.clock.message(at_read)
        return is_read, is_written

    def _store_parts(self, cta: int, index: int, first: int, uses: int) -> Steps:
        shared, groups = self.ctas[cta], []
        for part in range(self.direction.parts):
            stage = (first + part) % STAGES
            state = shared.stages[stage]
            for warpgroup in range(WARPGROUPS):
                yield shared.output_full[warpgroup][part], uses + 1
                if state.unread.get(warpgroup) != (index, part):
                    raise Fault(f"store of task {index} finds {state.unread} in stage {stage} of CTA {cta}")
                self.stored[cta, index, part, warpgroup] += 1
            groups.append(self._bulk_group(state.unread.clear))
            if self.mutation is not Mutation.STORE_RELEASES_EARLY:
                yield groups[-1][0], 1
            self._release_for_all(cta, stage)
        for _, written in groups:
            yield written, 1

    def _store_tiles(self, cta: int, index: int, uses: int) -> Steps:
        shared, groups, emptied = self.ctas[cta], [], []
        for use in range(uses, uses + self.direction.parts):
            slot = use % OUTPUT_SLOTS
            for warpgroup in range(WARPGROUPS):
                yield shared.output_full[warpgroup][slot], use // OUTPUT_SLOTS + 1
                slots = shared.slots[warpgroup]
                if slots[slot] != (index, use - uses):
                    raise Fault(f"store of task {index} finds {slots[slot]} in slot {slot} of CTA {cta}")
                self.stored[cta, index, use - uses, warpgroup] += 1

                def read(slots: list[Tag | None] = slots, slot: int = slot) -> None:
                    slots[slot] = None

                groups.append(self._bulk_group(read))
                emptied.append(shared.output_empty[warpgroup][slot])
                if len(groups) > 1:
                    yield groups[-2][0], 1
                    emptied[-2].arrive()
        yield groups[-1][0], 1
        emptied[-1].arrive()
        for _, written in groups:
            yield written, 1

    def _store(self, cta: int) -> Steps:
        shared, at, uses = self.ctas[cta], Position(TASK_SLOTS), 0
        while True:
            yield shared.task_full[at.index], at.lap + 1
            index, first_stage = shared.tasks[at.index]
            if index == NO_MORE_TASKS:
                return
            task = self.tasks[index]
            if task.phase is Phase.FIRST and task.has_rows(cta):
                if self.direction.out is Out.SLOTS:
                    yield from self._store_tiles(cta, index, uses)
                    uses += self.direction.parts
                else:
                    first = first_stage + len(self._operands(task)) - self.direction.parts
                    yield from self._store_parts(cta, index, first % STAGES, uses)
                    uses += 1
                self.tiles_done[index].add()
            shared.task_empty[at.index].arrive()
            at.advance()
            yield None
