"""One rank's MoE layer on this GPU: the kernels, the sum of DeepGEMM's products, and plain torch.

``python -m prime_kernels bench layer --model qwen3-30b-a3b`` measures, in one process, the forward and
backward kernels (in a CUDA graph and launched from Python), the six products of the layer with DeepGEMM's
kernels as the yardstick, and torch's ``grouped_mm`` eager and compiled. The rank sends all rows to itself:
nothing crosses a link.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from ..models import MODELS
from .gemm import TOKENS_PER_RANK
from .layer_case import ROUTINGS, LayerSize, LayerTensors, layer_size, make_tensors
from .layer_run import DW_DTYPES, PEERS, KernelLayer, measure_layer
from .record import describe_run

PACKAGE = (__package__ or "").partition(".")[0]
PRECISIONS = ("bf16",)
BACKWARDS = ("recompute",)
DEFAULT_EXPERTS_PER_RANK = 16
EXIT_OK, EXIT_FAILED = 0, 1
SEED = 0


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, LayerSize]:
    """Arguments and the load they describe; argparse reports what is wrong with them (exit code 2)."""
    parser = argparse.ArgumentParser(prog=f"{PACKAGE} bench layer", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--model", default="qwen3-30b-a3b", choices=sorted(MODELS), help="whose layer (default %(default)s)"
    )
    parser.add_argument(
        "--tokens", type=int, default=TOKENS_PER_RANK, help="tokens of the rank (default %(default)s)"
    )
    parser.add_argument(
        "--experts-per-rank",
        type=int,
        default=DEFAULT_EXPERTS_PER_RANK,
        help="experts of the rank (default %(default)s)",
    )
    parser.add_argument("--precision", choices=PRECISIONS, default=PRECISIONS[0])
    parser.add_argument(
        "--backward", choices=BACKWARDS, default=BACKWARDS[0], help="where the backward gets z from"
    )
    parser.add_argument(
        "--routing", choices=ROUTINGS, default=ROUTINGS[0], help="balanced on average, or exactly even"
    )
    parser.add_argument(
        "--dw", choices=tuple(DW_DTYPES), default="fp32", help="dtype of the weight gradients"
    )
    parser.add_argument(
        "--peers", nargs="*", choices=PEERS, default=list(PEERS), help="torch layers to measure"
    )
    parser.add_argument("--trace", action="store_true", help="also record a timeline of every SM")
    parser.add_argument("--out", type=Path, help="write JSON, Markdown and PNG (and the timelines) here")
    parser.add_argument("--commit", default="", help="commit to record where there is no checkout")
    arguments = parser.parse_args(argv)
    if arguments.trace and arguments.out is None:
        parser.error("--trace needs --out, the folder for the timelines")
    try:
        size = layer_size(arguments.model, arguments.tokens, arguments.experts_per_rank)
    except ValueError as error:
        parser.error(str(error))
    return arguments, size


def command_of(arguments: argparse.Namespace) -> str:
    """The command line that repeats this run."""
    words = [f"{PACKAGE} bench layer --model {arguments.model} --tokens {arguments.tokens}"]
    words.append(f"--experts-per-rank {arguments.experts_per_rank} --precision {arguments.precision}")
    words.append(f"--backward {arguments.backward} --routing {arguments.routing} --dw {arguments.dw}")
    words.append(" ".join(["--peers", *arguments.peers]))
    return " ".join(words + ["--trace"] * arguments.trace)


def record_traces(size: LayerSize, tensors: LayerTensors, dw_dtype: str, directory: Path) -> str:
    """Run both directions with tracing kernels, write their timelines, and return what they show."""
    from .trace import BACKWARD_PHASES, FORWARD_PHASES, record, summarize, write_trace

    layer = KernelLayer(size, tensors, DW_DTYPES[dw_dtype], trace=True)
    texts = []
    directions = (
        ("forward", layer.run_forward, FORWARD_PHASES),
        ("backward", layer.run_backward, BACKWARD_PHASES),
    )
    for name, call, phases in directions:
        timeline = record(layer.rank, call, phases)
        paths = write_trace(
            directory, f"trace-{name}", timeline, f"{size.model}, {size.tokens} tokens: {name}"
        )
        texts.append("\n".join([f"{name}:", summarize(timeline), *(f"wrote {path}" for path in paths)]))
    return "\n\n".join(texts)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    arguments, size = parse(argv)
    if not torch.cuda.is_available():
        raise SystemExit("bench layer measures a GPU and torch sees none")
    from .layer_report import as_text, write_reports

    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(SEED)
    torch.backends.cuda.matmul.allow_tf32 = False
    tensors = make_tensors(size, arguments.routing, device)
    result = measure_layer(size, tensors, arguments.dw, arguments.peers)
    print(as_text(result), flush=True)
    if arguments.out is not None:
        environment = describe_run(command_of(arguments), device, arguments.commit)
        for path in write_reports(arguments.out, result, environment):
            print(f"wrote {path}")
    if arguments.trace:
        print("\n" + record_traces(size, tensors, arguments.dw, arguments.out), flush=True)
    return EXIT_FAILED if result.failures else EXIT_OK


if __name__ == "__main__":
    raise SystemExit(main())
