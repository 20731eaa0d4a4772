"""What ``bench end-to-end`` leaves behind: a table for people, JSON for machines, a picture for both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib.axes
import matplotlib.figure
from tabulate import tabulate

from .end_to_end_case import LIBRARY, VARIANTS
from .end_to_end_run import (
    FIRST_LOSS_LIMIT,
    LOSS_LIMIT,
    PARTS,
    EndToEndResult,
    VariantResult,
    relative_differences,
)
from .record import write_json

JSON_NAME, MARKDOWN_NAME, PNG_NAME = "end-to-end.json", "end-to-end.md", "end-to-end.png"
GIB = 2**30
COLORS = {LIBRARY: "tab:red", "recompute": "tab:green", "kept-z": "tab:blue"}
COMPILED_ALPHA = 0.55
HEADERS = [
    "experts", "ms per step", "spread", "forward", "backward", "optimizer", "tokens/s", "speed", "peak GiB",
    "between steps GiB", "last loss",
]  # fmt: skip


def label(result: EndToEndResult, name: str) -> str:
    """A variant in words."""
    variant = VARIANTS[name]
    if not variant.ours:
        who = f"Transformers, {result.case.experts_implementation}"
    else:
        who = f"prime_kernels, z {'kept' if variant.keep else 'recomputed'}"
    return f"{who}, layers compiled" if variant.compiled else who


def title(result: EndToEndResult) -> str:
    """One line: the model and its batch."""
    case = result.case
    sizes = f"{case.layers} layers, H {case.hidden}, I {case.intermediate}"
    routing = f"{case.experts} experts, top-{case.topk}"
    counts = next((variant.parameters for variant in result.variants.values()), None)
    size = f" of {counts['total'] / 1e9:.2f} B parameters" if counts else ""
    batch = f"{case.batch} x {case.sequence} tokens"
    return f"Qwen3-MoE{size}: {sizes}, {routing}, {batch}, bf16"


def method(result: EndToEndResult) -> str:
    """How the figures were taken."""
    case = result.case
    return (
        f"median of {case.steps - case.warmup} steps after {case.warmup}, one variant after the other, each "
        f"from the same random weights on the same bytes of {result.text}; fused AdamW, weights, gradients "
        "and optimizer state in bf16, no auxiliary loss"
    )


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / GIB:.1f}"


def _row(result: EndToEndResult, name: str, slowest: float) -> list[str]:
    variant = result.variants[name]
    return [
        label(result, name),
        f"{variant.step.median:.1f}",
        f"{variant.step.low:.1f} - {variant.step.high:.1f}",
        *(f"{variant.parts[part].median:.1f}" for part in PARTS),
        f"{result.tokens_per_second(name):,.0f}",
        f"{slowest / variant.step.median:.2f}",
        _gib(variant.peak_bytes),
        _gib(variant.state_bytes),
        f"{variant.losses[-1]:.3f}",
    ]


def table(result: EndToEndResult, style: str = "simple") -> str:
    """Every variant; ``speed`` is relative to the first."""
    first = next((variant.step.median for variant in result.variants.values()), 0.0)
    rows = [_row(result, name, first) for name in result.variants]
    return tabulate(rows, headers=HEADERS, tablefmt=style, disable_numparse=True)


def agreement_table(result: EndToEndResult, style: str = "simple") -> str:
    """Every variant's losses beside those of the first."""
    rows = [
        [
            label(result, name),
            f"{difference.first:.1e}",
            f"{difference.largest:.1e}",
            "yes" if difference.agrees else "**NO**",
        ]
        for name, difference in result.differences().items()
    ]
    headers = [
        "loss beside that of the first variant", f"first step (at most {FIRST_LOSS_LIMIT:.0e})",
        f"largest (at most {LOSS_LIMIT:.0e})", "agrees",
    ]  # fmt: skip
    return tabulate(rows, headers=headers, tablefmt=style, disable_numparse=True)


def notes(result: EndToEndResult) -> list[str]:
    """What belongs beside the tables."""
    lines = [f"Method: {method(result)}.", f"Our experts ran on the backend {result.backend}."]
    for name, variant in result.variants.items():
        first = f"first step {variant.first_step_ms / 1e3:.1f} s"
        lines.append(f"{label(result, name)}: set-up {variant.setup_seconds:.1f} s, {first}.")
    return lines + [f"Not measured: {name}: {reason}" for name, reason in result.failures.items()]


def as_text(result: EndToEndResult) -> str:
    """Everything, for a terminal."""
    return "\n\n".join([title(result), table(result), agreement_table(result), "\n".join(notes(result))])


