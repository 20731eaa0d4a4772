"""The tables and the picture of ``bench ep``, over all numbers of ranks whose records lie in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.axes
import matplotlib.figure
from tabulate import tabulate

from .ep_run import CONTENDERS, DIRECTIONS, EpResult
from .ep_summary import EXPOSED, exposed, load_records, speed_up, tflops
from .layer_case import FLOP_CONVENTION

MARKDOWN_NAME, PNG_NAME = "ep.md", "ep.png"
COLORS = {
    "mega_moe": "tab:green",
    "mega_moe keep z": "tab:olive",
    "torch eager": "tab:red",
    "torch compile": "tab:orange",
}
OURS = ("mega_moe", "mega_moe keep z")
GIB, PERCENT = 2**30, 100
ENVIRONMENT = ("date", "hardware", "command", "commit", "package", "torch", "cuda", "method")


def _rows(result: EpResult) -> list[list[str]]:
    rows = []
    for direction in DIRECTIONS:
        for who in (name for name in CONTENDERS if name in result.times):
            parts = exposed(result, who, direction)
            against = [speed_up(result, who, other, direction) for other in ("torch eager", "torch compile")]
            rows.append(
                [
                    result.size.name, str(result.size.ranks), direction, who,
                    f"{parts.over_ranks:.3f}", f"{parts.alone:.3f}", f"{parts.ms:.3f}",
                    f"{parts.share * PERCENT:.0f} %", f"{tflops(result, parts.over_ranks, direction):.0f}",
                    *("" if value is None else f"{value:.2f}" for value in against),
                ]
            )  # fmt: skip
    return rows


def time_table(results: Sequence[EpResult], style: str = "simple") -> str:
    """Milliseconds of every contender, what of them is exposed communication, and speed-ups."""
    headers = [
        "layer", "EP", "direction", "what", "ms", "ms alone", "exposed ms", "exposed", "TFLOP/s per rank",
        "x torch eager", "x torch compile",
    ]  # fmt: skip
    rows = [row for result in results for row in _rows(result)]
    return tabulate(rows, headers=headers, tablefmt=style, disable_numparse=True)


def notes(results: Sequence[EpResult]) -> list[str]:
    """What belongs beside the table."""
    lines = [
        f"{EXPOSED[0].upper()}{EXPOSED[1:]}.",
        f"TFLOP/s: {FLOP_CONVENTION}.",
        "The kernels' times include staging; torch's all-to-all waits for the host once in each forward.",
    ]
    for result in results:
        sent = ", ".join(f"{way} {result.size.sent_bytes(way) / GIB:.2f} GiB" for way in DIRECTIONS)
        name = f"{result.size.name}, EP {result.size.ranks}"
        worst = ", ".join(f"{output} {value:.1e}" for output, value in result.differences.items())
        lines.append(
            f"{name}: each rank sends {sent}; differences of the kernels from torch eager: {worst or 'none'}."
        )
        lines += [f"{name}: not measured: {who}: {why}" for who, why in result.failures.items()]
    return lines


def as_text(results: Sequence[EpResult]) -> str:
    """Everything, for a terminal."""
    return "\n\n".join([time_table(results), "\n".join(notes(results))])


def as_markdown(records: Sequence[tuple[dict[str, Any], list[EpResult]]]) -> str:
    """Everything, for a document."""
    results = [result for _, theirs in records for result in theirs]
    facts = [[name, *(record.get(name, "") for record, _ in records)] for name in ENVIRONMENT]
    runs = [f"EP {record['ranks']}" for record, _ in records]
    sections = [
        "# One layer, expert parallel",
        time_table(results, "github"),
        "\n".join(f"- {line}" for line in notes(results)),
        tabulate(facts, headers=["run", *runs], tablefmt="github", disable_numparse=True),
        f"![time over the ranks and exposed communication]({PNG_NAME})",
    ]
    return "\n\n".join(sections) + "\n"


def _draw(axes: matplotlib.axes.Axes, results: Sequence[EpResult], direction: str) -> None:
    """Time against EP, and dashed what of it is exposed."""
    for who in CONTENDERS:
        measured = [result for result in results if who in result.times]
        parts = [exposed(result, who, direction) for result in measured]
        ranks = [result.size.ranks for result in measured]
        axes.plot(ranks, [part.over_ranks for part in parts], "o-", color=COLORS[who], label=who)
        axes.plot(ranks, [part.ms for part in parts], "x--", color=COLORS[who])
    axes.set_xscale("log", base=2)
    axes.set_xticks([result.size.ranks for result in results])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
    axes.set_title(f"{results[0].size.name}: {direction}", fontsize=9)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.25)


def draw(results: Sequence[EpResult], path: Path) -> None:
    """One row for each layer and number of tokens: both directions against EP, as a PNG."""
    layers: dict[str, list[EpResult]] = {}
    for result in results:
        layers.setdefault(result.size.name, []).append(result)
    figure = matplotlib.figure.Figure(figsize=(10, 2.6 * len(layers) + 0.8), dpi=110, layout="constrained")
    grid = figure.subplots(len(layers), len(DIRECTIONS), squeeze=False)
    for row, theirs in zip(grid, layers.values(), strict=True):
        for axes, direction in zip(row, DIRECTIONS, strict=True):
            _draw(axes, theirs, direction)
    grid[0][0].legend(fontsize=7)
    figure.supxlabel("ranks (EP), tokens per rank fixed", fontsize=9)
    figure.supylabel("ms (dashed: exposed communication)", fontsize=9)
    figure.savefig(path)


def write_reports(directory: Path) -> list[Path]:
    """Make ep.md and ep.png of the records in ``directory``. Returns their paths.

    Raises:
        ValueError: no record is there.
    """
    records = load_records(directory)
    results = [result for _, theirs in records for result in theirs]
    if not results:
        raise ValueError(f"no results of bench ep in {directory}")
    paths = [directory / MARKDOWN_NAME, directory / PNG_NAME]
    paths[0].write_text(as_markdown(records), "utf-8")
    draw(results, paths[1])
    return paths
