"""Arguments of the training job and what must hold between them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from ..sizes import SIZE_LIMITS, SizeLimit

# The narrower ones, so that the same run works on every backend.
LIMITS = SIZE_LIMITS["sm90"]
MAX_TOP_K = 8
# The generators' own seeds are multiples of this one, in 64 bits.
MAX_SEED = 2**32 - 1

AT_LEAST_ONE = (
    "steps", "tokens", "seq_len", "layers", "hidden", "intermediate", "heads", "kv_heads", "experts", "topk",
    "eval_every",
)  # fmt: skip

BACKENDS = ("auto", "reference", "sm90")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class TrainConfig:
    """One training run. The defaults finish in about three minutes on two CPU cores."""

    out: Path
    text: Path | None = None
    steps: int = 800
    tokens: int = 1024
    seq_len: int = 128
    layers: int = 3
    hidden: int = 256
    intermediate: int = 128
    heads: int = 4
    kv_heads: int = 2
    experts: int = 16
    topk: int = 4
    untied: bool = False
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    balance: float = 0.01
    eval_every: int = 50
    sample_bytes: int = 400
    prompt: str = "The "
    temperature: float = 0.7
    seed: int = 0
    device: str = "auto"
    backend: str = "auto"

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    @property
    def batch(self) -> int:
        """Sequences in one optimizer step, over all ranks."""
        return self.tokens // self.seq_len

    def check(self, ranks: int) -> None:
        """Raise ValueError when `ranks` ranks cannot do this; it names the value, the limit and the fix."""
        for name in AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ValueError(f"{_flag(name)} is {getattr(self, name)}; it must be at least 1")
        for name in ("warmup_steps", "weight_decay", "balance", "sample_bytes"):
            if not 0 <= getattr(self, name) < float("inf"):
                value = getattr(self, name)
                raise ValueError(f"{_flag(name)} is {value}; it must not be negative, infinite or NaN")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"--seed is {self.seed}; it must be between 0 and {MAX_SEED}")
        for name in ("learning_rate", "clip_norm", "temperature"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{_flag(name)} is {getattr(self, name)}; it must be a positive number")
        _check_size("hidden", self.hidden, LIMITS.hidden)
        _check_size("intermediate", self.intermediate, LIMITS.intermediate)
        if self.hidden % (2 * self.heads):
            raise ValueError(
                f"--heads {self.heads} does not split --hidden {self.hidden} into heads of even size "
                f"(rotary embedding "
                "turns pairs); choose a power of two"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"--kv-heads {self.kv_heads} does not divide --heads {self.heads}; choose a divisor of it"
            )
        if self.topk > min(self.experts, MAX_TOP_K):
            raise ValueError(
                f"--topk {self.topk} is more than {min(self.experts, MAX_TOP_K)} (--experts {self.experts}, "
                f"and at most "
                f"{MAX_TOP_K}); lower it"
            )
        if self.experts % ranks:
            raise ValueError(
                f"--experts {self.experts} cannot be spread evenly over {ranks} ranks; choose a multiple of "
                f"{ranks} or "
                "another --nproc-per-node"
            )
        if self.tokens % (self.seq_len * ranks):
            raise ValueError(
                f"--tokens {self.tokens} is not a whole number of sequences per rank (--seq-len "
                f"{self.seq_len} x {ranks} "
                f"ranks); choose a multiple of {self.seq_len * ranks}"
            )
        if not self.prompt:
            raise ValueError("--prompt is empty; give at least one character to continue")


def _flag(name: str) -> str:
    return "--" + {"learning_rate": "lr", "warmup_steps": "warmup"}.get(name, name).replace("_", "-")


def _check_size(name: str, value: int, limit: SizeLimit) -> None:
    if not limit.takes(value):
        fix = limit.nearest(value)[-1]
        raise ValueError(f"{_flag(name)} {value} is not {limit}; the next that is: {fix}")


_HELP = {
    "out": "folder for the results",
    "text": "a UTF-8 text file to train on (default: the documentation topics that this Python ships)",
    "steps": "optimizer steps",
    "tokens": "tokens (bytes) in one step, over all ranks",
    "seq_len": "tokens in one sequence",
    "layers": "decoder layers",
    "hidden": f"width of the residual stream, {LIMITS.hidden}",
    "intermediate": f"width of one expert, {LIMITS.intermediate}",
    "heads": "query heads",
    "kv_heads": "key and value heads",
    "experts": "experts in a layer, over all ranks",
    "topk": f"experts per token, at most {MAX_TOP_K}",
    "untied": "give the output head a matrix of its own instead of the embedding's",
    "learning_rate": "peak learning rate of AdamW (linear warm-up, then cosine to a tenth)",
    "warmup_steps": "steps of warm-up",
    "weight_decay": "weight decay of matrices",
    "clip_norm": "limit of the gradient's norm",
    "balance": "weight of the router's load-balancing loss",
    "eval_every": "steps between two looks at the held-out text",
    "sample_bytes": "bytes of text to write at the end",
    "prompt": "what the sample begins with",
    "temperature": "temperature of the sample",
    "seed": "seed of weights, batches and sample",
    "device": "where to run; auto takes a GPU when there is one",
    "backend": "what computes the experts; auto takes the kernel of this GPU, or says that it runs the "
    "reference",
}


def parse_arguments(prog: str, argv: Sequence[str]) -> TrainConfig:
    """Parse the words after `train`. Raises SystemExit as argparse does."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Train a small Qwen3-style mixture-of-experts language model on real English text, byte "
        "by byte. Under `torchrun --nproc-per-node N`, attention is data parallel and the experts are spread "
        "over the N ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for field in fields(TrainConfig):
        flag, text = _flag(field.name), _HELP[field.name]
        if field.name == "out":
            parser.add_argument(flag, type=Path, default=Path("runs") / "train", help=text)
        elif field.name == "text":
            parser.add_argument(flag, type=Path, metavar="FILE", help=text, default=argparse.SUPPRESS)
        elif field.name == "untied":
            parser.add_argument(flag, action="store_true", help=text)
        elif field.name in ("device", "backend"):
            choices = DEVICES if field.name == "device" else BACKENDS
            parser.add_argument(flag, choices=choices, default=field.default, help=text)
        else:
            parser.add_argument(
                flag, dest=field.name, type=type(field.default), metavar="N", default=field.default, help=text
            )
    return TrainConfig(**vars(parser.parse_args(list(argv))))
