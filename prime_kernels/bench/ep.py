"""One MoE layer over the GPUs of this machine: the kernels against torch's all-to-all and grouped_mm.

    torchrun --standalone --nproc-per-node 8 -m prime_kernels bench ep --out runs/ep

times forward and backward of each layer over all ranks and, in the same rounds, an equal load on one rank
alone: the difference is the communication that is not hidden. Without torchrun it runs on one GPU. The folder
of --out holds a record for each number of ranks; tables and picture are made of all that lie there.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

from ..jit import compile_kernel
from ..train.parallel import choose_device, environment_rank, environment_ranks
from ..warmup import kernel_sources
from .ep_case import EpSize, ep_sizes, make_ep_tensors
from .ep_run import CONTENDERS, Clock, EpResult, Groups, measure
from .ep_world import check_machine, process_groups
from .layer_case import ROUTINGS
from .memory import DEFAULT_MODELS
from .record import describe_run
from .rounds import Event
from .timing import REPEATS, WARMUPS

PACKAGE = (__package__ or "").partition(".")[0]
TOKENS = (4096, 8192, 16384)
SMOKE_MODELS, SMOKE_TOKENS, SMOKE_REPEATS = DEFAULT_MODELS[:1], (1024,), 3
EXIT_OK, EXIT_FAILED = 0, 1
SEED = 0
KERNELS = ("bf16", "sm_90a")


def parse(argv: Sequence[str] | None, ranks: int) -> tuple[argparse.Namespace, list[EpSize]]:
    """Arguments and the loads they describe; argparse reports what is wrong with them (exit code 2)."""
    parser = argparse.ArgumentParser(
        prog=f"{PACKAGE} bench ep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", help=f"whose layers (default {' '.join(DEFAULT_MODELS)})")
    parser.add_argument(
        "--tokens", nargs="+", type=int, help=f"tokens per rank (default {' '.join(map(str, TOKENS))})"
    )
    parser.add_argument(
        "--routing", choices=ROUTINGS, default="even", help="equal loads, or drawn (default %(default)s)"
    )
    parser.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="what to measure"
    )
    parser.add_argument("--repeats", type=int, help=f"timed rounds (default {REPEATS})")
    parser.add_argument("--smoke", action="store_true", help="defaults of a run that takes seconds")
    parser.add_argument("--out", type=Path, help="write the record, Markdown and PNG here")
    parser.add_argument("--commit", default="", help="commit to record where there is no checkout")
    arguments = parser.parse_args(argv)
    smoke = arguments.smoke
    arguments.models = arguments.models or list(SMOKE_MODELS if smoke else DEFAULT_MODELS)
    arguments.tokens = arguments.tokens or list(SMOKE_TOKENS if smoke else TOKENS)
    if arguments.repeats is None:
        arguments.repeats = SMOKE_REPEATS if smoke else REPEATS
    if arguments.repeats < 1:
        parser.error(f"--repeats is {arguments.repeats}; needs at least 1")
    try:
        sizes = ep_sizes(arguments.models, arguments.tokens, ranks)
    except ValueError as error:
        parser.error(str(error))
    for size in sizes:
        rows, experts = size.alone.rows, size.experts
        if arguments.routing == "even" and rows % experts:
            parser.error(
                f"even routing needs rows that {experts} experts can share equally, {size.alone.tokens} "
                f"tokens make {rows}; choose another --tokens, or --routing random"
            )
    return arguments, sizes


def command_of(arguments: argparse.Namespace) -> str:
    """The command line that repeats this run, behind torchrun."""
    contenders = " ".join(f"'{name}'" if " " in name else name for name in arguments.contenders)
    return (
        f"{PACKAGE} bench ep --models {' '.join(arguments.models)} "
        f"--tokens {' '.join(map(str, arguments.tokens))} --routing {arguments.routing} "
        f"--contenders {contenders} --repeats {arguments.repeats}"
    )


def method_of(repeats: int) -> str:
    """How the times were taken."""
    return (
        f"median of {repeats} rounds after {WARMUPS}, CUDA events, the slowest rank's; all contenders, over "
        "the ranks and alone, alternate in the same rounds; an all-reduce before each call aligns the ranks; "
        "launched from Python, no CUDA graphs; gradients of x, routing weights and both weights, in bf16"
    )


def compile_kernels(models: Sequence[str], ranks: int) -> None:
    """Fill the kernel cache on rank 0, several kernels at once; the others wait. Collective."""
    if environment_rank() == 0:
        sources = {source for model in models for source in kernel_sources(model, ranks, *KERNELS)}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_kernel, sources))
    dist.barrier()


def run(
    sizes: Sequence[EpSize], arguments: argparse.Namespace, groups: Groups, device: torch.device, clock: Clock
) -> list[EpResult]:
    """Measure every load; rank 0 prints each as soon as it is done."""
    results = []
    for size in sizes:
        torch.manual_seed(SEED + environment_rank())
        tensors = make_ep_tensors(size, arguments.routing, device)
        results.append(measure(size, arguments.routing, tensors, arguments.contenders, groups, clock))
        del tensors
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if environment_rank() == 0:
            from .ep_report import as_text

            print(f"{as_text(results[-1:])}\n", flush=True)
    return results


def _event() -> Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[return-value]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    ranks = environment_ranks()
    arguments, sizes = parse(argv, ranks)
    if not torch.cuda.is_available():
        raise SystemExit("bench ep measures GPUs and torch sees none")
    try:
        check_machine(torch.cuda.device_count())
        device = choose_device("cuda")
    except (RuntimeError, ValueError) as error:
        raise SystemExit(f"bench ep: {error}") from error
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = False
    clock = Clock(arguments.repeats, WARMUPS, _event, torch.cuda.synchronize)
    with process_groups(device) as groups:
        compile_kernels(arguments.models, ranks)
        results = run(sizes, arguments, groups, device, clock)
    if arguments.out is not None and environment_rank() == 0:
        write(arguments, results, ranks, device)
    return EXIT_FAILED if any(result.failures for result in results) else EXIT_OK


def write(
    arguments: argparse.Namespace, results: Sequence[EpResult], ranks: int, device: torch.device
) -> None:
    """The record of this run, and tables and picture of all in the folder."""
    from .ep_report import write_reports
    from .ep_summary import as_record, write_record

    environment = describe_run(command_of(arguments), device, arguments.commit)
    environment["command"] = (
        f"torchrun --standalone --nproc-per-node {ranks} -m {command_of(arguments)}"
        if ranks > 1
        else environment["command"]
    )
    environment["hardware"] = f"{ranks} x {environment['hardware']}"
    record = as_record(results, ranks, method_of(arguments.repeats), environment)
    for path in [write_record(arguments.out, record), *write_reports(arguments.out)]:
        print(f"wrote {path}")


if __name__ == "__main__":
    raise SystemExit(main())
