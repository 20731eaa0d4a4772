"""What ``bench layer`` leaves behind: a table for people, JSON for machines, a picture for both."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib.axes
import matplotlib.figure
from tabulate import tabulate

from .gemm import BACKWARD, FORWARD
from .layer_case import BF16_BYTES, FLOP_CONVENTION, FP32_BYTES
from .layer_run import DIRECTIONS, LayerResult
from .timing import REPEATS, WARMUPS

JSON_NAME, MARKDOWN_NAME, PNG_NAME = "layer.json", "layer.md", "layer.png"
METHOD = (
    f"median of {REPEATS} rounds after {WARMUPS}, CUDA events, random data; the kernels and DeepGEMM's "
    "products alternate in the same rounds, torch's layers follow in rounds of their own"
)
LABELS = {
    "kernel graph": "prime_kernels, CUDA graph",
    "kernel launch": "prime_kernels, launched",
    "torch eager": "torch grouped_mm, eager",
    "torch compile": "torch grouped_mm, compile",
}
COLORS = {
    "gemms": "tab:gray",
    "kernel graph": "tab:green",
    "kernel launch": "tab:olive",
    "torch eager": "tab:red",
    "torch compile": "tab:orange",
}
MIB = 2**20
PRODUCT_CEILING, COPY_CEILING = "TFLOP/s", "TB/s"  # how the names of the ceilings end


def contenders(result: LayerResult) -> list[str]:
    """Who was measured in both directions, in the order of the table."""
    return [who for who in LABELS if all(f"{who} {direction}" in result.spreads for direction in DIRECTIONS)]


def title(result: LayerResult) -> str:
    """One line: the load."""
    size = result.size
    return (
        f"{size.model}: H {size.hidden}, I {size.intermediate}, {size.experts} experts, "
        f"{size.tokens} tokens, "
        f"top-{size.topk}, bf16, weight gradients in {result.dw_dtype}"
    )


def _time_rows(result: LayerResult, direction: str) -> list[list[str]]:
    products = FORWARD if direction == "forward" else BACKWARD
    total = result.gemm_sum(direction)
    parts = ", ".join(f"{name} {result.spreads[name].median:.3f}" for name in products)
    rows = [
        [
            direction,
            f"DeepGEMM: {parts}",
            f"{total:.3f}",
            "",
            f"{result.tflops(total, direction):.0f}",
            "1.00",
        ]
    ]
    for who in contenders(result):
        spread = result.spreads[f"{who} {direction}"]
        rows.append(
            [
                direction,
                LABELS[who],
                f"{spread.median:.3f}",
                f"{spread.low:.3f} - {spread.high:.3f}",
                f"{result.tflops(spread.median, direction):.0f}",
                f"{result.ratio(who, direction):.2f}",
            ]
        )
    return rows


def time_table(result: LayerResult, style: str = "simple") -> str:
    """Milliseconds, TFLOP/s and ratio to the sum of DeepGEMM's products."""
    rows = [row for direction in DIRECTIONS for row in _time_rows(result, direction)]
    headers = ["direction", "what", "ms", "spread", "TFLOP/s", "ratio"]
    return tabulate(rows, headers=headers, tablefmt=style, disable_numparse=True)


def memory_table(result: LayerResult, style: str = "simple") -> str:
    """MiB of each part, and the peak of each contender."""
    rows = [[name, f"{size / MIB:.1f}"] for name, size in result.memory.items()]
    rows += [[f"peak of {name}", f"{size / MIB:.1f}"] for name, size in result.peak_bytes.items()]
    headers = ["memory beside weights and inputs", "MiB"]
    return tabulate(rows, headers=headers, tablefmt=style, disable_numparse=True)


def _listed(values: Mapping[str, float], style: str) -> str:
    return ", ".join(f"{name} {value:{style}}" for name, value in values.items())


def notes(result: LayerResult) -> list[str]:
    """What belongs beside the tables."""
    size, plan = result.size, result.spreads["route plan"]
    padded = size.gemm_load().rows
    lines = [
        f"TFLOP/s: {FLOP_CONVENTION}.",
        f"Method: {METHOD}.",
        f"DeepGEMM multiplies {padded} rows (whole blocks, equal loads) where the layer has {size.rows}.",
        f"Route plan alone, as in front of the forward: {plan.median * 1e3:.0f} us.",
        f"Host time of one call: {_listed(result.host_us, '.0f')} us.",
        f"Ceilings in this run: {_listed(result.ceilings, '.1f')}.",
        f"Relative difference from torch eager: {_listed(result.differences, '.1e')}.",
        "Peaks: the most that a forward and backward add, outputs and gradients included.",
    ]
    return lines + [f"Not measured: {name}: {reason}" for name, reason in result.failures.items()]


def as_text(result: LayerResult) -> str:
    """Everything, for a terminal."""
    return "\n\n".join([title(result), time_table(result), memory_table(result), "\n".join(notes(result))])


