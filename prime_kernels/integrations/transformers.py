"""Experts of Hugging Face Transformers models (5.x) computed by :func:`~..op.mega_moe`.

The library keeps a layer's experts in one module with fused 3-D parameters (``gate_up_proj`` [E, 2I, H] rows
[gate | up], ``down_proj`` [E, H, I]), which is the layout of the op. What that module computes with is looked
up, at each forward, by name in the library's registry of experts implementations. This module adds one, which
:func:`apply` selects for the experts modules of one model; the parameters are the library's own.

Router (scores, top-k, normalisation, scaling, auxiliary loss) and shared experts stay the library's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from ..dtensor import local_weight
from ..module import MegaMoE
from ..op import NAMESPACE, _check_precision
from ..symm import SymmBuffer
from ..validation import DATA_DTYPES, wide_dtype
from .expert_sharding import check_can_shard, gather_experts, shard_experts

REQUIREMENT = "transformers>=5.17,<6"

try:
    from transformers.activations import ACT2FN
    from transformers.integrations.moe import ExpertsInterface
except ImportError as error:
    raise ImportError(
        f"{__name__} needs the registry of experts implementations of Transformers 5, which cannot be "
        f"imported here ({error}); pip install '{REQUIREMENT}'"
    ) from error

#: The name of this implementation in the library's registry.
IMPLEMENTATION = f"{NAMESPACE}_mega_moe"

# Of an experts module that is switched over: what computes it now, and what was there before.
_SWITCHED = "_mega_moe_experts"

_WEIGHTS = ("gate_up_proj", "down_proj")

# What the library's decorator notes on an experts module, with the value the op can compute, and the reason
# why it cannot compute the other.
_LAYOUT = {
    "has_gate": (True, "its experts have no gate"),
    "has_bias": (False, "its projections have biases"),
    "is_transposed": (False, "its weights are stored transposed, gate_up_proj as [E, H, 2I]"),
    "is_concatenated": (True, "its gate and up rows are interleaved"),
    "has_post_expert_norm": (False, "its experts end in a norm"),
}


class _Experts(MegaMoE):
    """The experts of one module without weights of their own: those of the library come with each call."""

    def __init__(self, experts: Any, top_k: int, **settings: Any) -> None:
        num_experts, two_intermediate, hidden = experts.gate_up_proj.shape
        super().__init__(num_experts, top_k, hidden, two_intermediate // 2, device="meta", **settings)
        self.library_config = experts.config

    def buffers_built(self) -> list[SymmBuffer]:
        """Those that forwards have used, one for each dtype."""
        return list(self._placement.built.values())

    def compute(self, experts: nn.Module, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        """y [n, H] of x [n, H] with the weights of ``experts``."""
        if torch.compiler.is_compiling() and not self._placement.built:
            raise RuntimeError(
                "no buffer yet; call build_buffers(model) before torch.compile traces the experts"
            )
        gate_up, down = (local_weight(name, getattr(experts, name)) for name in _WEIGHTS)
        mma_type_dtypes = {dtype: mma_type for mma_type, dtype in DATA_DTYPES.items()}
        if gate_up.dtype in mma_type_dtypes:  # else the forward names the dtype it has no buffer for
            topk_weights = topk_weights.to(wide_dtype(mma_type_dtypes[gate_up.dtype]))
        weights = {"gate_up": gate_up, "down": down}
        return functional_call(self, weights, (x, topk_idx, topk_weights))


def mega_moe_experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The forward of an experts module, with the signature of the library's registry.

    Args:
        self: the library's experts module.
        hidden_states: [n, H] in the dtype of its weights.
        top_k_index: [n, K] int64.
        top_k_weights: [n, K] of any float dtype, used as given; the op gets them in fp32.

    Returns:
        [n, H] in the dtype of ``hidden_states``.

    Raises:
        RuntimeError: the module was not switched over by :func:`apply`; else as :func:`~..op.mega_moe`.
    """
    experts: _Experts | None = getattr(self, _SWITCHED, None)
    if experts is None:
        raise RuntimeError(
            f"experts_implementation={IMPLEMENTATION!r} is selected by {apply.__module__}.apply(model, ...), "
            f"which was not called on this {type(self).__name__}: it also needs max_tokens_per_rank"
        )
    return experts.compute(self, hidden_states, top_k_index, top_k_weights)


