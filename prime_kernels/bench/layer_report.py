"""What ``bench layer`` leaves behind: tables for people and JSON for machines, over all numbers of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tabulate import tabulate

from .gemm import BACKWARD, FORWARD
from .layer_bars import BAR_TOKENS, DIRECTIONS, PASSES, Pass
from .layer_case import FLOP_CONVENTION
from .layer_contenders import GRAPH, LAUNCH
from .layer_plot import draw
from .layer_run import SETTLE, LayerResult
from .record import write_json
from .timing import WARMUPS

JSON_NAME, MARKDOWN_NAME, PNG_NAME = "layer.json", "layer.md", "layer.png"
LABELS = {
    GRAPH: "prime_kernels, CUDA graph",
    LAUNCH: "prime_kernels, launched",
    "torch eager": "torch grouped_mm, eager",
    "torch compile": "torch grouped_mm, compile",
}
RIVAL = "torch compile"  # never to be slower than
MIB = 2**20
NOTHING = "-"


def title(results: Sequence[LayerResult]) -> str:
    """One line: the load."""
    size = results[0].size
    tokens = ", ".join(str(result.size.tokens) for result in results)
    return (
        f"{size.model}: H {size.hidden}, I {size.intermediate}, {size.experts} experts, top-{size.topk}, "
        f"bf16, weight gradients in {results[0].dw_dtype}; {tokens} tokens"
    )


def method(results: Sequence[LayerResult]) -> str:
    """How times were taken, in a sentence."""
    rounds = min(spread.count for spread in results[0].spreads.values())
    return (
        f"median of {rounds} rounds after {WARMUPS}, CUDA events, random data; in every round the kernels, "
        f"DeepGEMM's products and torch's layers take turns, each {SETTLE} times untimed and then timed, at "
        "the clocks of its own load"
    )


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]], style: str) -> str:
    return tabulate(list(rows), headers=headers, tablefmt=style, disable_numparse=True)


def _ratio(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def summary_table(results: Sequence[LayerResult], style: str = "simple") -> str:
    """Every pass at every number of tokens, in CUDA graphs and launched, and the ratios of its time."""
    rows = [
        [
            str(result.size.tokens),
            item.name,
            f"{result.ms(GRAPH, item.name):.3f}",
            f"{result.ms(LAUNCH, item.name):.3f}",
            f"{result.gemm_sum(item.direction):.3f}",
            _ratio(result.ratio(item)),
            result.verdict(item) or NOTHING,
            _ratio(result.ratio_to("torch eager", item)),
            _ratio(result.ratio_to(RIVAL, item)),
            f"{result.tflops(result.ms(GRAPH, item.name), item.direction):.0f}",
        ]
        for result in results
        for item in result.passes
    ]
    headers = [
        "tokens", "pass", "ms", "launched ms", "products ms",
        "to products", "bar", "to eager", "to compile", "TFLOP/s",
    ]  # fmt: skip
    return _table(headers, rows, style)


def _time_rows(result: LayerResult, direction: str) -> list[list[str]]:
    total = result.gemm_sum(direction)
    names = FORWARD if direction == "forward" else BACKWARD
    parts = ", ".join(f"{name} {result.spreads[name].median:.3f}" for name in names)
    speed = f"{result.tflops(total, direction):.0f}"
    rows = [[direction, f"DeepGEMM: {parts}", f"{total:.3f}", "", speed, "1.00", ""]]
    passes = [item.name for item in result.passes if item.direction == direction]
    keys = [(who, name) for who in (GRAPH, LAUNCH) for name in passes]
    for who, name in keys + [(peer, direction) for peer in result.peers]:
        spread, host = result.spreads[f"{who} {name}"], result.host_us.get(f"{who} {name}")
        rows.append(
            [
                name,
                LABELS[who],
                f"{spread.median:.3f}",
                f"{spread.low:.3f} - {spread.high:.3f}",
                f"{result.tflops(spread.median, direction):.0f}",
                f"{spread.median / total:.2f}",
                "" if host is None else f"{host:.0f}",
            ]
        )
    return rows


def time_table(result: LayerResult, style: str = "simple") -> str:
    """Everything timed at one number of tokens."""
    rows = [row for direction in DIRECTIONS for row in _time_rows(result, direction)]
    headers = ["pass", "what", "ms", "spread", "TFLOP/s", "to products", "host us"]
    return _table(headers, rows, style)


def memory_table(results: Sequence[LayerResult], style: str = "simple") -> str:
    """MiB of each part and of each contender's peak, by number of tokens."""
    rows: dict[str, list[str]] = {}
    for column, result in enumerate(results):
        peaks = {f"peak of {name}": size for name, size in result.peak_bytes.items()}
        for name, size in {**result.memory, **peaks}.items():
            rows.setdefault(name, [NOTHING] * len(results))[column] = f"{size / MIB:.1f}"
    tokens = [f"{result.size.tokens} tokens" for result in results]
    headers = ["MiB beside weights and inputs", *tokens]
    return _table(headers, ([name, *cells] for name, cells in rows.items()), style)


def _listed(values: Mapping[str, float], style: str) -> str:
    return ", ".join(f"{name} {value:{style}}" for name, value in values.items())


