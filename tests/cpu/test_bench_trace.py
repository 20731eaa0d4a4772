"""Timelines: decoding what the kernels write, statistics, and both files."""

from __future__ import annotations

import ctypes
import gzip
import json
import re
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import pytest
import torch
from torch import Tensor

from prime_kernels.bench.trace import (
    BACKWARD_PHASES,
    EVENT_BYTES,
    FORWARD_PHASES,
    decode,
    outline,
    part_means,
    per_line,
    raster,
    shares,
    summarize,
    write_trace,
)
from prime_kernels.jit.toolchain import package_root

CAPACITY = 4
START = 10**18  # nanoseconds since some day


class Event(ctypes.Structure):
    """TraceEvent of params.cuh."""

    _fields_ = [
        *[(name, ctypes.c_uint32) for name in ("sm", "what", "expert", "block")],
        *[(name, ctypes.c_uint64) for name in ("begin", "operands", "product", "end")],
    ]


def device_tensors(
    lines: list[list[tuple[int, ...]]], counts: list[int] | None = None
) -> tuple[Tensor, Tensor]:
    """What a kernel leaves: each event (sm, warpgroup, phase, expert, block, four times)."""
    events = torch.zeros(len(lines), CAPACITY, EVENT_BYTES, dtype=torch.uint8)
    for line, tasks in enumerate(lines):
        for index, (sm, warpgroup, phase, expert, block, *times) in enumerate(tasks):
            event = Event(sm, phase << 16 | warpgroup, expert, block, *(START + time for time in times))
            events[line, index] = torch.frombuffer(bytearray(event), dtype=torch.uint8)
    return events, torch.tensor(counts or [len(tasks) for tasks in lines], dtype=torch.int32)


# Two warpgroups of SM 7, one of SM 3, and one that had no task.
LINES: list[list[tuple[int, ...]]] = [
    [(7, 0, 0, 4, 9, 0, 2000, 5000, 6000), (7, 0, 1, 4, 9, 6500, 7500, 9500, 10000)],
    [(7, 1, 0, 4, 9, 100, 2100, 5100, 6100)],
    [(3, 0, 0, 5, 2, 0, 1000, 4000, 5000)],
    [],
]


def test_the_layout_is_that_of_the_header() -> None:
    assert ctypes.sizeof(Event) == EVENT_BYTES
    text = (package_root() / "include" / "prime_kernels" / "params.cuh").read_text()
    body = re.search(r"struct TraceEvent \{(.*?)\};", text, re.DOTALL)
    assert body is not None
    fields = re.findall(r"^\s*(uint32_t|uint64_t) (\w+);", body[1], re.MULTILINE)
    sizes = {"uint32_t": 4, "uint64_t": 8}
    assert [(name, sizes[kind]) for kind, name in fields] == [
        (field[0], ctypes.sizeof(field[1])) for field in Event._fields_
    ]


@pytest.mark.parametrize(
    ("phases", "enum"), [(FORWARD_PHASES, "ForwardPhase"), (BACKWARD_PHASES, "BackwardPhase")]
)
def test_phases_are_those_of_the_header(phases: tuple[str, ...], enum: str) -> None:
    text = (package_root() / "include" / "prime_kernels" / "order.h").read_text()
    body = re.search(rf"enum {enum} : uint32_t \{{(.*?)\}}", text)
    assert body is not None
    names = re.findall(r"k(?:Forward)?(\w+) = (\d+)", body[1])
    assert [name.lower() for name, _ in names[: len(phases)]] == [phase.lower() for phase in phases]
    assert [int(number) for _, number in names[: len(phases)]] == list(range(len(phases)))
    assert int(dict(names).get("Phases", dict(names).get("BackwardPhases", "0"))) == len(phases)


def test_decode() -> None:
    timeline = decode(*device_tensors(LINES), FORWARD_PHASES)
    assert timeline.lines == 4
    assert timeline.line.tolist() == [0, 0, 1, 2]
    assert timeline.sm.tolist() == [7, 7, 7, 3]
    assert timeline.phase.tolist() == [0, 1, 0, 0]
    assert timeline.warpgroup.tolist() == [0, 0, 1, 0]
    assert timeline.expert.tolist() == [4, 4, 4, 5]
    assert timeline.times[1].tolist() == [6500, 7500, 9500, 10000]
    assert (timeline.span, timeline.dropped) == (10000, 0)