# Here and not in apply(): an unpickled model has only imported this module.
ExpertsInterface.register(IMPLEMENTATION, mega_moe_experts_forward)


def apply(
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
    precision: str = "bf16",
    keep: str | None = None,
    *,
    max_tokens_per_rank: int,
) -> list[str]:
    """Compute the experts of ``model`` with :func:`~..op.mega_moe`, until :func:`revert`.

    Names, shapes and dtypes of the state dict stay; with one rank the parameters stay the same objects. Each
    experts module gets a config of its own: other models that share the model's config object are left alone,
    and so is ``model.config``, which the model's checkpoints store.

    With a group of R ranks every rank calls this with equal experts (for example just loaded from a
    checkpoint), and before an optimizer is made: the two weights of each experts module become DTensors
    sharded over the group on dim 0, of which a rank keeps its E/R experts. Their gradients are those of the
    tokens of all ranks; everything else stays replicated, and its gradients are those of this rank's tokens.

    Weights in bf16 run the kernels; in fp32 or fp64 they need the reference backend, except inside
    ``torch.autocast`` to bf16.

    Args:
        model: a model of Transformers, or any module that holds its experts modules.
        group: the EP group. None is the default group, or one rank when torch.distributed is not in use.
        precision: see :func:`~..op.mega_moe`.
        keep: what the forward keeps for the backward, None or "z", see :func:`~..op.mega_moe`.
        max_tokens_per_rank: the most tokens (batch times sequence length) of one forward, equal on all ranks.

    Returns:
        The names of the experts modules that were switched over.

    Raises:
        ValueError: no experts module; ones this op does not compute (all of them, each with the reasons); an
            unknown precision or ``keep``; experts that do not divide over the group. The model is unchanged.
        RuntimeError: a precision without a kernel, a model that is switched over already.
    """
    _check_precision(precision, next(iter(DATA_DTYPES)))
    found = dict(_experts_modules(model))
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no experts module of Transformers 5 (one whose implementation its "
            "registry chooses); dense models and models with experts of their own kind cannot be switched"
        )
    already = [name for name, module in found.items() if hasattr(module, _SWITCHED)]
    if already:
        raise RuntimeError(f"{', '.join(already)}: switched over already; call revert(model) first")
    problems = [
        f"{name} ({type(module).__name__}): {'; '.join(reasons)}"
        for name, module in found.items()
        if (reasons := _why_not(module))
    ]
    if problems:
        raise ValueError(
            "mega_moe computes bias-free SwiGLU experts, down(silu(gate(x)) * up(x)), with weights "
            f"gate_up_proj [E, 2I, H] and down_proj [E, H, I]. Not possible here: {', and '.join(problems)}"
        )
    made = {}
    for name, module in found.items():
        settings = {"max_tokens_per_rank": max_tokens_per_rank, "group": group, "precision": precision}
        try:
            made[name] = _Experts(
                module, module.config.num_experts_per_tok, keep=keep, dtype=torch.bfloat16, **settings
            )
        except ValueError as error:
            raise ValueError(f"{name} ({type(module).__name__}): {error}") from error
        if made[name].num_local_experts < made[name].num_experts:
            check_can_shard(name, module, _WEIGHTS)
    for name, module in found.items():
        if made[name].num_local_experts < made[name].num_experts:
            shard_experts(module, _WEIGHTS, group, made[name].num_local_experts)
        # Not by setattr, which would make the experts a submodule, with entries in the state dict.
        vars(module)[_SWITCHED] = made[name]
        module.config = copy.copy(module.config)
        module.config._experts_implementation_internal = IMPLEMENTATION
    return list(found)


