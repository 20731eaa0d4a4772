"""Timelines of the kernels: when every warpgroup of every SM waited, multiplied and stored.

A kernel compiled with tracing writes one ``TraceEvent`` (params.cuh) per task and math warpgroup: when it
asked for the task, when the first operands were there, when the main loop was over and when the results were
stored.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..sm90 import Sm90Rank

# In the order of ForwardPhase and BackwardPhase in order.h.
FORWARD_PHASES = ("L1", "L2")
BACKWARD_PHASES = ("grad", "dX", "dW2", "dW13")

# TraceEvent: uint32 sm, what, expert, block; uint64 begin, operands, product, end.
EVENT_BYTES = 48
WORDS, LONGS = EVENT_BYTES // 4, EVENT_BYTES // 8
FIRST_TIME = 2  # in 8-byte units
PHASE_SHIFT, WARPGROUP_MASK = 16, 0xFFFF
WARMUPS = 3
NS_PER_US, NS_PER_MS = 1e3, 1e6
PARTS = ("wait", "product", "epilogue")
TIME_BINS = 2400  # columns of the picture


@dataclass(frozen=True)
class Timeline:
    """One launch. Each tensor has one element per event, in the order line, time.

    Attributes:
        phases: their names.
        lines: warpgroups of the grid, whether or not they had a task.
        line, sm, warpgroup, phase, expert, block: int64.
        times: int64 [events, 4], nanoseconds since the first: task asked for, operands there, product over,
            results stored.
        dropped: events that did not fit.
        launch_ns: nanoseconds of the whole call, route plan and last combine included; None: not measured.
    """

    phases: tuple[str, ...]
    lines: int
    line: Tensor
    sm: Tensor
    warpgroup: Tensor
    phase: Tensor
    expert: Tensor
    block: Tensor
    times: Tensor
    dropped: int
    launch_ns: float | None = None

    @property
    def span(self) -> int:
        """Nanoseconds from the first task asked for to the last one stored."""
        return int(self.times.max())


def decode(events: Tensor, counts: Tensor, phases: Sequence[str]) -> Timeline:
    """What a launch wrote.

    Args:
        events: uint8 [lines, capacity, 48].
        counts: int32 [lines], events of each line, also those beyond the capacity.
        phases: names by phase number.

    Raises:
        RuntimeError: no event, or an event of a phase without a name: the kernel was built without tracing,
            or writes another layout than this reads.
    """
    events, counts = events.cpu(), counts.cpu().long()
    lines, capacity, _ = events.shape
    kept = counts.clamp(max=capacity)
    if int(kept.sum()) == 0:
        raise RuntimeError("the launch left no trace events; build the rank with trace=True")
    valid = torch.arange(capacity)[None] < kept[:, None]
    words = events.view(torch.int32).view(lines, capacity, WORDS)[valid].long()
    times = events.view(torch.int64).view(lines, capacity, LONGS)[valid][:, FIRST_TIME:]
    phase = words[:, 1] >> PHASE_SHIFT
    if int(phase.max()) >= len(phases) or int(phase.min()) < 0:
        raise RuntimeError(
            f"trace events of phases {sorted(set(phase.tolist()))}, expected 0 to {len(phases) - 1}"
        )
    return Timeline(
        phases=tuple(phases),
        lines=lines,
        line=torch.arange(lines)[:, None].expand(lines, capacity)[valid],
        sm=words[:, 0],
        warpgroup=words[:, 1] & WARPGROUP_MASK,
        phase=phase,
        expert=words[:, 2],
        block=words[:, 3],
        times=times - times.min(),
        dropped=int((counts - kept).sum()),
    )


def record(rank: Sm90Rank, call: Callable[[], None], phases: Sequence[str]) -> Timeline:
    """The timeline of one ``call`` on a rank built with ``trace=True``, after a few that are not kept."""
    for _ in range(WARMUPS):
        call()
    # Queued behind the warm-ups, so that host time is no part of it.
    start, end = (torch.cuda.Event(enable_timing=True) for _ in ("start", "end"))
    rank.trace_counts.zero_()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    rank.check()
    timeline = decode(rank.trace_events, rank.trace_counts, phases)
    return replace(timeline, launch_ns=start.elapsed_time(end) * NS_PER_MS)


def part_means(timeline: Timeline) -> list[tuple[str, int, list[float]]]:
    """Name, tasks (of a warpgroup) and mean microseconds of each part, of every phase that ran."""
    durations = timeline.times.diff(dim=1).double() / NS_PER_US
    result = []
    for number, name in enumerate(timeline.phases):
        mine = durations[timeline.phase == number]
        if len(mine):
            result.append((name, len(mine), mine.mean(0).tolist()))
    return result


def shares(timeline: Timeline) -> dict[str, float]:
    """What the warpgroups did from the first task to the last, as parts of 1; "no task" is the rest."""
    totals = timeline.times.diff(dim=1).double().sum(0) / (timeline.lines * max(1, timeline.span))
    result = dict(zip(PARTS, totals.tolist(), strict=True))
    return {**result, "no task": 1 - sum(result.values())}


def outline(timeline: Timeline) -> str:
    """One line: the span, its parts, and the whole call where it was measured."""
    parts = ", ".join(f"{name} {share:.1%}" for name, share in shares(timeline).items())
    text = f"from the first task to the last: {timeline.span / NS_PER_US:.0f} us ({parts})"
    if timeline.launch_ns is None:
        return text
    return f"{text}; the whole call: {timeline.launch_ns / NS_PER_US:.0f} us"


def per_line(timeline: Timeline) -> dict[str, Tensor]:
    """Microseconds of every line that had a task.

    "start": until its first operands were there. "waits": for operands later on. "gaps": between tasks.
    "idle at the end": from its last task to the end of the launch's last task.
    """
    durations, begin, end = timeline.times.diff(dim=1).double(), timeline.times[:, 0], timeline.times[:, -1]
    columns: dict[str, list[float]] = {"start": [], "waits": [], "gaps": [], "idle at the end": []}
    for line in timeline.line.unique().tolist():
        mine = (timeline.line == line).nonzero().flatten()
        columns["start"].append(float(timeline.times[mine[0], 1]))
        columns["waits"].append(float(durations[mine[1:], 0].sum()))
        columns["gaps"].append(float((begin[mine[1:]] - end[mine[:-1]]).sum()))
        columns["idle at the end"].append(float(timeline.span - end[mine[-1]]))
    return {name: torch.tensor(values, dtype=torch.float64) / NS_PER_US for name, values in columns.items()}


def summarize(timeline: Timeline) -> str:
    """Two tables: each phase's mean wait, product and epilogue, and where the lines lose time."""
    from tabulate import tabulate

    times = timeline.times.double() / NS_PER_US
    phase_rows = []
    for name, tasks, means in part_means(timeline):
        mine = times[timeline.phase == timeline.phases.index(name)]
        total = float((mine[:, -1] - mine[:, 0]).sum())
        share = total / (timeline.lines * timeline.span / NS_PER_US)
        first, last = float(mine[:, 0].min()), float(mine[:, -1].max())
        phase_rows.append(
            [name, tasks, *(f"{mean:.2f}" for mean in means), f"{share:.1%}", f"{first:.0f}", f"{last:.0f}"]
        )
    headers = ["phase", "tasks", *(f"{part} us" for part in PARTS), "of all time", "first us", "last us"]
    line_rows = [
        [name, *(f"{value:.1f}" for value in (values.mean(), values.min(), values.max()))]
        for name, values in per_line(timeline).items()
    ]
    text = [
        tabulate(phase_rows, headers=headers, disable_numparse=True),
        tabulate(line_rows, headers=["per warpgroup", "mean us", "min", "max"], disable_numparse=True),
        outline(timeline),
    ]
    if timeline.dropped:
        text.append(f"{timeline.dropped} events did not fit and are missing")
    return "\n\n".join(text)