def as_markdown(result: EndToEndResult, environment: Mapping[str, str]) -> str:
    """Everything, for a document."""
    facts = [(name, value) for name, value in environment.items() if value]
    sections = [
        f"# {title(result)}",
        table(result, "github"),
        agreement_table(result, "github"),
        "\n".join(f"- {line}" for line in notes(result)),
        tabulate(facts, headers=["run", ""], tablefmt="github", disable_numparse=True),
        f"![loss, time and memory]({PNG_NAME})",
    ]
    return "\n\n".join(sections) + "\n"


def _variant_record(result: EndToEndResult, name: str, variant: VariantResult) -> dict[str, Any]:
    speed = {"label": label(result, name), "tokens_per_second": result.tokens_per_second(name)}
    return {**speed, **asdict(VARIANTS[name]), **asdict(variant)}


def as_record(result: EndToEndResult, environment: Mapping[str, str]) -> dict[str, Any]:
    """Everything, for :func:`json.dumps`."""
    differences = {
        name: {**asdict(difference), "agrees": difference.agrees}
        for name, difference in result.differences().items()
    }
    return {
        **environment,
        "title": title(result),
        "method": method(result),
        "case": asdict(result.case),
        "text": result.text,
        "backend": result.backend,
        "limits": {"first": FIRST_LOSS_LIMIT, "largest": LOSS_LIMIT},
        "variants": {
            name: _variant_record(result, name, variant) for name, variant in result.variants.items()
        },
        "loss_differences": differences,
        "failures": result.failures,
    }


def _style(name: str) -> dict[str, Any]:
    alpha = COMPILED_ALPHA if VARIANTS[name].compiled else 1.0
    return {"color": COLORS[name.removesuffix("-compile")], "alpha": alpha}


def _draw_losses(axes: matplotlib.axes.Axes, result: EndToEndResult) -> None:
    if not result.variants:
        return
    for name, variant in result.variants.items():
        line = "--" if VARIANTS[name].compiled else "-"
        axes.plot(variant.losses, line, label=label(result, name), linewidth=1.3, **_style(name))
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title("loss", fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)


def _draw_differences(axes: matplotlib.axes.Axes, result: EndToEndResult) -> None:
    reference, *others = result.variants
    for name in others:
        line = "--" if VARIANTS[name].compiled else "-"
        values = relative_differences(result.variants[name].losses, result.variants[reference].losses)
        axes.plot(values, line, linewidth=1.3, **_style(name))
    axes.axhline(LOSS_LIMIT, color="black", linestyle=":", linewidth=1.0)
    axes.set_yscale("log")
    axes.set_xlabel("optimizer step")
    axes.set_title(
        f"relative difference from the loss of {label(result, reference)}; dotted: the limit", fontsize=9
    )
    axes.grid(alpha=0.25)


def _draw_bars(
    axes: matplotlib.axes.Axes, result: EndToEndResult, values: Mapping[str, float], texts: list[str]
) -> None:
    labels = [label(result, name) for name in values]
    bars = axes.barh(labels, list(values.values()))
    for bar, name in zip(bars, values, strict=True):
        bar.set(**_style(name))
    axes.bar_label(bars, texts, padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, max(values.values(), default=1.0) * 1.6)
    axes.tick_params(labelsize=8)


def draw(result: EndToEndResult, path: Path) -> None:
    """Losses and their differences, step times and peak memory, as a PNG."""
    figure = matplotlib.figure.Figure(figsize=(13, 7.5), dpi=110, layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(3, 2))
    _draw_losses(figure.add_subplot(grid[0, 0]), result)
    if len(result.variants) > 1:
        _draw_differences(figure.add_subplot(grid[1, 0]), result)
    axes = figure.add_subplot(grid[0, 1])
    times = {name: variant.step.median for name, variant in result.variants.items()}
    texts = [f"{ms:.1f} ms, {result.tokens_per_second(name):,.0f} tokens/s" for name, ms in times.items()]
    _draw_bars(axes, result, times, texts)
    axes.set_title("ms per step", fontsize=10)
    sizes = {name: (variant.peak_bytes or 0) / GIB for name, variant in result.variants.items()}
    if any(sizes.values()):
        axes = figure.add_subplot(grid[1, 1])
        _draw_bars(axes, result, sizes, [f"{size:.1f} GiB" for size in sizes.values()])
        axes.set_title("peak memory, GiB", fontsize=10)
    figure.suptitle(title(result), fontsize=11)
    figure.savefig(path)


def write_reports(directory: Path, result: EndToEndResult, environment: Mapping[str, str]) -> list[Path]:
    """Write end-to-end.json, .md and .png into ``directory`` (made if missing). Returns their paths."""
    paths = [directory / name for name in (JSON_NAME, MARKDOWN_NAME, PNG_NAME)]
    write_json(paths[0], as_record(result, environment))
    paths[1].write_text(as_markdown(result, environment), "utf-8")
    draw(result, paths[2])
    return paths
