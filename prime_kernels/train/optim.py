"""AdamW over fp32 copies of the parameters: a step of a bf16 weight is mostly smaller than its last bit."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from .config import TrainConfig
from .model import ByteMoE
from .parallel import Parallel

BETAS = (0.9, 0.95)
FINAL_LEARNING_RATE = 0.1  # as a share of the peak


def fp32_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """The parameter's gradient in fp32: `main_grad` where the op accumulates there, else `grad`, else 0."""
    main_grad = getattr(parameter, "main_grad", None)
    gradient = parameter.grad if main_grad is None else main_grad
    return torch.zeros_like(parameter, dtype=torch.float32) if gradient is None else gradient.float()


class Optimizer:
    """AdamW with fp32 master weights, global gradient clipping, linear warm-up and cosine decay.

    `step` sums the replicated gradients over the ranks first; every rank's loss must be its share of the
    global mean.
    """

    def __init__(self, model: ByteMoE, config: TrainConfig, parallel: Parallel) -> None:
        self._config, self._parallel = config, parallel
        self._replicated, self._sharded = model.replicated_parameters(), model.expert_parameters()
        self._parameters = [*self._replicated, *self._sharded]
        for parameter in self._sharded:
            # The op adds a bf16 weight's gradient here, unrounded, instead of returning it in bf16.
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
        self.masters = [nn.Parameter(parameter.detach().float().clone()) for parameter in self._parameters]
        groups = [
            {"params": [m for m in self.masters if m.dim() > 1], "weight_decay": config.weight_decay},
            {"params": [m for m in self.masters if m.dim() <= 1], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(groups, lr=config.learning_rate, betas=BETAS)

    def learning_rate(self, step: int) -> float:
        """The rate of step 0, 1, ...: linear over the warm-up, then a cosine down to a tenth of the peak."""
        config = self._config
        if step < config.warmup_steps:
            return config.learning_rate * (step + 1) / config.warmup_steps
        progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return config.learning_rate * (FINAL_LEARNING_RATE + (1 - FINAL_LEARNING_RATE) * cosine)

    def zero_grad(self) -> None:
        """Forget the gradients of all parameters."""
        zero_gradients(self._parameters)

    @torch.no_grad()
    def step(self, step: int) -> float:
        """Update the parameters from their gradients; returns the gradient's global norm before clipping."""
        gradients = [fp32_gradient(parameter) for parameter in self._parameters]
        replicated, sharded = gradients[: len(self._replicated)], gradients[len(self._replicated) :]
        self._parallel.sum_(replicated)
        sharded_square = torch.stack([gradient.square().sum() for gradient in sharded]).sum()
        self._parallel.sum_([sharded_square])
        norm = float((torch.stack([g.square().sum() for g in replicated]).sum() + sharded_square).sqrt())
        scale = min(1.0, self._config.clip_norm / (norm + 1e-6))
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient * scale
        for group in self._adamw.param_groups:
            group["lr"] = self.learning_rate(step)
        self._adamw.step()
        for parameter, master in zip(self._parameters, self.masters, strict=True):
            parameter.copy_(master)
        return norm


def zero_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Set ``grad`` to None and ``main_grad``, where there is one, to zero."""
    for parameter in parameters:
        parameter.grad = None
        if getattr(parameter, "main_grad", None) is not None:
            parameter.main_grad.zero_()  # type: ignore[attr-defined]
