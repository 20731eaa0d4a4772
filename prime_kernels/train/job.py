"""The command `train`: from arguments to exit code."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from tqdm import tqdm

from ..runtime import get_backend, resolve_backend, set_backend, set_device
from . import report
from .config import TrainConfig, parse_arguments
from .corpus import Corpus, CorpusError, load_corpus
from .gradcheck import GradientCheck
from .parallel import Parallel, choose_device, environment_rank, environment_ranks, start, stop
from .trainer import History, Trainer

PROG = f"python -m {(__package__ or 'prime_kernels').partition('.')[0]} train"
EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
LOG_SECONDS = 10.0  # how often the bar is written where it is no terminal
MMA_TYPE = "bf16xbf16"
MIB = 1 << 20


@dataclass(frozen=True)
class Backend:
    """What computes the experts, and why."""

    name: str
    reason: str


def choose_backend(requested: str, device: torch.device) -> Backend:
    """Set the process's backend; `auto` takes this GPU's kernel, or else the reference and says why.

    Raises RuntimeError when the requested backend cannot run here.
    """
    if requested != "auto":
        set_backend(requested)
        return Backend(resolve_backend(device, MMA_TYPE), f"asked for with --backend {requested}")
    try:
        name = resolve_backend(device, MMA_TYPE)
    except RuntimeError as error:
        if get_backend() != "auto":
            raise
        set_backend("reference")
        return Backend("reference", f"no kernel here: {error}")
    if get_backend() != "auto":
        return Backend(name, "asked for by the environment")
    return Backend(name, "what a CPU runs" if device.type == "cpu" else "this GPU has a kernel")


def describe_backend(backend: Backend) -> str:
    """The backend and why it was chosen, for the header of a run."""
    what = (
        "reference (plain torch, not a kernel)" if backend.name == "reference" else f"{backend.name} kernels"
    )
    return f"{what}; {backend.reason}"


def _print_header(trainer: Trainer, backend: Backend) -> None:
    config, corpus, parallel = trainer.config, trainer.corpus, trainer.parallel
    ranks = f"{parallel.size} rank" + ("s" if parallel.size > 1 else "")
    rows = {
        "text": f"{corpus.name}: {corpus.size:,} bytes without repeated paragraphs, "
        f"{corpus.validation.numel():,} of them held out",
        "entropy": f"{corpus.unigram_entropy:.3f} nats per byte for the unigram distribution of this text, "
        f"{corpus.bigram_entropy:.3f} for its byte pairs",
        "model": f"{config.layers} layers, hidden {config.hidden}, {config.experts} experts of "
        f"{config.intermediate}, top-{config.topk}; {trainer.total_parameters() / 1e6:.1f} M parameters, "
        f"{trainer.active_parameters() / 1e6:.1f} M per token",
        "batch": f"{config.batch} sequences of {config.seq_len} bytes a step, {config.steps} steps",
        "ranks": f"{ranks}, {config.experts // parallel.size} experts each, on "
        f"{_device_name(parallel.device)}",
        "backend": describe_backend(backend),
        "buffer": f"{trainer.buffer.num_bytes / MIB:.1f} MiB of staging memory on each rank, for all layers",
    }
    for name, text in rows.items():
        print(f"{name:<8} {text}", flush=True)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    threads = torch.get_num_threads()
    return f"cpu ({threads} thread{'s' if threads > 1 else ''} a rank)"


def _progress(steps: int, stream: TextIO) -> tqdm:
    interval = 0.1 if stream.isatty() else LOG_SECONDS
    return tqdm(total=steps, unit="step", file=stream, mininterval=interval, dynamic_ncols=True, desc="train")


def _train(trainer: Trainer) -> tuple[History, float]:
    """All steps under a progress bar on rank 0; returns the history and the seconds."""
    started = time.perf_counter()
    if not trainer.parallel.is_main:
        return trainer.train(lambda step, history: None), time.perf_counter() - started
    with _progress(trainer.config.steps, sys.stderr) as bar:

        def on_step(step: int, history: History) -> None:
            postfix = {"loss": f"{history.loss[-1][1]:.3f}"}
            if history.validation:
                postfix["validation"] = f"{history.validation[-1][1]:.3f}"
            bar.set_postfix(postfix, refresh=False)
            bar.update()

        history = trainer.train(on_step)
    return history, time.perf_counter() - started


def _run(config: TrainConfig, corpus: Corpus, parallel: Parallel, backend: Backend) -> int:
    trainer = Trainer(config, corpus, parallel)
    try:
        if parallel.is_main:
            _print_header(trainer, backend)
        history, seconds = _train(trainer)
        sample = trainer.sample()
        check = trainer.check_gradients()
    finally:
        trainer.close()
    if parallel.is_main:
        facts = {
            "backend": backend.name,
            "backend_reason": backend.reason,
            "device": _device_name(parallel.device),
            "ranks": parallel.size,
            "parameters": trainer.total_parameters(),
            "active_parameters": trainer.active_parameters(),
            "seconds": seconds,
            "bytes_per_second": config.steps * config.tokens / seconds,
        }
        record = report.run_record(config, corpus, history, check, sample, facts)
        title = f"{config.layers}-layer MoE, {config.experts} experts top-{config.topk}, on {corpus.name}"
        paths = report.write(config.out, record, history, corpus, title)
        _print_results(trainer, sample, seconds, check)
        print("wrote " + ", ".join(str(path) for path in paths), flush=True)
    # A rank that leaves first with a failure has torchrun end rank 0 before it has written its files.
    parallel.barrier()
    return EXIT_OK if check.passed else EXIT_FAILED


def _print_results(trainer: Trainer, sample: str, seconds: float, check: GradientCheck) -> None:
    config, history = trainer.config, trainer.history
    title = f"sample: {config.sample_bytes} bytes after {config.prompt!r}, temperature {config.temperature:g}"
    # A terminal of another encoding than UTF-8 shows question marks instead of failing.
    encoding = sys.stdout.encoding or "utf-8"
    print(f"\n--- {title}\n{sample.encode(encoding, 'replace').decode(encoding)}\n---\n")
    losses = f"{report.final_loss(history):.3f} in training, {history.validation[-1][1]:.3f} on held-out text"
    speed = f"{config.steps} steps in {seconds:.0f} s ({config.steps * config.tokens / seconds:,.0f} bytes/s)"
    print(f"loss {losses}, after {speed}; unigram entropy {trainer.corpus.unigram_entropy:.3f}")
    print(check.line())


def _prepare(config: TrainConfig) -> tuple[Corpus, torch.device, Backend]:
    """Everything that can be refused, before any work and before any process waits for another."""
    config.check(environment_ranks())
    corpus = load_corpus(config.text, min_bytes=config.seq_len + 2)
    device = choose_device(config.device)
    backend = choose_backend(config.backend, device)
    set_device(device)
    _make_writable(config.out)
    return corpus, device, backend


def _make_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {folder}: {error.strerror or error}; choose another folder") from error
    if not os.access(folder, os.W_OK):
        raise ValueError(f"--out {folder} is not writable; choose another folder")


def _refuse(error: Exception) -> None:
    """The reason, from every rank: torchrun ends all as soon as any of them has failed."""
    rank = f"rank {environment_rank()}: " if environment_ranks() > 1 else ""
    # One write, so that the lines of two ranks do not run into each other.
    sys.stderr.write(f"{PROG}: {rank}{error}\n")
    sys.stderr.flush()


def main(argv: Sequence[str]) -> int:
    """Run the command with the words after `train`.

    Returns 0, 1 (a gradient is wrong, or the loss became infinite or NaN) or 2 (the run cannot start).
    """
    config = parse_arguments(PROG, argv)
    try:
        corpus, device, backend = _prepare(config)
    except (ValueError, CorpusError, RuntimeError) as error:
        _refuse(error)
        return EXIT_USAGE
    torch.manual_seed(config.seed)
    parallel = start(device)
    try:
        return _run(config, corpus, parallel, backend)
    except FloatingPointError as error:
        _refuse(error)
        return EXIT_FAILED
    finally:
        stop(parallel)