def chrome_events(timeline: Timeline) -> list[dict[str, Any]]:
    """The timeline in the Trace Event format, which Perfetto and chrome://tracing open.

    One lane per warpgroup, sorted by SM; in it each task with its wait, product and epilogue inside.
    """
    columns = zip(
        timeline.line.tolist(),
        timeline.sm.tolist(),
        timeline.warpgroup.tolist(),
        timeline.phase.tolist(),
        timeline.expert.tolist(),
        timeline.block.tolist(),
        timeline.times.tolist(),
        strict=True,
    )
    events: list[dict[str, Any]] = []
    named: set[int] = set()
    for line, sm, warpgroup, phase, expert, block, times in columns:
        lane = {"pid": 0, "tid": line}
        if line not in named:
            named.add(line)
            name = f"SM {sm} warpgroup {warpgroup}"
            events.append({"ph": "M", "name": "thread_name", **lane, "args": {"name": name}})
            order = sm * (WARPGROUP_MASK + 1) + warpgroup
            events.append({"ph": "M", "name": "thread_sort_index", **lane, "args": {"sort_index": order}})
        slices = [(timeline.phases[phase], times[0], times[-1])]
        slices += [(part, *times[i : i + 2]) for i, part in enumerate(PARTS)]
        for index, (name, start, end) in enumerate(slices):
            event = {
                "ph": "X",
                "name": name,
                **lane,
                "ts": start / NS_PER_US,
                "dur": (end - start) / NS_PER_US,
            }
            if index == 0:
                event["args"] = {"expert": expert, "block": block}
            events.append(event)
    return events