def test_events_beyond_the_capacity_are_counted() -> None:
    tasks = [(0, 0, 0, 0, i, i, i, i, i + 1) for i in range(CAPACITY)]
    timeline = decode(*device_tensors([tasks], [CAPACITY + 3]), FORWARD_PHASES)
    assert (len(timeline.line), timeline.dropped) == (CAPACITY, 3)
    assert "3 events did not fit" in summarize(timeline)


def test_no_events_and_unknown_phases_are_refused() -> None:
    with pytest.raises(RuntimeError, match="trace=True"):
        decode(*device_tensors([[], []]), FORWARD_PHASES)
    with pytest.raises(RuntimeError, match=r"phases \[3\], expected 0 to 1"):
        decode(*device_tensors([[(0, 0, 3, 0, 0, 1, 2, 3, 4)]]), FORWARD_PHASES)


def test_means_and_losses() -> None:
    timeline = decode(*device_tensors(LINES), FORWARD_PHASES)
    first, second = part_means(timeline)
    assert first == ("L1", 3, [pytest.approx(5 / 3), 3.0, 1.0])
    assert second == ("L2", 1, [1.0, 2.0, 0.5])
    losses = per_line(timeline)
    assert losses["start"].tolist() == [2.0, 2.1, 1.0]
    assert losses["waits"].tolist() == [1.0, 0.0, 0.0]
    assert losses["gaps"].tolist() == [0.5, 0.0, 0.0]
    assert losses["idle at the end"].tolist() == [0.0, 3.9, 5.0]
    words = [line.split() for line in summarize(timeline).splitlines()]
    assert ["L2", "1", "1.00", "2.00", "0.50", "8.8%", "6", "10"] in words
    assert ["idle", "at", "the", "end", "3.0", "0.0", "5.0"] in words


def test_shares_and_the_whole_call() -> None:
    timeline = decode(*device_tensors(LINES), FORWARD_PHASES)
    parts = shares(timeline)
    # Four warpgroups for 10 us each.
    assert parts == {
        "wait": pytest.approx(6 / 40),
        "product": pytest.approx(11 / 40),
        "epilogue": pytest.approx(3.5 / 40),
        "no task": pytest.approx(19.5 / 40),
    }
    assert "to the last: 10 us (wait 15.0%, product 27.5%, epilogue 8.8%, no task 48.7%)" in outline(timeline)
    assert outline(replace(timeline, launch_ns=12_400.0)).endswith("; the whole call: 12 us")
    assert outline(timeline) in summarize(timeline)


def test_picture_rows_are_sorted_by_sm() -> None:
    image = raster(decode(*device_tensors(LINES), FORWARD_PHASES), bins=10)
    wait, l1, l1_epilogue, l2 = 1, 2, 3, 4
    assert image[0].tolist() == [wait, l1, l1, l1, l1_epilogue, 0, 0, 0, 0, 0]
    assert image[1].tolist() == [wait, wait, l1, l1, l1, l1_epilogue, wait, l2, l2, 5]
    assert not image[3].any()


def test_files(tmp_path: Path) -> None:
    timeline = decode(*device_tensors(LINES), FORWARD_PHASES)
    perfetto, picture = write_trace(tmp_path / "new", "trace-forward", timeline, "a title")
    with gzip.open(perfetto, "rt") as file:
        events = json.load(file)["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {0: "SM 7 warpgroup 0", 1: "SM 7 warpgroup 1", 2: "SM 3 warpgroup 0"}
    slices = [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == 0]
    assert slices[4:] == [("L2", 6.5, 3.5), ("wait", 6.5, 1.0), ("product", 7.5, 2.0), ("epilogue", 9.5, 0.5)]
    assert matplotlib.image.imread(picture).std() > 0.05
