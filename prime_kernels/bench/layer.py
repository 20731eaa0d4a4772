"""One rank's MoE layer on this GPU: the kernels, the sum of DeepGEMM's products, and plain torch.

``python -m prime_kernels bench layer --model qwen3-30b-a3b --tokens 1024 16384`` measures, in one process
and for each number of tokens, the forward and backward kernels with z recomputed and with z kept (in a CUDA
graph and launched from Python), the six products of the layer with DeepGEMM's kernels as the yardstick, and
torch's ``grouped_mm`` eager and compiled. The rank sends all rows to itself: nothing crosses a link.
"""

from __future__ import annotations

import argparse
import functools
import gc
from collections.abc import Sequence
from pathlib import Path

import torch

from ..models import MODELS
from .gemm import TOKENS_PER_RANK, measure_ceilings
from .layer_bars import BACKWARDS, pass_pairs
from .layer_case import ROUTINGS, LayerSize, check_routing, layer_size, make_tensors
from .layer_contenders import DW_DTYPES, PEERS, KernelLayer, compile_all, kernel_sources
from .layer_run import LayerResult, Stopwatch, measure_layer
from .record import describe_run
from .timing import REPEATS

PACKAGE = (__package__ or "").partition(".")[0]
PRECISIONS = ("bf16",)
DEFAULT_EXPERTS_PER_RANK = 16
EXIT_OK, EXIT_FAILED = 0, 1
SEED = 0


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[LayerSize]]:
    """Arguments and the loads they describe; argparse reports what is wrong with them (exit code 2)."""
    parser = argparse.ArgumentParser(prog=f"{PACKAGE} bench layer", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--model", default="qwen3-30b-a3b", choices=sorted(MODELS), help="whose layer (default %(default)s)"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[TOKENS_PER_RANK],
        help=f"tokens of the rank, one measurement each (default {TOKENS_PER_RANK})",
    )
    parser.add_argument(
        "--experts-per-rank",
        type=int,
        default=DEFAULT_EXPERTS_PER_RANK,
        help="experts of the rank (default %(default)s)",
    )
    parser.add_argument("--precision", choices=PRECISIONS, default=PRECISIONS[0])
    parser.add_argument(
        "--backward",
        nargs="+",
        choices=BACKWARDS,
        default=list(BACKWARDS),
        help="where the backward gets z from: computed again, or kept by the forward (default: both)",
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
    parser.add_argument(
        "--rounds", type=int, default=REPEATS, help="times each call is timed (default %(default)s)"
    )
    parser.add_argument(
        "--trace", action="store_true", help="also record a timeline of every SM, at the most tokens"
    )
    parser.add_argument("--out", type=Path, help="write JSON, Markdown and PNG (and the timelines) here")
    parser.add_argument("--commit", default="", help="commit to record where there is no checkout")
    arguments = parser.parse_args(argv)
    if arguments.trace and arguments.out is None:
        parser.error("--trace needs --out, the folder for the timelines")
    if arguments.rounds < 1:
        parser.error(f"--rounds is {arguments.rounds}; needs at least 1")
    # Twice the same says nothing new.
    arguments.tokens = list(dict.fromkeys(arguments.tokens))
    arguments.backward = [name for name in BACKWARDS if name in arguments.backward]
    try:
        sizes = [
            layer_size(arguments.model, tokens, arguments.experts_per_rank) for tokens in arguments.tokens
        ]
        for size in sizes:
            check_routing(size, arguments.routing)
    except ValueError as error:
        parser.error(str(error))
    return arguments, sizes


def command_of(arguments: argparse.Namespace) -> str:
    """The command line that repeats this run."""
    words = [f"{PACKAGE} bench layer --model {arguments.model}"]
    words.append(" ".join(["--tokens", *map(str, arguments.tokens)]))
    words.append(f"--experts-per-rank {arguments.experts_per_rank} --precision {arguments.precision}")
    words.append(" ".join(["--backward", *arguments.backward]))
    words.append(f"--routing {arguments.routing} --dw {arguments.dw} --rounds {arguments.rounds}")
    words.append(" ".join(["--peers", *arguments.peers]))
    return " ".join(words + ["--trace"] * arguments.trace)


def current_gpu() -> torch.device:
    """The GPU to measure; SystemExit where there is none."""
    if not torch.cuda.is_available():
        raise SystemExit("bench layer measures a GPU and torch sees none")
    return torch.device("cuda", torch.cuda.current_device())


def record_traces(arguments: argparse.Namespace, size: LayerSize, device: torch.device) -> str:
    """Run every pass with tracing kernels, write their timelines, and return what they show."""
    from .trace import BACKWARD_PHASES, FORWARD_PHASES, record, summarize, write_trace

    layer = KernelLayer(
        size, make_tensors(size, arguments.routing, device), DW_DTYPES[arguments.dw], trace=True
    )
    texts = []
    for pair in pass_pairs(arguments.backward):
        if pair[0].keeps_z:
            layer.make_room_for_z()
        for item in pair:
            phases = FORWARD_PHASES if item.direction == "forward" else BACKWARD_PHASES
            timeline = record(layer.rank, functools.partial(layer.run, item), phases)
            title = f"{size.model}, {size.experts} experts, {size.tokens} tokens: {item.name}"
            paths = write_trace(arguments.out, f"trace-{item.slug}", timeline, title)
            texts.append("\n".join([f"{item.name}:", summarize(timeline), *(f"wrote {p}" for p in paths)]))
    return "\n\n".join(texts)


def measure_all(
    arguments: argparse.Namespace, sizes: Sequence[LayerSize], device: torch.device
) -> list[LayerResult]:
    """Measure every size; what there is so far is printed and written after each."""
    from .layer_report import layer_text, write_texts

    watch = Stopwatch()
    with watch.stage("ceilings"):
        ceilings = measure_ceilings(device)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    with watch.stage("kernels"):
        compile_all(kernel_sources(sizes[0], arguments.backward, num_sms, arguments.trace))
    print(f"ceilings measured and kernels ready: {watch}", flush=True)
    results: list[LayerResult] = []
    for size in sizes:
        results.append(
            measure_layer(
                size,
                make_tensors(size, arguments.routing, device),
                arguments.dw,
                backwards=arguments.backward,
                peers=arguments.peers,
                rounds=arguments.rounds,
                ceilings=ceilings,
            )
        )
        print("\n" + layer_text(results[-1]), flush=True)
        if arguments.out is not None:
            write_texts(arguments.out, results, describe_run(command_of(arguments), device, arguments.commit))
        # Graphs and layers of one size are of no use to the next.
        gc.collect()
        torch.cuda.empty_cache()
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    arguments, sizes = parse(argv)
    device = current_gpu()
    from .layer_report import summary_text, write_reports

    torch.manual_seed(SEED)
    torch.backends.cuda.matmul.allow_tf32 = False
    results = measure_all(arguments, sizes, device)
    print("\n" + summary_text(results), flush=True)
    if arguments.out is not None:
        environment = describe_run(command_of(arguments), device, arguments.commit)
        for path in write_reports(arguments.out, results, environment):
            print(f"wrote {path}")
    if arguments.trace:
        largest = max(sizes, key=lambda size: size.tokens)
        print("\n" + record_traces(arguments, largest, device), flush=True)
    return EXIT_FAILED if any(result.failures for result in results) else EXIT_OK


if __name__ == "__main__":
    raise SystemExit(main())