# Colours of the picture: nothing, waiting, then product and epilogue of each phase.
_IDLE, _WAIT, _FIRST_PHASE = 0, 1, 2
_COLORS = (
    "#ffffff", "#d62728",
    "#1f77b4", "#aec7e8", "#2ca02c", "#98df8a", "#9467bd", "#c5b0d5", "#8c564b", "#c49c94",
)  # fmt: skip


def raster(timeline: Timeline, bins: int = TIME_BINS) -> Tensor:
    """uint8 [lines, bins], by SM and warpgroup: what the line did, as an index of the picture's colours."""
    image = torch.zeros(timeline.lines, bins, dtype=torch.uint8)
    # A line stays on its SM: sort lines by the SM of their first event.
    place: dict[int, tuple[int, int]] = {}
    for line, sm, warpgroup in zip(
        timeline.line.tolist(), timeline.sm.tolist(), timeline.warpgroup.tolist(), strict=True
    ):
        place.setdefault(line, (sm, warpgroup))
    row_of = {line: row for row, line in enumerate(sorted(place, key=lambda line: place[line]))}
    columns = (timeline.times.double() * (bins / max(1, timeline.span))).long().clamp(max=bins)
    for line, phase, (begin, operands, product, end) in zip(
        timeline.line.tolist(), timeline.phase.tolist(), columns.tolist(), strict=True
    ):
        row, color = image[row_of[line]], _FIRST_PHASE + 2 * phase
        row[begin:operands] = _WAIT
        row[operands:product] = color
        row[product:end] = color + 1
    return image


def draw(timeline: Timeline, path: Path, title: str) -> None:
    """The timeline as a PNG: SMs from top to bottom, time from left to right."""
    import matplotlib.colors
    import matplotlib.figure
    import matplotlib.patches

    figure = matplotlib.figure.Figure(figsize=(16, 9), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    image = raster(timeline)
    per_sm = max(1, int(timeline.warpgroup.max()) + 1)
    axes.imshow(
        image.numpy(),
        cmap=matplotlib.colors.ListedColormap(_COLORS),
        vmin=0,
        vmax=len(_COLORS) - 1,
        aspect="auto",
        interpolation="nearest",
        extent=(0, timeline.span / NS_PER_US, timeline.lines / per_sm, 0),
    )
    labels = ["no task", "waits for operands"]
    for name in timeline.phases:
        labels += [f"{name} product", f"{name} epilogue"]
    handles = [
        matplotlib.patches.Patch(facecolor=color, edgecolor="gray", label=label)
        for color, label in zip(_COLORS, labels, strict=False)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=9)
    axes.set_xlabel("us since the first task")
    axes.set_ylabel("SM")
    axes.set_title(f"{title}\n{outline(timeline)}", fontsize=11)
    figure.savefig(path)


def write_trace(directory: Path, name: str, timeline: Timeline, title: str) -> list[Path]:
    """Write ``name``.json.gz (for Perfetto) and ``name``.png into ``directory``. Returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    perfetto, picture = directory / f"{name}.json.gz", directory / f"{name}.png"
    text = json.dumps(
        {"displayTimeUnit": "ns", "traceEvents": chrome_events(timeline)}, separators=(",", ":")
    )
    with gzip.open(perfetto, "wt", encoding="utf-8") as file:
        file.write(text)
    draw(timeline, picture, title)
    return [perfetto, picture]
