"""What the tests of FSDP2 with expert parallelism share, on CPU and GPU.

A model of the usual shape, the batches of all ranks, and the training of one process and of several.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from prime_kernels import MegaMoE, op
from prime_kernels.integrations.expert_sharding import clip_grad_norm_, fully_shard_experts
from prime_kernels.integrations.fsdp_accumulators import accumulate_in_fsdp

RANKS = 4


@dataclass(frozen=True)
class Sizes:
    vocab: int = 16
    hidden: int = 8
    inter: int = 6
    experts: int = 8
    topk: int = 2
    layers: int = 2
    heads: int = 2
    shared_experts: int = 1
    idle_experts: int = 2  # the first ones, which no token chooses
    tokens: int = 16  # per rank


# ---- the model


class PlainExperts(nn.Module):
    """All experts in plain autograd ops, each on all tokens, with the parameter names of MegaMoE."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, dtype=dtype) * 2 * shape[-1] ** -0.5)

        self.gate_up = parameter(sizes.experts, 2 * sizes.inter, sizes.hidden)
        self.down = parameter(sizes.experts, sizes.hidden, sizes.inter)
        if sizes.shared_experts:
            self.shared_gate_up = parameter(2 * sizes.shared_experts * sizes.inter, sizes.hidden)
            self.shared_down = parameter(sizes.hidden, sizes.shared_experts * sizes.inter)

    def forward(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            weight = (topk_weights * (topk_idx == expert)).sum(-1, keepdim=True)
            y = y + weight * _swiglu(x, gate_up, down)
        return y + _swiglu(x, self.shared_gate_up, self.shared_down) if hasattr(self, "shared_down") else y


def _swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


def _keep_y(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator is op.forward_op else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTING: dict[str, dict[str, Any]] = {
    "full": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, _keep_y),
    },
}


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """torch's own has no backward on a GPU for a batch without sequences."""
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(-1) @ value


class Block(nn.Module):
    """Causal attention, then router and experts, each behind a norm and a residual."""

    def __init__(self, sizes: Sizes, experts: nn.Module, dtype: torch.dtype, mode: str | None) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False, dtype=dtype)
        self.sizes = sizes
        self.mode = mode
        self.attention_norm = nn.RMSNorm(sizes.hidden, dtype=dtype)
        self.qkv = linear(sizes.hidden, 3 * sizes.hidden)
        self.output = linear(sizes.hidden, sizes.hidden)
        self.moe_norm = nn.RMSNorm(sizes.hidden, dtype=dtype)
        self.router = linear(sizes.hidden, sizes.experts)
        self.experts = experts
        #: The experts of the next forward's tokens, None to let the router choose; then what it chose.
        self.forced: Tensor | None = None
        self.chosen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mode is None:
            return self._forward(x)
        return checkpoint(self._forward, x, **CHECKPOINTING[self.mode])

    def _forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        heads = self.sizes.heads  # and no -1 in the view, which is ambiguous in an empty batch
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, heads, hidden // heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = causal_attention(query, key, value)
        x = x + self.output(mixed.transpose(1, 2).reshape(x.shape))
        tokens = self.moe_norm(x)
        logits = self.router(tokens)
        probabilities = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
        if self.forced is None:
            busy = probabilities[..., self.sizes.idle_experts :]
            topk_idx = busy.topk(self.sizes.topk).indices + self.sizes.idle_experts
        else:
            topk_idx = self.forced
        self.chosen = topk_idx.detach()
        return x + self.experts(tokens, topk_idx, probabilities.gather(-1, topk_idx))


class Model(nn.Module):
    """Tokens int64 [batch, length] to logits [batch, length, vocab]."""

    def __init__(
        self, sizes: Sizes, make_experts: Callable[[], nn.Module], dtype: torch.dtype, mode: str | None = None
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab, sizes.hidden, dtype=dtype)
        self.blocks = nn.ModuleList(Block(sizes, make_experts(), dtype, mode) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden, dtype=dtype)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def single_model(sizes: Sizes, seed: int = 0) -> Model:
    """The model of a single process: float64, all experts in plain autograd ops."""
    torch.manual_seed(seed)
    return Model(sizes, lambda: PlainExperts(sizes), torch.float64)


# ---- batches and losses


@dataclass(frozen=True)
class Batch:
    """What one rank brings to one forward."""

    ids: Tensor  # int64 [batch, length]
    labels: Tensor
    scale: float = 1.0  # of its loss


# (batch, length) of each rank in each step: ranks without tokens, and both of a pair without any.
SHAPES = (
    ((2, 5), (0, 5), (1, 3), (4, 4)),
    ((0, 1), (0, 4), (3, 5), (1, 1)),
    ((3, 1), (2, 3), (0, 0), (1, 7)),
)


def make_batches(sizes: Sizes, step: int) -> list[Batch]:
    """The batches of all ranks."""
    generator = torch.Generator().manual_seed(1000 + step)

    def draw(shape: tuple[int, int]) -> Tensor:
        return torch.randint(sizes.vocab, shape, generator=generator)

    return [Batch(draw(shape), draw(shape)) for shape in SHAPES[step % len(SHAPES)]]


def loss_of(model: nn.Module, batch: Batch, all_tokens: int, ranks: int = RANKS) -> Tensor:
    """A rank's loss: the mean of the ranks' losses is the mean over the tokens of all ranks."""
    device = next(model.parameters()).device
    logits = model(batch.ids.to(device))
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(wide.flatten(0, 1), batch.labels.flatten().to(device), reduction="sum")
    return total * (batch.scale * ranks / all_tokens)


def tokens_of(batches: list[Batch]) -> int:
    return sum(batch.ids.numel() for batch in batches)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@dataclass
