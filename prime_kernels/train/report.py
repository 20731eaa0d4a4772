"""What a run leaves behind: the loss as a PNG, everything as JSON, the sample as text."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib.figure
import torch

from .._version import __version__
from .config import TrainConfig
from .corpus import Corpus
from .gradcheck import GradientCheck
from .trainer import History

PNG_NAME, JSON_NAME, SAMPLE_NAME = "loss.png", "run.json", "sample.txt"
SMOOTHING_RADIUS = 10  # steps to either side that the plotted loss is averaged over


def moving_mean(values: list[float], radius: int = SMOOTHING_RADIUS) -> list[float]:
    """Each value's mean with its neighbours up to `radius` away, as far as there are any on both sides."""
    means = []
    for i in range(len(values)):
        reach = min(radius, i, len(values) - 1 - i)
        window = values[i - reach : i + reach + 1]
        means.append(sum(window) / len(window))
    return means


def final_loss(history: History) -> float:
    """Mean training loss of the last steps, in nats per byte."""
    last = [loss for _, loss in history.loss[-SMOOTHING_RADIUS:]]
    return sum(last) / len(last)


def plot_loss(path: Path, history: History, corpus: Corpus, title: str) -> None:
    """Draw training and validation loss with the entropies of the text as dashed lines."""
    figure = matplotlib.figure.Figure(figsize=(8, 4.8), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    steps, losses = [step for step, _ in history.loss], [loss for _, loss in history.loss]
    axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    axes.plot(steps, moving_mean(losses), color="tab:blue", linewidth=1.8, label="training (moving mean)")
    validation_steps = [step for step, _ in history.validation]
    axes.plot(
        validation_steps,
        [loss for _, loss in history.validation],
        color="tab:orange",
        marker="o",
        markersize=4,
        linewidth=1.2,
        label="validation",
    )
    entropies = (
        ("unigram entropy", corpus.unigram_entropy, "tab:red"),
        ("bigram entropy", corpus.bigram_entropy, "tab:gray"),
    )
    for name, entropy, color in entropies:
        label = f"{name} of the text ({entropy:.2f})"
        axes.axhline(entropy, color=color, linestyle="--", linewidth=1.2, label=label)
    axes.set_ylim(0, max(*losses, corpus.unigram_entropy) * 1.05)
    axes.set_xlim(0, max(steps) * 1.01)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=9)
    figure.savefig(path)


def run_record(
    config: TrainConfig,
    corpus: Corpus,
    history: History,
    check: GradientCheck,
    sample: str,
    facts: dict[str, Any],
) -> dict[str, Any]:
    """Everything about the run that JSON can hold; `facts` adds what only the caller knows."""
    return {
        "prime_kernels": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        **facts,
        "config": {
            name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()
        },
        "text": {
            "name": corpus.name,
            "train_bytes": corpus.train.numel(),
            "validation_bytes": corpus.validation.numel(),
            "unigram_entropy": corpus.unigram_entropy,
            "bigram_entropy": corpus.bigram_entropy,
        },
        "loss": [list(pair) for pair in history.loss],
        "validation_loss": [list(pair) for pair in history.validation],
        "gradient_norm": [list(pair) for pair in history.gradient_norm],
        "gradient_check": {"passed": check.passed, "limit": check.limit, "errors": check.errors},
        "sample": sample,
    }


def write(folder: Path, record: dict[str, Any], history: History, corpus: Corpus, title: str) -> list[Path]:
    """Write the PNG, the JSON and the sample into `folder` and return their paths."""
    png, text, sample = folder / PNG_NAME, folder / JSON_NAME, folder / SAMPLE_NAME
    plot_loss(png, history, corpus, title)
    text.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    sample.write_text(record["sample"] + "\n", encoding="utf-8")
    return [png, text, sample]