def revert(model: nn.Module) -> list[str]:
    """Give the experts of ``model`` back to the implementation they had before :func:`apply`.

    With a group of several ranks it is collective: each rank gets all experts again, as plain parameters.

    Returns:
        The names of the experts modules that were switched back.

    Raises:
        ValueError: none was switched over.
    """
    switched = _switched_modules(model)
    for _, module in switched:
        experts: _Experts = getattr(module, _SWITCHED)
        if experts.num_local_experts < experts.num_experts:
            gather_experts(module, _WEIGHTS)
        module.config = experts.library_config
        delattr(module, _SWITCHED)
    return [name for name, _ in switched]


def build_buffers(model: nn.Module) -> list[SymmBuffer]:
    """Build the staging buffers of a model that was switched over: no tokens pass through its experts.

    Collective over the group. The first eager forward does this by itself; ``torch.compile`` needs the
    buffers before it traces. A buffer belongs to a dtype: with ``torch.autocast`` call this inside of it.

    Returns:
        The buffers, one for all layers of a shape; their ``check()`` raises what the kernels recorded.

    Raises:
        ValueError: the model was not switched over; else as :class:`~..symm.SymmBuffer`.
        RuntimeError: as :class:`~..symm.SymmBuffer`.
    """
    buffers: list[SymmBuffer] = []
    for _, module in _switched_modules(model):
        experts: _Experts = getattr(module, _SWITCHED)
        weight = module.gate_up_proj
        x = torch.empty(0, experts.hidden, dtype=weight.dtype, device=weight.device)
        topk_weights = torch.empty(0, experts.top_k, device=weight.device)
        with torch.no_grad():
            module(x, topk_weights.long(), topk_weights)
        buffers += [buffer for buffer in experts.buffers_built() if buffer not in buffers]
    return buffers


def _experts_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules of classes that the library's ``use_experts_implementation`` decorates."""
    for name, module in model.named_modules():
        if all(hasattr(module, name) for name in ("has_gate", "is_transposed", "_apply_gate")):
            yield name or "the model itself", module


def _switched_modules(model: nn.Module) -> list[tuple[str, Any]]:
    switched = [(name, module) for name, module in _experts_modules(model) if hasattr(module, _SWITCHED)]
    if not switched:
        raise ValueError(f"no experts module of this {type(model).__name__} is switched over; see apply()")
    return switched


def _why_not(module: Any) -> list[str]:
    """What keeps the op from computing an experts module; empty when it can."""
    reasons = [
        reason for flag, (wanted, reason) in _LAYOUT.items() if getattr(module, flag, wanted) is not wanted
    ]
    gate = type(module)._apply_gate
    if gate.__module__ != ExpertsInterface.__module__:
        reasons.append(f"its gate is not SwiGLU but a function of its own, {gate.__qualname__}")
    else:
        activation = getattr(module, "act_fn", None)
        silu = {nn.SiLU, type(ACT2FN["silu"]), type(ACT2FN["swish"])}
        if activation is not nn.functional.silu and type(activation) not in silu:
            name = getattr(activation, "__name__", type(activation).__name__)
            reasons.append(f"its activation is {name}, not SiLU")
    if getattr(module, "_is_expert_parallel", False) or getattr(module, "_is_hooked", False):
        reasons.append("the library's own tensor or expert parallelism is on; load the model without it")
    if getattr(module.config, "num_experts_per_tok", None) is None:
        reasons.append(f"its {type(module.config).__name__} has no num_experts_per_tok")
    for name in _WEIGHTS:
        weight = getattr(module, name, None)
        if weight is None:
            reasons.append(f"it has no {name}")
        elif weight.dtype not in DATA_DTYPES.values():
            known = ", ".join(str(dtype) for dtype in DATA_DTYPES.values())
            reasons.append(f"its {name} is {weight.dtype}, needs {known}")
    return reasons