def layer_notes(result: LayerResult) -> list[str]:
    """What belongs beside the table of one number of tokens."""
    size = result.size
    alone = {name: result.spreads[name].median * 1e3 for name in ("route plan", "staging x", "staging dy")}
    lines = [
        f"DeepGEMM multiplies {size.gemm_load().rows} rows (whole blocks, equal loads) where the layer has "
        f"{size.rows}.",
        f"Alone, in us: {_listed(alone, '.0f')}. The route plan is in every pass, staging in none.",
        f"Relative difference from torch eager: {_listed(result.differences, '.1e')}.",
        f"Seconds of this measurement: {_listed(result.seconds, '.1f')}.",
    ]
    return lines + [f"Not measured: {name}: {reason}" for name, reason in result.failures.items()]


def slower_than_rival(results: Sequence[LayerResult]) -> list[str] | None:
    """Where the kernels take longer than torch compile; None unless that was measured everywhere."""
    if not all(RIVAL in result.peers for result in results):
        return None
    ratios = [
        (f"{item.name} at {result.size.tokens} tokens", result.ratio_to(RIVAL, item))
        for result in results
        for item in result.passes
    ]
    return [f"{where} ({ratio:.2f})" for where, ratio in ratios if ratio is not None and ratio > 1]


def _bars(passes: Iterable[Pass]) -> str:
    return "; ".join(
        f"{item.name} {item.bars.lands:.2f} / {item.bars.done:.2f} / {item.bars.goal:.2f}"
        for item in passes
        if item.bars is not None
    )


def notes(results: Sequence[LayerResult]) -> list[str]:
    """What belongs beside the summary."""
    lines = [
        "Ratios are of times: to the sum of DeepGEMM's products, to torch's layer eager and compiled; below "
        "1 the kernels are faster.",
        f"Bars, lands / done / goal, set for {BAR_TOKENS} tokens: {_bars(PASSES)}.",
        f"TFLOP/s: {FLOP_CONVENTION}.",
        f"Method: {method(results)}. Nothing waits between calls: one that is not in a graph and takes less "
        "than its host time shows as much of that as the calls before it did not hide.",
        f"Ceilings of this process: {_listed(results[0].ceilings, '.1f')}.",
        "Peaks: the most that a forward and backward add, outputs and gradients included. z is kept for each "
        "layer, all else is shared by all layers.",
    ]
    slower = slower_than_rival(results)
    if slower is not None:
        lines.insert(1, f"Slower than {RIVAL}: {', '.join(slower) or 'nowhere'}.")
    return lines


def layer_text(result: LayerResult) -> str:
    """One number of tokens, for a terminal."""
    heading = f"{result.size.tokens} tokens, {result.size.rows} rows"
    return "\n\n".join([heading, time_table(result), "\n".join(layer_notes(result))])


def summary_text(results: Sequence[LayerResult]) -> str:
    """What all numbers of tokens come to, for a terminal."""
    parts = [title(results), summary_table(results), memory_table(results), "\n".join(notes(results))]
    return "\n\n".join(parts)


def as_markdown(results: Sequence[LayerResult], environment: Mapping[str, str]) -> str:
    """Everything, for a document."""
    facts = [(name, value) for name, value in environment.items() if value]
    sections = [
        f"# {title(results)}",
        summary_table(results, "github"),
        f"![ratios and roofline]({PNG_NAME})",
        "\n".join(f"- {line}" for line in notes(results)),
        memory_table(results, "github"),
    ]
    for result in results:
        sections += [
            f"## {result.size.tokens} tokens",
            time_table(result, "github"),
            "\n".join(f"- {line}" for line in layer_notes(result)),
        ]
    sections += ["## Run", _table(["run", ""], facts, "github")]
    return "\n\n".join(sections) + "\n"


def _pass_record(result: LayerResult, item: Pass) -> dict[str, Any]:
    milliseconds = result.ms(GRAPH, item.name)
    return {
        "direction": item.direction,
        "ms": milliseconds,
        "launched_ms": result.ms(LAUNCH, item.name),
        "gemm_sum_ms": result.gemm_sum(item.direction),
        "tflops": result.tflops(milliseconds, item.direction),
        "ratio_to_gemm_sum": result.ratio(item),
        "ratio_to_torch_eager": result.ratio_to("torch eager", item),
        "ratio_to_torch_compile": result.ratio_to(RIVAL, item),
        "bars": None if item.bars is None else asdict(item.bars),
        "verdict": result.verdict(item),
    }


def as_record(results: Sequence[LayerResult], environment: Mapping[str, str]) -> dict[str, Any]:
    """Everything, for :func:`json.dumps`: ``layers`` has an entry for each number of tokens."""
    layers = [
        {"passes": {item.name: _pass_record(result, item) for item in result.passes}, **asdict(result)}
        for result in results
    ]
    return {
        **environment,
        "flop_convention": FLOP_CONVENTION,
        "method": method(results),
        "slower_than_torch_compile": slower_than_rival(results),
        "layers": layers,
    }


def write_texts(
    directory: Path, results: Sequence[LayerResult], environment: Mapping[str, str]
) -> list[Path]:
    """Write layer.json and layer.md into ``directory`` (made if missing). Returns their paths."""
    paths = [directory / name for name in (JSON_NAME, MARKDOWN_NAME)]
    write_json(paths[0], as_record(results, environment))
    paths[1].write_text(as_markdown(results, environment), "utf-8")
    return paths


def write_reports(
    directory: Path, results: Sequence[LayerResult], environment: Mapping[str, str]
) -> list[Path]:
    """:func:`write_texts`, and layer.png."""
    paths = write_texts(directory, results, environment)
    draw(results, title(results), directory / PNG_NAME)
    return [*paths, directory / PNG_NAME]
