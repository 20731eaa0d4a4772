#!/usr/bin/env python3
"""Writes the benchmark tables of README.md and docs from the JSON files in ci/results.

`python ci/tables.py` rewrites what stands between `<!-- table: NAME -->` and `<!-- end of table -->`;
`python ci/tables.py --check` changes nothing and exits with 1 when a table is not that of the newest result.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tabulate import tabulate

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "ci" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "end-to-end.md")
GIB = 2**30
LAYER = "*-layer-*-????-??-??.json"
DATE = slice(-len("2026-12-31"), None)  # of a result's name without its suffix
END_TO_END = "*-end-to-end-????-??-??.json"
MISSING = "-"
NOT_MEASURED = "Not measured on a GPU yet."
LOSS_KEYS = ("first", "largest")
TABLE = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def newest(pattern: str) -> tuple[Path, dict[str, Any]]:
    """The result whose name (which ends in its date) sorts last."""
    path = max(RESULTS.glob(pattern))
    return path, json.loads(path.read_text("utf-8"))


def source_line(path: Path, result: dict[str, Any]) -> str:
    """Where a table's figures come from."""
    when = f"{result['date'][:10]}, commit {result['commit'][:7]}"
    return (
        f"{result['hardware']}; torch {result['torch']}; {when}; "
        f"{result['method']}; {code(result['command'])} "
        f"([{path.name}]({{to_root}}{path.relative_to(ROOT).as_posix()}))"
    )


def code(command: str) -> str:
    """A command line as code, a description of one as it is."""
    return f"`{command}`" if command.startswith("python") else command


def layer_name(layer: dict[str, Any]) -> str:
    """A layer's row label: model, sizes and this rank's load."""
    sizes = f"H {layer['hidden']}, I {layer['intermediate']}"
    return f"{layer['model']} ({sizes}), {layer['experts']} local experts, {layer['rows']} rows"


def grouped_gemm() -> str:
    """Every GEMM of every layer."""
    path, result = newest("*-grouped-gemm-????-??-??.json")
    rows = [
        [
            layer_name(layer),
            gemm["name"],
            f"{gemm['ms']:.2f}",
            f"{gemm['tflops']:.0f}",
            f"{gemm['relative_error']:.1e}",
        ]
        for layer in result["layers"]
        for gemm in layer["gemms"]
    ]
    table = markdown(["layer", "GEMM", "ms", "TFLOP/s", "relative error"], rows)
    ceilings = "; ".join(f"{name}: {value:.1f}" for name, value in result["ceilings"].items())
    return f"{source_line(path, result)}. Ceilings of the same run: {ceilings}.\n\n{table}"


def grouped_gemm_summary() -> str:
    """One row a layer: the sum of its GEMMs, and the slowest and fastest of them."""
    path, result = newest("*-grouped-gemm-????-??-??.json")
    rows = []
    for layer in result["layers"]:
        speeds = [gemm["tflops"] for gemm in layer["gemms"]]
        sums = [f"{layer['forward_ms']:.2f}", f"{layer['backward_ms']:.2f}"]
        rows.append([layer_name(layer), *sums, f"{min(speeds):.0f} to {max(speeds):.0f}"])
    headers = ["grouped BF16 GEMMs of one layer", "forward ms", "backward ms", "TFLOP/s"]
    return f"{source_line(path, result)}\n\n{markdown(headers, rows)}"


def layer_results() -> list[tuple[Path, dict[str, Any]]]:
    """The newest sweep of `bench layer` for every model and number of local experts, smallest model first."""
    newest_of: dict[tuple[int, str, int], tuple[Path, dict[str, Any]]] = {}
    for path in sorted(RESULTS.glob(LAYER), key=lambda path: (path.stem[DATE], path.name)):
        result = json.loads(path.read_text("utf-8"))
        size = result["layers"][0]["size"]
        newest_of[size["hidden"], size["model"], size["experts"]] = (path, result)
    return [newest_of[key] for key in sorted(newest_of)]


