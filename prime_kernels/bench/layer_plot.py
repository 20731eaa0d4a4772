"""The picture of ``bench layer``: each contender's time in units of DeepGEMM's products, and the roofline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.axes
import matplotlib.figure
import matplotlib.ticker

from .layer_bars import DIRECTIONS, PASSES
from .layer_case import BF16_BYTES, FP32_BYTES
from .layer_contenders import GRAPH, LAUNCH
from .layer_run import LayerResult

PRODUCT_CEILING, COPY_CEILING = "TFLOP/s", "TB/s"  # how the names of the ceilings end
PRODUCTS = "DeepGEMM's products"
# Of what takes several times as long as the rest, the bar is cut and its label tells.
HIGHEST_RATIO = 4.5
GROUP_WIDTH = 0.86
MIN_GROUPS = 3
SMALL = 7


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.2f}" if milliseconds >= 1 else f"{milliseconds:.3f}"


def _styles(results: Sequence[LayerResult], direction: str) -> dict[str, tuple[str, str]]:
    """Label and colour of what was measured in a direction, by the name of its spread."""
    plain, kept = (item for item in PASSES if item.direction == direction)
    how = {plain.name: "", kept.name: ", z kept"} if direction == "forward" else {
        plain.name: ", z recomputed", kept.name: ", z kept"
    }  # fmt: skip
    styles = {
        f"{GRAPH} {plain.name}": (f"prime_kernels{how[plain.name]}: CUDA graph", "#1b7837"),
        f"{LAUNCH} {plain.name}": (f"prime_kernels{how[plain.name]}: launched", "#7fbf7b"),
        f"{GRAPH} {kept.name}": (f"prime_kernels{how[kept.name]}: CUDA graph", "#2166ac"),
        f"{LAUNCH} {kept.name}": (f"prime_kernels{how[kept.name]}: launched", "#92c5de"),
        f"torch eager {direction}": ("torch grouped_mm, eager", "#b2182b"),
        f"torch compile {direction}": ("torch grouped_mm, compile", "#f4a582"),
    }
    return {
        name: style for name, style in styles.items() if any(name in result.spreads for result in results)
    }


def _draw_bars(axes: matplotlib.axes.Axes, results: Sequence[LayerResult], direction: str) -> None:
    styles = _styles(results, direction)
    width = GROUP_WIDTH / len(styles)
    for number, (name, (label, color)) in enumerate(styles.items()):
        drawn = [(group, result) for group, result in enumerate(results) if name in result.spreads]
        places = [group + (number + 0.5) * width - GROUP_WIDTH / 2 for group, _ in drawn]
        times = [result.spreads[name].median for _, result in drawn]
        ratios = [
            milliseconds / result.gemm_sum(direction)
            for milliseconds, (_, result) in zip(times, drawn, strict=True)
        ]
        bars = axes.bar(
            places, [min(ratio, HIGHEST_RATIO) for ratio in ratios], width, label=label, color=color
        )
        texts = [f"{ratio:.2f}x\n{_ms(time)}" for ratio, time in zip(ratios, times, strict=True)]
        labels = axes.bar_label(bars, texts, padding=2, fontsize=SMALL)
        for text in labels:
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.3, "alpha": 0.8})
    axes.axhline(1, color="black", linewidth=1, label=f"sum of {PRODUCTS}")
    for item, style in zip(
        (item for item in PASSES if item.direction == direction and item.bars), ("--", ":"), strict=False
    ):
        assert item.bars is not None
        axes.axhline(
            item.bars.done, color="gray", linewidth=1, linestyle=style,
            label=f"bar for {item.name}: {item.bars.done:.2f}",
        )  # fmt: skip
    axes.set_xticks(
        range(len(results)),
        [f"{result.size.tokens} tokens\nproducts {_ms(result.gemm_sum(direction))} ms" for result in results],
        fontsize=SMALL + 1,
    )
    # A single group does not fill the width.
    margin = max(0.5, (MIN_GROUPS - len(results) + 1) / 2)
    axes.set_xlim(-margin, len(results) - 1 + margin)
    axes.margins(y=0.14)
    axes.set_ylabel("time / sum of products, and ms")
    axes.set_title(direction, fontsize=10)
    axes.legend(fontsize=SMALL, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.13), frameon=False)


def _draw_roofline(axes: matplotlib.axes.Axes, results: Sequence[LayerResult], direction: str) -> None:
    ceilings = results[0].ceilings
    peak = next(value for name, value in ceilings.items() if name.endswith(PRODUCT_CEILING))
    bandwidth = next(value for name, value in ceilings.items() if name.endswith(COPY_CEILING))
    dw_bytes = FP32_BYTES if results[0].dw_dtype == "fp32" else BF16_BYTES
    intensities = []
    for result in results:
        flops = result.size.forward_flops if direction == "forward" else result.size.backward_flops
        intensities.append(flops / result.size.compulsory_bytes(dw_bytes)[direction])

    def curve(times: Sequence[float | None]) -> tuple[list[float], list[float]]:
        """Where there is a time: the intensity, and TFLOP/s."""
        points = [
            (intensity, result.tflops(milliseconds, direction))
            for intensity, result, milliseconds in zip(intensities, results, times, strict=True)
            if milliseconds is not None
        ]
        return [at for at, _ in points], [speed for _, speed in points]

    curves = {f"sum of {PRODUCTS}": ("black", *curve([result.gemm_sum(direction) for result in results]))}
    for name, (label, color) in _styles(results, direction).items():
        if not name.startswith(LAUNCH):
            times = [result.spreads[name].median if name in result.spreads else None for result in results]
            curves[label] = (color, *curve(times))
    lowest = min(speed for _, _, speeds in curves.values() for speed in speeds)
    ridge = peak / bandwidth
    left, right = min(*intensities, ridge) / 2, max(*intensities, ridge) * 1.6
    axes.plot([left, ridge, right], [left * bandwidth, peak, peak], color="gray", linewidth=1.5)
    for label, (color, at, speeds) in curves.items():
        axes.plot(at, speeds, "o-", color=color, label=label, markersize=4, linewidth=1)
    for result, intensity in zip(results, intensities, strict=True):
        axes.annotate(
            f"T {result.size.tokens}", (intensity, peak), (0, 4), textcoords="offset points",
            fontsize=SMALL - 1, rotation=45, ha="left",
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    axes.set_ylim(min(lowest, left * bandwidth) / 1.2, peak * 1.5)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
        axis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    axes.set_xlabel("FLOP per byte that must be moved (weights, inputs and outputs once)")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(
        f"{direction}, roofline: {peak:.0f} TFLOP/s (torch bf16 product), {bandwidth:.1f} TB/s (device copy)",
        fontsize=9,
    )
    axes.grid(alpha=0.25, which="both")
    axes.legend(fontsize=SMALL, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False)


def draw(results: Sequence[LayerResult], title: str, path: Path) -> None:
    """Bars of both directions by number of tokens, and their rooflines, as a PNG."""
    figure = matplotlib.figure.Figure(figsize=(14, 13), dpi=100, layout="constrained")
    grid = figure.add_gridspec(3, 2, height_ratios=(1, 1, 1.15))
    for column, direction in enumerate(DIRECTIONS):
        _draw_bars(figure.add_subplot(grid[column, :]), results, direction)
        _draw_roofline(figure.add_subplot(grid[2, column]), results, direction)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path)