def as_markdown(result: LayerResult, environment: Mapping[str, str]) -> str:
    """Everything, for a document."""
    facts = [(name, value) for name, value in environment.items() if value]
    sections = [
        f"# {title(result)}",
        time_table(result, "github"),
        memory_table(result, "github"),
        "\n".join(f"- {line}" for line in notes(result)),
        tabulate(facts, headers=["run", ""], tablefmt="github", disable_numparse=True),
        f"![times, ratios and roofline]({PNG_NAME})",
    ]
    return "\n\n".join(sections) + "\n"


def as_record(result: LayerResult, environment: Mapping[str, str]) -> dict[str, Any]:
    """Everything, for :func:`json.dumps`."""
    summary = {
        direction: {
            "gemm_sum_ms": result.gemm_sum(direction),
            "tflops": {
                who: result.tflops(result.spreads[f"{who} {direction}"].median, direction)
                for who in contenders(result)
            },
            "ratio_to_gemm_sum": {who: result.ratio(who, direction) for who in contenders(result)},
        }
        for direction in DIRECTIONS
    }
    return {**environment, "flop_convention": FLOP_CONVENTION, "method": METHOD, **summary, **asdict(result)}


def _draw_bars(axes: matplotlib.axes.Axes, result: LayerResult, direction: str) -> None:
    times = {"gemms": result.gemm_sum(direction)}
    times.update({who: result.spreads[f"{who} {direction}"].median for who in contenders(result)})
    labels = ["sum of DeepGEMM's products", *(LABELS[who] for who in contenders(result))]
    bars = axes.barh(labels, list(times.values()), color=[COLORS[who] for who in times])
    texts = [f"{ms:.2f} ms, {ms / times['gemms']:.2f}x" for ms in times.values()]
    axes.bar_label(bars, texts, padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, max(times.values()) * 1.35)
    axes.set_xlabel("ms (and ratio to the sum of products)")
    axes.set_title(direction, fontsize=10)
    axes.tick_params(labelsize=8)


def _draw_roofline(axes: matplotlib.axes.Axes, result: LayerResult) -> None:
    peak = next(value for name, value in result.ceilings.items() if name.endswith(PRODUCT_CEILING))
    bandwidth = next(value for name, value in result.ceilings.items() if name.endswith(COPY_CEILING))
    dw_bytes = FP32_BYTES if result.dw_dtype == "fp32" else BF16_BYTES
    traffic = result.size.compulsory_bytes(dw_bytes)
    flops = {"forward": result.size.forward_flops, "backward": result.size.backward_flops}
    intensity = {direction: flops[direction] / traffic[direction] for direction in DIRECTIONS}
    ridge = peak / bandwidth
    left, right = min(*intensity.values(), ridge) / 4, max(*intensity.values(), ridge) * 4
    axes.plot([left, ridge, right], [left * bandwidth, peak, peak], color="black", linewidth=1.2)
    axes.annotate(
        f"{peak:.0f} TFLOP/s (torch bf16 product)",
        (ridge, peak),
        (0, 5),
        textcoords="offset points",
        fontsize=8,
    )
    for direction, marker in zip(DIRECTIONS, ("o", "s"), strict=True):
        times = {"gemms": result.gemm_sum(direction)}
        times.update({who: result.spreads[f"{who} {direction}"].median for who in contenders(result)})
        for who, ms in times.items():
            name = LABELS.get(who, "sum of DeepGEMM's products")
            axes.plot(
                intensity[direction],
                result.tflops(ms, direction),
                marker,
                color=COLORS[who],
                label=f"{direction}: {name}",
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOP per byte that must be moved (weights, inputs and outputs once)")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(f"roofline: {bandwidth:.1f} TB/s device copy", fontsize=10)
    axes.grid(alpha=0.25, which="both")
    axes.legend(fontsize=6, loc="lower right")


def draw(result: LayerResult, path: Path) -> None:
    """Bars of both directions and the roofline, as a PNG."""
    figure = matplotlib.figure.Figure(figsize=(13, 8), dpi=110, layout="constrained")
    grid = figure.add_gridspec(2, 2)
    for row, direction in enumerate(DIRECTIONS):
        _draw_bars(figure.add_subplot(grid[row, 0]), result, direction)
    _draw_roofline(figure.add_subplot(grid[:, 1]), result)
    figure.suptitle(title(result), fontsize=11)
    figure.savefig(path)


def write_reports(directory: Path, result: LayerResult, environment: Mapping[str, str]) -> list[Path]:
    """Write layer.json, layer.md and layer.png into ``directory`` (made if missing). Returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / name for name in (JSON_NAME, MARKDOWN_NAME, PNG_NAME)]
    record = json.dumps(as_record(result, environment), indent=1, allow_nan=False) + "\n"
    paths[0].write_text(record, "utf-8")
    paths[1].write_text(as_markdown(result, environment), "utf-8")
    draw(result, paths[2])
    return paths
