"""Train a Qwen3-MoE-shaped model with the experts of Transformers and with ours, and compare.

``python -m prime_kernels bench end-to-end`` builds the same random model for every variant, trains it with
AdamW on the same real text, byte by byte, and reports step time, tokens per second, memory and the loss. It
needs Transformers, reads no file from the network, and runs on a CPU at toy size.

The library's own experts are those of its ``grouped_mm``: the fastest of Transformers 5 that trains with
nothing installed beside it. ``sonicmoe`` has to be downloaded first; with that done,
``--experts-implementation sonicmoe`` measures it.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch

from .. import runtime
from ..train.config import LIMITS
from .end_to_end_case import VARIANTS, EndToEndCase, make_batches
from .end_to_end_run import EndToEndResult, free_memory, run_variant
from .record import describe_run

PACKAGE = (__package__ or "").partition(".")[0]
EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
DEFAULT_LIMIT_SECONDS = 75.0

_HELP = {
    "layers": "decoder layers",
    "hidden": f"width of the residual stream, {LIMITS.hidden}",
    "intermediate": f"width of one expert, {LIMITS.intermediate}",
    "experts": "experts in a layer",
    "topk": "experts per token",
    "batch": "sequences in one step",
    "sequence": "tokens (bytes) in one sequence",
    "steps": "optimizer steps of each variant",
    "warmup": "first steps that are not timed",
    "learning_rate": "of AdamW, constant",
    "seed": "of the weights and the choice of text",
    "experts_implementation": "of the library's own experts, by its name in Transformers",
}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, EndToEndCase]:
    """Arguments and the case they describe; argparse reports what is wrong with them (exit code 2)."""
    parser = argparse.ArgumentParser(
        prog=f"{PACKAGE} bench end-to-end",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for field in fields(EndToEndCase):
        parser.add_argument(
            _flag(field.name),
            type=type(field.default),
            default=field.default,
            metavar="N" if isinstance(field.default, int) else None,
            help=f"{_HELP[field.name]} (default %(default)s)",
        )
    parser.add_argument(
        "--variants", nargs="+", choices=tuple(VARIANTS), default=list(VARIANTS), help="default: all"
    )
    parser.add_argument(
        "--limit-seconds",
        type=float,
        default=DEFAULT_LIMIT_SECONDS,
        help="a variant that takes longer, compiling included, is given up (default %(default)s)",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="write JSON, Markdown and PNG here")
    parser.add_argument("--commit", default="", help="commit to record where there is no checkout")
    arguments = parser.parse_args(argv)
    if not arguments.limit_seconds > 0:
        parser.error(f"--limit-seconds is {arguments.limit_seconds}; needs a positive number")
    if len(set(arguments.variants)) < len(arguments.variants):
        parser.error("--variants names one of them twice")
    try:
        case = EndToEndCase(**{field.name: getattr(arguments, field.name) for field in fields(EndToEndCase)})
    except ValueError as error:
        parser.error(str(error))
    return arguments, case


def command_of(arguments: argparse.Namespace, case: EndToEndCase) -> str:
    """The command line that repeats this run: what differs from the defaults."""
    words = [f"{PACKAGE} bench end-to-end"]
    for field in fields(EndToEndCase):
        value = getattr(case, field.name)
        words += [f"{_flag(field.name)} {value}"] * (value != field.default)
    if arguments.variants != list(VARIANTS):
        words.append(" ".join(["--variants", *arguments.variants]))
    if arguments.limit_seconds != DEFAULT_LIMIT_SECONDS:
        words.append(f"--limit-seconds {arguments.limit_seconds:g}")
    return " ".join(words + ["--device cpu"] * (arguments.device == "cpu"))


def _measure(result: EndToEndResult, name: str, batches: torch.Tensor, limit_seconds: float) -> None:
    try:
        result.variants[name] = run_variant(result.case, name, batches, limit_seconds)
    except (RuntimeError, TimeoutError) as error:
        traceback.print_exc()
        message = next(iter(str(error).splitlines()), "")
        result.failures[name] = f"{type(error).__name__}: {message}"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code: 1 when a variant failed or the losses disagree."""
    arguments, case = parse(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("bench end-to-end measures a GPU and torch sees none; --device cpu is for toy sizes")
    try:
        import transformers

        from ..integrations import transformers as _  # noqa: F401 - the version it needs
    except ImportError as error:
        print(f"{PACKAGE} bench end-to-end: {error}; pip install 'transformers>=5.17,<6'", file=sys.stderr)
        return EXIT_USAGE
    from .end_to_end_report import as_text, write_reports

    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    backend = runtime.resolve_backend(device, "bf16xbf16")
    text, batches = make_batches(case, device)
    environment = describe_run(command_of(arguments, case), device, arguments.commit)
    environment["transformers"] = transformers.__version__
    result = EndToEndResult(case, text, backend)
    for name in arguments.variants:
        _measure(result, name, batches, arguments.limit_seconds)
        free_memory(device)
        done = result.variants.get(name)
        outcome = f"{done.step.median:.1f} ms per step" if done else result.failures[name]
        print(f"{name}: {outcome}", flush=True)
        if arguments.out is not None:  # after each variant: a run may be cut short
            paths = write_reports(arguments.out, result, environment)
    print("\n" + as_text(result), flush=True)
    if arguments.out is not None:
        for path in paths:
            print(f"wrote {path}")
    return EXIT_OK if result.agrees() else EXIT_FAILED


if __name__ == "__main__":
    raise SystemExit(main())
