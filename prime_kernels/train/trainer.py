"""The run itself: batches, steps, validation, the sample and the final gradient check.

Collective throughout: every rank calls the same methods in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from ..symm import SymmBuffer
from .config import TrainConfig
from .corpus import VOCABULARY, Corpus, sample_windows
from .gradcheck import GradientCheck, check_model
from .model import ByteMoE, initialize
from .optim import Optimizer
from .parallel import Parallel

# Streams of random numbers that the seed starts.
TRAIN_STREAM, SAMPLE_STREAM, CHECK_STREAM = 1, 2, 3
VALIDATION_SEQUENCES = 32  # per look, over all ranks (rounded up to whole batches)


@dataclass
class History:
    """What was measured, each as (step, value): nats per byte, or the gradient's norm."""

    loss: list[tuple[int, float]] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    gradient_norm: list[tuple[int, float]] = field(default_factory=list)


def printable(text: bytes) -> str:
    """`text` for a terminal: what is no UTF-8 and every control character but a line's end becomes U+FFFD."""
    characters = text.decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in characters)


def _require_finite(name: str, step: int, value: float) -> None:
    if not math.isfinite(value):
        raise FloatingPointError(f"the {name} is {value} at step {step}; try a lower --lr")


class Trainer:
    """Model, buffer, optimizer and data of one run on this rank."""

    def __init__(self, config: TrainConfig, corpus: Corpus, parallel: Parallel) -> None:
        self.config, self.corpus, self.parallel = config, corpus, parallel
        self.sequences = config.batch // parallel.size  # of one step on this rank
        self.buffer = SymmBuffer(
            parallel.group,
            config.experts,
            self.sequences * config.seq_len,
            config.topk,
            config.hidden,
            config.intermediate,
            mma_type="bf16xbf16",
        )
        self.model = ByteMoE(config, self.buffer, parallel).to(parallel.device)
        initialize(self.model, config, parallel)
        self.optimizer = Optimizer(self.model, config, parallel)
        self.history = History()
        self._batches = self._generator(TRAIN_STREAM)

    def close(self) -> None:
        """Give the staging buffer back."""
        self.buffer.destroy()

    def total_parameters(self) -> int:
        """Over all ranks."""
        sharded = sum(parameter.numel() for parameter in self.model.expert_parameters())
        return sum(p.numel() for p in self.model.replicated_parameters()) + sharded * self.parallel.size

    def active_parameters(self) -> int:
        """Those that one token meets: everything but the experts, and `topk` experts in each layer."""
        sharded = sum(parameter.numel() for parameter in self.model.expert_parameters()) * self.parallel.size
        return self.total_parameters() - sharded + sharded * self.config.topk // self.config.experts

    def train(self, on_step: Callable[[int, History], None]) -> History:
        """All steps. `on_step(step, history)` is called after each (steps count from 1).

        Raises FloatingPointError, on every rank, when the loss is no longer finite.
        """
        for step in range(1, self.config.steps + 1):
            self.step(step)
            _require_finite("loss", *self.history.loss[-1])
            if step % self.config.eval_every == 0 or step == self.config.steps:
                self.history.validation.append((step, self.validate()))
                _require_finite("validation loss", *self.history.validation[-1])
            on_step(step, self.history)
        return self.history

    def step(self, step: int) -> None:
        """One optimizer step on the next batch."""
        self.model.train()
        self.optimizer.zero_grad()
        loss = self._backward(self._batches)
        norm = self.optimizer.step(step - 1)
        self.history.loss.append((step, loss))
        self.history.gradient_norm.append((step, norm))

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss over evenly spaced windows of the held-out text, always the same, in nats per byte."""
        self.model.eval()
        length, batch = self.config.seq_len, self.config.batch
        text = self.corpus.validation
        rounds = -(-VALIDATION_SEQUENCES // batch)
        starts = torch.linspace(0, text.numel() - length - 1, rounds * batch).long()
        windows = text[starts[:, None] + torch.arange(length + 1)].long().view(rounds, batch, length + 1)
        total = torch.zeros((), device=self.parallel.device)
        for window in windows:
            total += self._loss(self._mine(window[:, :-1]), self._mine(window[:, 1:])) / rounds
        self.parallel.sum_([total])
        return float(total)

    @torch.no_grad()
    def sample(self) -> str:
        """Continue the prompt by `sample_bytes` bytes at the configured temperature."""
        self.model.eval()
        device, limit = self.parallel.device, self.config.seq_len
        generator = self._generator(SAMPLE_STREAM)
        text = torch.tensor([list(self.config.prompt.encode())], device=device)
        for _ in range(self.config.sample_bytes):
            logits = self.model(text[:, -limit:])[0, -1].float().cpu()
            chosen = torch.multinomial((logits / self.config.temperature).softmax(-1), 1, generator=generator)
            # Rank 0 decides, so that a last-bit difference between ranks cannot part their texts.
            chosen = self.parallel.broadcast_(chosen.to(device))
            text = torch.cat([text, chosen[None]], dim=1)
        return printable(bytes(text[0].tolist()))

    def check_gradients(self) -> GradientCheck:
        """One more forward and backward on a fresh batch, its experts' gradients judged against float64."""
        self.model.train()
        self.optimizer.zero_grad()
        for moe in self.model.moe_layers():
            moe.record = True
        self._backward(self._generator(CHECK_STREAM))
        check = check_model(self.model, self.parallel)
        for moe in self.model.moe_layers():
            moe.record, moe.call = False, None
        self.optimizer.zero_grad()
        return check

    def _generator(self, stream: int) -> torch.Generator:
        # The CPU's generator on every device, the same on every rank.
        return torch.Generator().manual_seed(self.config.seed * 16 + stream)

    def _mine(self, batch: torch.Tensor) -> torch.Tensor:
        first = self.parallel.rank * self.sequences
        return batch[first : first + self.sequences].to(self.parallel.device)

    def _loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """This rank's share of the global mean cross-entropy: the ranks' values add up to it."""
        logits = self.model(inputs)
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1)) / self.parallel.size

    def _backward(self, generator: torch.Generator) -> float:
        """Draw a batch, run forward and backward; returns the global mean cross-entropy."""
        inputs, targets = sample_windows(self.corpus.train, self.config.batch, self.config.seq_len, generator)
        loss = self._loss(self._mine(inputs), self._mine(targets))
        balance = torch.stack([moe.balance_loss for moe in self.model.moe_layers()]).mean()
        (loss + self.config.balance * balance).backward()
        value = loss.detach().clone()
        self.parallel.sum_([value])
        return float(value)
