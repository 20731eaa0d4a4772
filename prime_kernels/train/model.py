"""A Qwen3-style mixture-of-experts decoder: RMSNorm, rotary grouped-query attention with normalised queries
and keys, a softmax top-k router with normalised weights, and `MegaMoE` experts.

Everything but the experts is fp32 and replicated on every rank; the experts are bf16 and sharded over the
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ..module import MegaMoE
from ..symm import SymmBuffer
from .config import TrainConfig
from .corpus import VOCABULARY
from .parallel import Parallel

NORM_EPS = 1e-6
ROTARY_BASE = 10_000.0
EMBEDDING_STD = 0.02


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, NORM_EPS)


def rotary_tables(length: int, head_dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, fp32 [length, head_dim / 2], of position x ROTARY_BASE^(-2i / head_dim)."""
    frequencies = ROTARY_BASE ** (-torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    angles = torch.arange(length, device=device).float()[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the pairs (x_i, x_{i + head_dim/2}) of x [batch, heads, length, head_dim] by position."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention; every `heads / kv_heads` query heads share one key and value head."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        width, kv_width = config.hidden, config.kv_heads * config.head_dim
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, kv_width, bias=False)
        self.value = nn.Linear(width, kv_width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.query_norm = RMSNorm(config.head_dim)
        self.key_norm = RMSNorm(config.head_dim)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query = self.query(x).view(batch, length, self.heads, self.head_dim).transpose(1, 2)
        key = self.key(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        value = self.value(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        query = rotate(self.query_norm(query), cos, sin)
        key = rotate(self.key_norm(key), cos, sin)
        shared = self.heads // self.kv_heads
        key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width))


@dataclass
class MoECall:
    """What one layer's experts took and gave in one forward: tensors of the autograd graph, for the gradient
    check.

    x, y bf16 [n, H]; topk_idx int64 [n, K]; topk_weights fp32 [n, K].
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    y: torch.Tensor


class MoE(nn.Module):
    """Router and experts.

    After a forward in training, `balance_loss` is this rank's share of the load-balancing loss and `load` [E]
    the share of all ranks' slots that each expert serves. With `record` set, `call` holds the tensors around
    the experts.
    """

    def __init__(self, config: TrainConfig, buffer: SymmBuffer, parallel: Parallel) -> None:
        super().__init__()
        self.num_experts, self.topk, self.parallel = config.experts, config.topk, parallel
        self.router = nn.Linear(config.hidden, config.experts, bias=False)
        self.experts = MegaMoE(config.experts, config.topk, config.hidden, config.intermediate, buffer=buffer)
        self.record = False
        self.call: MoECall | None = None
        self.balance_loss = torch.zeros(())
        self.load = torch.zeros(config.experts)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        probabilities = self.router(tokens).softmax(dim=-1)
        topk_weights, topk_idx = probabilities.topk(self.topk, dim=-1)
        topk_weights = topk_weights / topk_weights.sum(dim=-1, keepdim=True)
        x = tokens.to(torch.bfloat16)
        y = self.experts(x, topk_idx, topk_weights)
        if self.record:
            for tensor in (x, topk_weights, y):
                tensor.retain_grad()
            self.call = MoECall(x, topk_idx, topk_weights, y)
        if self.training:
            self._balance(probabilities, topk_idx)
        return y.to(hidden.dtype).view_as(hidden)

    def _balance(self, probabilities: torch.Tensor, topk_idx: torch.Tensor) -> None:
        """E * sum_e f_e P_e (Switch Transformer, equation 4), 1 when even; the ranks' values add up to it.

        f_e is the share of slots that expert e serves, P_e its mean probability, both over all ranks.
        """
        load = torch.bincount(topk_idx.flatten(), minlength=self.num_experts).float()
        self.parallel.sum_([load])
        self.load = load / load.sum()
        mean_probability = probabilities.mean(dim=0) / self.parallel.size
        self.balance_loss = self.num_experts * (self.load * mean_probability).sum()


class Layer(nn.Module):
    """One decoder layer: attention, then router and experts, each behind an RMSNorm and a residual."""

    def __init__(self, config: TrainConfig, buffer: SymmBuffer, parallel: Parallel) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden)
        self.attention = Attention(config)
        self.moe_norm = RMSNorm(config.hidden)
        self.moe = MoE(config, buffer, parallel)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.moe(self.moe_norm(x))


class ByteMoE(nn.Module):
    """The language model: bytes int64 [batch, length] to logits fp32 [batch, length, 256]."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: TrainConfig, buffer: SymmBuffer, parallel: Parallel) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.hidden)
        self.layers = nn.ModuleList(Layer(config, buffer, parallel) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden)
        self.head = nn.Linear(config.hidden, VOCABULARY, bias=False) if config.untied else None
        cos, sin = rotary_tables(config.seq_len, config.head_dim, torch.device("cpu"))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        length = text.shape[1]
        x = self.embedding(text)
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        return F.linear(self.norm(x), self.embedding.weight if self.head is None else self.head.weight)

    def moe_layers(self) -> list[MoE]:
        """The expert layers, first to last."""
        return [module for module in self.modules() if isinstance(module, MoE)]

    def expert_parameters(self) -> list[nn.Parameter]:
        """The sharded parameters: their gradients are complete on their own rank."""
        return [parameter for moe in self.moe_layers() for parameter in moe.experts.parameters()]

    def replicated_parameters(self) -> list[nn.Parameter]:
        """The parameters every rank holds: their gradients are summed over the ranks."""
        sharded = {id(parameter) for parameter in self.expert_parameters()}
        return [parameter for parameter in self.parameters() if id(parameter) not in sharded]


def _matrices(model: ByteMoE) -> Iterator[tuple[torch.Tensor, float]]:
    """Every replicated matrix with the standard deviation to draw it with."""
    residual = 1.0 / math.sqrt(2 * len(model.layers))  # so that the residual stream keeps its scale
    yield model.embedding.weight, EMBEDDING_STD
    if model.head is not None:
        yield model.head.weight, EMBEDDING_STD
    for name, module in model.layers.named_modules():
        if isinstance(module, nn.Linear):
            scale = residual if name.endswith("attention.output") else 1.0
            yield module.weight, scale / math.sqrt(module.in_features)


@torch.no_grad()
def initialize(model: ByteMoE, config: TrainConfig, parallel: Parallel) -> None:
    """Draw the weights from the seed.

    Experts are drawn whole and then cut, so the model does not depend on how many ranks share it.
    """
    generator = torch.Generator().manual_seed(config.seed)

    def draw(shape: tuple[int, ...], std: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std

    for weight, std in _matrices(model):
        weight.copy_(draw(tuple(weight.shape), std))
    local = config.experts // parallel.size
    mine = slice(parallel.rank * local, (parallel.rank + 1) * local)
    residual = 1.0 / math.sqrt(2 * config.layers)
    hidden, intermediate = config.hidden, config.intermediate
    for moe in model.moe_layers():
        gate_up = draw((config.experts, 2 * intermediate, hidden), 1.0 / math.sqrt(hidden))
        down = draw((config.experts, hidden, intermediate), residual / math.sqrt(intermediate))
        moe.experts.gate_up.copy_(gate_up[mine])
        moe.experts.down.copy_(down[mine])