class Trace:
    """What training gave; tensors are whole."""

    losses: list[float] = field(default_factory=list)  # of each step, of one rank or of each rank in turn
    norms: list[float] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


CLIP = 0.05  # binds


def train_single(
    model: nn.Module, optimizer: torch.optim.Optimizer, sizes: Sizes, steps: range, micro_batches: int = 1
) -> Trace:
    """Steps of a single process over the batches of all ranks."""
    trace = Trace()
    for step in steps:
        optimizer.zero_grad()
        for batches in _micro_batches(sizes, step, micro_batches):
            for batch in batches:
                loss = loss_of(model, batch, tokens_of(batches)) / (RANKS * micro_batches)
                loss.backward()
                trace.losses.append(loss.item() * RANKS * micro_batches)
        trace.norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        trace.grads.append({name: weight.grad.clone() for name, weight in model.named_parameters()})
        optimizer.step()
    trace.weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    return trace


def _micro_batches(sizes: Sizes, step: int, count: int) -> list[list[Batch]]:
    return [make_batches(sizes, step * count + index) for index in range(count)]


# ---- the model over processes


@dataclass(frozen=True)
class Layout:
    """How 4 processes are laid out.

    mesh: (data, expert), or (replicate, data, expert); dense: how FSDP shards the rest of the model, over
    all ranks, or with replicas over the first dim of the mesh (HSDP).
    """

    mesh: tuple[int, ...]
    dense: str = "fsdp"

    def __str__(self) -> str:
        return f"{'x'.join(str(size) for size in self.mesh)}-{self.dense}"


EP4, EP2, EP1 = Layout((1, 4)), Layout((2, 2)), Layout((4, 1))
NODES = Layout((2, 2), "hsdp")  # two nodes: EP inside each, replicas of the rest across


@dataclass(frozen=True)
class Setup:
    """The model of :func:`build`."""

    layout: Layout
    sizes: Sizes = Sizes()
    dtype: torch.dtype = torch.float64
    mode: str | None = None  # of CHECKPOINTING
    keep: str | None = None
    compiled: bool = False
    accumulate: bool = False  # the kernels add to FSDP's accumulators
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    device: str = "cpu"


def build(setup: Setup, weights: dict[str, Tensor] | None) -> Model:
    """The model of this rank with its part of ``weights``, or on the meta device."""
    shape = setup.layout.mesh
    names = ("replicate", "data", "expert")[-len(shape) :]
    mesh = init_device_mesh(setup.device, shape, mesh_dim_names=names)
    group = mesh["expert"].get_group()
    sizes = setup.sizes

    def make_experts() -> MegaMoE:
        return MegaMoE(
            sizes.experts, sizes.topk, sizes.hidden, sizes.inter, max_tokens_per_rank=sizes.tokens,
            group=group, num_shared_experts=sizes.shared_experts, dtype=setup.dtype, keep=setup.keep,
        )  # fmt: skip

    with torch.device("meta" if weights is None else setup.device):
        model = Model(sizes, make_experts, setup.dtype, setup.mode)
    if weights is not None:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                value = weights[name]
                if weight.shape != value.shape:  # experts of this rank
                    first = mesh["expert"].get_local_rank() * weight.shape[0]
                    value = value[first : first + weight.shape[0]]
                weight.copy_(value)
    if setup.layout.dense == "fsdp":
        dense = init_device_mesh(setup.device, (mesh.size(),))
    else:
        replicas = (shape[0], mesh.size() // shape[0])
        dense = init_device_mesh(setup.device, replicas, mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        if setup.compiled:
            block.experts.build_buffer(setup.policy.param_dtype)
            block.experts.compile(backend="aot_eager", fullgraph=True)
        fully_shard_experts(block.experts, mesh, mp_policy=setup.policy)
        fully_shard(block, mesh=dense, mp_policy=setup.policy)
    fully_shard(model, mesh=dense, mp_policy=setup.policy)
    if setup.accumulate:
        accumulate_in_fsdp(model, [block.experts for block in model.blocks])
    if weights is None:
        model.to_empty(device=setup.device)
    return model


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters of a model that is not sharded."""
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a checkpoint holds."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Fill both from a checkpoint of :func:`state_of`."""
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def whole(tensor: Tensor) -> Tensor:
    """All of a DTensor. Collective."""
    return tensor.detach().full_tensor().clone()


def expert_parameters(model: Model) -> list[Any]:
    """What FSDP knows of the experts' parameters."""
    states = [block.experts._get_fsdp_state() for block in model.blocks]
    return [parameter for state in states for parameter in state._fsdp_param_group.fsdp_params]


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    setup: Setup,
    rank: int,
    steps: range,
    micro_batches: int = 1,
) -> Trace:
    """Steps of this rank; gradients are reduced in the last micro-batch of each."""
    trace = Trace()
    for step in steps:
        optimizer.zero_grad()
        for index, batches in enumerate(_micro_batches(setup.sizes, step, micro_batches)):
            model.set_requires_gradient_sync(index == micro_batches - 1)
            loss = loss_of(model, batches[rank], tokens_of(batches)) / micro_batches
            loss.backward()
            trace.losses.append(loss.item() * micro_batches)
            reduced = [weight.grad is not None for weight in model.parameters()]
            assert reduced == [index == micro_batches - 1] * len(reduced)
        trace.norms.append(clip_grad_norm_(model.parameters(), CLIP).item())
        trace.grads.append({name: whole(weight.grad) for name, weight in model.named_parameters()})
        optimizer.step()
    trace.weights = {name: whole(weight) for name, weight in model.named_parameters()}
    return trace