def pass_rows(size: dict[str, Any], passes: dict[str, Any]) -> list[list[str]]:
    """One row a pass of the kernels at one number of tokens."""
    name = f"{size['model']} (H {size['hidden']}, I {size['intermediate']}), {size['experts']} local experts"
    rows = []
    for what, figures in passes.items():
        times = [f"{figures[key]:.3f}" for key in ("ms", "launched_ms", "gemm_sum_ms")]
        ratios = [figures[f"ratio_to_{peer}"] for peer in ("gemm_sum", "torch_eager", "torch_compile")]
        to_products, *to_torch = [MISSING if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        verdict = figures["verdict"] or MISSING
        rows.append([name, str(size["tokens"]), what, *times, to_products, verdict, *to_torch])
    return rows


def layer_table(only_largest: bool) -> str:
    """The passes of the fused kernels, at every number of tokens or at the largest of each sweep."""
    results = layer_results()
    if not results:
        return NOT_MEASURED
    lines, rows = [], []
    for path, result in results:
        slower = result["slower_than_torch_compile"]
        line = f"- {source_line(path, result)}."
        if slower is not None:
            line += f" Slower than torch compile: {', '.join(slower) or 'nowhere'}."
        lines.append(line)
        layers = sorted(result["layers"], key=lambda layer: layer["size"]["tokens"])
        for layer in layers[-1:] if only_largest else layers:
            rows += pass_rows(layer["size"], layer["passes"])
    headers = [
        "layer", "tokens", "pass", "ms", "launched ms", "products ms", "to products", "bar", "to torch eager",
        "to torch compile",
    ]  # fmt: skip
    return "\n".join(lines) + f"\n\n{markdown(headers, rows)}"


def end_to_end_rows(result: dict[str, Any]) -> list[list[str]]:
    """Variant, ms per step, tokens per second, speed relative to the first variant, peak memory."""
    first = next(iter(result["variants"].values()))["step"]["median"]
    return [
        [
            variant["label"],
            f"{variant['step']['median']:.1f}",
            f"{variant['tokens_per_second']:,.0f}",
            f"{first / variant['step']['median']:.2f}",
            f"{variant['peak_bytes'] / GIB:.1f}",
        ]
        for variant in result["variants"].values()
    ]


def end_to_end_summary() -> str:
    """One row a variant of the training run."""
    if not any(RESULTS.glob(END_TO_END)):
        return NOT_MEASURED
    path, result = newest(END_TO_END)
    headers = ["experts", "ms per step", "tokens/s", "speed", "peak GiB"]
    return f"{result['title']}. {source_line(path, result)}\n\n{markdown(headers, end_to_end_rows(result))}"


def end_to_end() -> str:
    """The same with everything that was measured, and how far the losses are apart."""
    if not any(RESULTS.glob(END_TO_END)):
        return NOT_MEASURED
    path, result = newest(END_TO_END)
    headers = [
        "experts", "ms per step", "tokens/s", "speed", "peak GiB", "between steps GiB", "spread", "forward",
        "backward", "optimizer", "last loss", "difference of the first loss", "largest difference",
    ]  # fmt: skip
    rows = []
    for row, (name, variant) in zip(end_to_end_rows(result), result["variants"].items(), strict=True):
        step, parts = variant["step"], variant["parts"]
        difference = result["loss_differences"].get(name)
        rows.append(
            [
                *row,
                f"{variant['state_bytes'] / GIB:.1f}",
                f"{step['low']:.1f} to {step['high']:.1f}",
                *(f"{parts[part]['median']:.1f}" for part in ("forward", "backward", "optimizer")),
                f"{variant['losses'][-1]:.3f}",
                *(["", ""] if difference is None else [f"{difference[key]:.1e}" for key in LOSS_KEYS]),
            ]
        )
    missing = "".join(f" Not measured: {name}: {reason}." for name, reason in result["failures"].items())
    source = f"{source_line(path, result)}; Transformers {result['transformers']}"
    return f"{result['title']}. {source}.{missing}\n\n{markdown(headers, rows)}"


def markdown(headers: list[str], rows: list[list[str]]) -> str:
    """A Markdown table of texts."""
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


TABLES: dict[str, Callable[[], str]] = {
    "grouped-gemm": grouped_gemm,
    "grouped-gemm-summary": grouped_gemm_summary,
    "layer": lambda: layer_table(only_largest=False),
    "layer-summary": lambda: layer_table(only_largest=True),
    "end-to-end": end_to_end,
    "end-to-end-summary": end_to_end_summary,
}


def rendered(page: Path) -> str:
    """The page's text with every table as the results have it. Raises KeyError for an unknown table."""
    to_root = "../" * len(page.parent.relative_to(ROOT).parts)

    def fill(match: re.Match[str]) -> str:
        text = TABLES[match["name"]]().replace("{to_root}", to_root)
        return f"{match[1]}\n{text}\n\n{match[3]}"

    return TABLE.sub(fill, page.read_text("utf-8"))


def main() -> int:
    """Write the tables, or with --check compare them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing, exit with 1 when a table is old"
    )
    check = parser.parse_args().check
    stale = [page for page in PAGES if rendered(page) != page.read_text("utf-8")]
    for page in stale:
        if not check:
            page.write_text(rendered(page), "utf-8")
        print(f"{page.relative_to(ROOT)}: {'old tables, run ci/tables.py' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
