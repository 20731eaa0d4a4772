"""`python -m prime_kernels parity`: compare the kernels with the float64 reference over a matrix of cases.

The matrix is precision x shape x routing x ranks x variant; each axis can be cut down by name. Exit codes:
0 all cases passed, 1 some failed, 2 the run could not start (arguments, a backend or a number of GPUs this
machine lacks).
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from .. import extras, runtime
from .cases import PRECISIONS, ROUTINGS, SHAPES, VARIANTS, Case, build_matrix
from .judge import CaseVerdict, judge_case
from .ranks import LAUNCHERS, CaseRun, RankSettings
from .record import describe_run
from .report import summary_line, verdict_line, write_reports

__all__ = ["default_matrix", "main", "smoke_matrix"]

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
DEFAULT_TIMEOUT_SECONDS = 300.0
CPU_RANKS = (1, 2, 4, 8)
CPU_SHAPES = ("small", "odd", "wide-topk")
# What variants are run with. The reference knows no tiles, so their edges are only seen on a GPU.
VARIANT_SHAPES = {"cpu": CPU_SHAPES, "cuda": (*CPU_SHAPES, "edges")}
# The routing whose skew, duplicates, masked slots, zero weights and unequal ranks every variant is run with.
VARIANT_ROUTING = "mixed"

Axis = TypeVar("Axis")


def smoke_matrix(precision: str = "bf16") -> list[Case]:
    """A few cases on one and two ranks that take seconds and need the core dependencies alone."""
    points = [
        ("balanced", 1, "plain"),
        ("mixed", 1, "clamp"),
        ("mixed", 1, "accumulate"),
        ("mixed", 2, "plain"),
        ("zero-ranks", 2, "shared"),
    ]
    return [
        Case(PRECISIONS[precision], SHAPES["small"], ROUTINGS[routing], ranks, VARIANTS[variant])
        for routing, ranks, variant in points
    ]


def default_matrix(ranks: Iterable[int], device_type: str, precisions: Iterable[str]) -> list[Case]:
    """Every shape and routing as a plain call, and every variant with the ``mixed`` routing and small shapes.

    Shapes of real models, and the one that has edges of tiles everywhere, are left out on the CPU.
    """
    shapes = CPU_SHAPES if device_type == "cpu" else tuple(SHAPES)
    chosen = [PRECISIONS[name] for name in precisions]
    ranks = list(ranks)
    plain = build_matrix(chosen, [SHAPES[s] for s in shapes], ROUTINGS.values(), ranks, [VARIANTS["plain"]])
    others = [variant for variant in VARIANTS.values() if variant.name != "plain"]
    small = [SHAPES[s] for s in VARIANT_SHAPES[device_type]]
    return [*plain, *build_matrix(chosen, small, [ROUTINGS[VARIANT_ROUTING]], ranks, others)]


def _names(text: str, known: Mapping[str, Axis], axis: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ValueError(
            f"--{axis}: unknown {', '.join(unknown) or 'empty list'}; choose from {', '.join(known)}"
        )
    return names


def _ranks(text: str | None, device_type: str) -> list[int]:
    gpus = torch.cuda.device_count() if device_type == "cuda" else 0
    if text is None:
        return [ranks for ranks in CPU_RANKS if device_type == "cpu" or ranks <= gpus]
    try:
        ranks = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--ranks: got {text!r}, needs numbers like 1,2,4") from None
    if min(ranks) < 1:
        raise ValueError(f"--ranks: got {min(ranks)}, needs at least 1")
    if device_type == "cuda" and max(ranks) > gpus:
        raise ValueError(
            f"--ranks: {max(ranks)} ranks need as many GPUs, this machine has {gpus}; "
            "use fewer ranks, or --device cpu"
        )
    return ranks


def _device_type(text: str) -> str:
    if text == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if text == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: cuda was asked for and torch finds no GPU; use --device cpu")
    return text


def _cases(options: argparse.Namespace, device_type: str) -> list[Case]:
    precisions = _names(options.precision, PRECISIONS, "precision")
    if options.smoke:
        # One GPU has no second rank.
        most = torch.cuda.device_count() if device_type == "cuda" else max(CPU_RANKS)
        return [case for case in smoke_matrix(precisions[0]) if case.ranks <= most]
    ranks = _ranks(options.ranks, device_type)
    if not (options.shapes or options.routings or options.variants):
        cases = default_matrix(ranks, device_type, precisions)
    else:
        shapes = _names(options.shapes or ",".join(CPU_SHAPES), SHAPES, "shapes")
        routings = _names(options.routings or ",".join(ROUTINGS), ROUTINGS, "routings")
        variants = _names(options.variants or "plain", VARIANTS, "variants")
        matrix = build_matrix(
            [PRECISIONS[name] for name in precisions],
            [SHAPES[name] for name in shapes],
            [ROUTINGS[name] for name in routings],
            ranks,
            [VARIANTS[name] for name in variants],
        )
        cases = list(matrix)
    if not cases:
        raise ValueError(
            "no case is left: the ranks do not divide the experts of the shapes, or top-k is too small"
        )
    return sorted(cases, key=lambda case: case.ranks)


def _check_backend(cases: Iterable[Case], device_type: str) -> None:
    """Raise RuntimeError now, with the reason, where the chosen backend cannot run one of the precisions."""
    for mma_type in sorted({case.precision.mma_type for case in cases}):
        runtime.resolve_backend(torch.device(device_type), mma_type)


def _judge(run: CaseRun, device: torch.device) -> CaseVerdict:
    if run.error:
        return CaseVerdict(run.case, (), (run.error.strip(),), 0.0)
    return judge_case(run.case, run.outputs, device)


def _run(cases: Sequence[Case], settings: RankSettings) -> list[CaseVerdict]:
    verdicts = []
    device = torch.device(settings.device_type)
    for ranks, group in itertools.groupby(cases, key=lambda case: case.ranks):
        launcher = LAUNCHERS["inline" if ranks == 1 else "processes"]
        for run in launcher(list(group), settings):
            verdict = _judge(run, device)
            verdicts.append(verdict)
            print(verdict_line(verdict), flush=True)
            for failure in verdict.failures:
                print("     " + failure.replace("\n", "\n     "), flush=True)
    return verdicts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="parity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="a few cases in seconds; other axes are ignored")
    parser.add_argument(
        "--backend", choices=runtime.BACKENDS, default=None, help="default: $PRIME_KERNELS_BACKEND, else auto"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU when there is one"
    )
    parser.add_argument(
        "--precision", default="bf16", help=f"names, comma separated: {', '.join(PRECISIONS)}"
    )
    parser.add_argument(
        "--ranks", default=None, help="numbers, comma separated; default: 1,2,4,8 as far as GPUs reach"
    )
    parser.add_argument("--shapes", default=None, help=f"names of: {', '.join(SHAPES)}")
    parser.add_argument("--routings", default=None, help=f"names of: {', '.join(ROUTINGS)}")
    parser.add_argument("--variants", default=None, help=f"names of: {', '.join(VARIANTS)}")
    parser.add_argument(
        "--out", type=Path, default=None, help="folder for parity.json, parity.md and parity.xml"
    )
    parser.add_argument(
        "--timeout", type=float, default=DEFAULT_TIMEOUT_SECONDS, help="seconds one case may take"
    )
    parser.add_argument("--commit", default="", help="recorded commit of a tree without git")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and run nothing")
    return parser


def _plan(options: argparse.Namespace) -> tuple[list[Case], RankSettings]:
    """The cases and how to run them. Raises ValueError or RuntimeError where this machine cannot run them."""
    if options.backend is not None:
        runtime.set_backend(options.backend)
    device_type = _device_type(options.device)
    cases = _cases(options, device_type)
    if options.timeout <= 0:
        raise ValueError(f"--timeout: got {options.timeout:g}, needs a number of seconds above 0")
    if options.out is not None and importlib.util.find_spec("tabulate") is None:
        raise ValueError(
            f"--out: the Markdown table needs the package tabulate; {extras.pip_line('cli')}"
        )
    if options.out is not None and not options.list:
        _check_folder(options.out)
    if not options.list:
        _check_backend(cases, device_type)
    return cases, RankSettings(runtime.get_backend(), device_type, options.timeout)


def _check_folder(folder: Path) -> None:
    """Make the folder of --out before the cases run: their results would be lost if it failed after."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out: {folder} can't be made a folder: {error}; name another") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with the arguments ``argv`` (default: the process's own). Returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    start = time.perf_counter()
    try:
        cases, settings = _plan(options)
    except (ValueError, RuntimeError) as error:
        print(f"parity: {error}", file=sys.stderr)
        return EXIT_USAGE
    if options.list:
        print("\n".join(case.name for case in cases))
        return EXIT_OK
    verdicts = _run(cases, settings)
    command = " ".join([(__package__ or "").partition(".")[0], "parity", *arguments])
    environment = describe_run(command, torch.device(settings.device_type), options.commit)
    environment["backend"] = settings.backend
    if options.out is not None:
        for path in write_reports(options.out, environment, verdicts):
            print(f"wrote {os.path.relpath(path)}")
    print(f"{time.perf_counter() - start:.1f} s on {environment['hardware']}, backend {settings.backend}")
    print(summary_line(verdicts))
    return EXIT_OK if all(verdict.passed for verdict in verdicts) else EXIT_FAILED
