"""Routed experts of TorchTitan models (0.3) computed by :func:`~..op.mega_moe`.

The library's ``RoutedExperts`` calls three things in turn: its token dispatcher's ``dispatch``, its grouped
experts and the dispatcher's ``combine``. :func:`apply` puts an object in the dispatcher's place that hands
tokens and routing through, and gives the experts a forward that does all three in one call of the op. That
call stays inside the forward of the experts module, where FSDP2 has gathered the weights.

Router (scores, top-k, normalisation, scaling, expert bias), load statistics and shared experts stay the
library's, and so do the parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from ..dtensor import local_weight
from ..module import MegaMoE
from ..op import _check_precision
from ..validation import DATA_DTYPES
from .expert_sharding import check_can_shard, gather_experts, shard_experts

REQUIREMENT = "torchtitan>=0.3,<0.4"

try:
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher
except ImportError as error:
    raise ImportError(
        f"{__name__} needs TorchTitan's MoE modules, which cannot be imported here ({error}); "
        f"pip install '{REQUIREMENT}'"
    ) from error

# gate [E, I, H], down [E, H, I], up [E, I, H]
_WEIGHTS = ("w1_EFD", "w2_EDF", "w3_EFD")

# Scores after the experts, in fp32, and no capacity: what the op computes, too.
_KNOWN_DISPATCHERS = (LocalTokenDispatcher, AllToAllTokenDispatcher)


class _Routing:
    """What ``dispatch`` hands to the experts. No pytree, so FSDP2 does not cast the scores in it."""

    def __init__(self, moe: MegaMoE, topk_scores: Tensor, topk_expert_ids: Tensor) -> None:
        self.moe = moe
        self.topk_scores = topk_scores
        self.topk_expert_ids = topk_expert_ids


class _MegaMoEDispatcher:
    """In the place of a layer's token dispatcher: moves nothing, the experts' forward does."""

    def __init__(self, name: str, moe: MegaMoE, library: Any) -> None:
        self.name = name
        self.moe = moe
        self.library = library

    def dispatch(
        self, x: Tensor, topk_scores: Tensor, topk_expert_ids: Tensor, num_tokens_per_expert: Tensor
    ) -> tuple[Tensor, _Routing, None]:
        return x, _Routing(self.moe, topk_scores, topk_expert_ids), None

    def combine(self, routed_output: Tensor, metadata: None, x: Tensor) -> Tensor:
        return routed_output

    def wire_meshes(self, *, ep_mesh: Any) -> None:
        """Called by the library's ``parallelize``."""
        if ep_mesh is not None:
            raise RuntimeError(
                f"{self.name}: mega_moe takes its expert parallelism from apply(model, group), not from the "
                "library's parallelize; set its expert_parallel_degree to 1"
            )


def _experts_forward(experts: Any, x: Tensor, routing: _Routing) -> Tensor:
    """y [n, H] of x [n, H] in the dtype of x; in between bf16, as the library's own experts compute."""
    moe = routing.moe
    if torch.compiler.is_compiling() and not moe._placement.built:
        raise RuntimeError("no buffer yet; run one eager forward before torch.compile traces the experts")
    gate, down, up = (_local(name, getattr(experts, name)).bfloat16() for name in _WEIGHTS)
    weights = {"gate_up": torch.cat((gate, up), dim=1), "down": down}
    routed = (x.bfloat16(), routing.topk_expert_ids.to(torch.int64), routing.topk_scores.float())
    return functional_call(moe, weights, routed).type_as(x)


def _local(name: str, weight: Tensor) -> Tensor:
    if getattr(weight, "main_grad", None) is not None:
        raise ValueError(
            f"{name} has a main_grad; gradients of these experts are returned, since w1 and w3 are joined "
            "anew in each forward: delete main_grad, and let the optimizer read .grad"
        )
    return local_weight(name, weight)


def apply(
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
    precision: str = "bf16",
    keep: str | None = None,
    *,
    max_tokens_per_rank: int,
) -> list[str]:
    """Compute the routed experts of ``model`` with :func:`~..op.mega_moe`, until :func:`revert`.

    Names, shapes and dtypes of the state dict stay; with one rank the parameters stay the same objects. The
    experts compute in bf16 whatever the dtype of the weights, as the library's own do. ``w1_EFD`` and
    ``w3_EFD`` are concatenated in each forward: 4 El I H bytes that live until the backward.

    With a group of R ranks every rank calls this with equal experts, and before an optimizer is made: the
    three weights of each experts module become DTensors sharded over the group on dim 0, of which a rank
    keeps its E/R experts. Their gradients are those of the tokens of all ranks; everything else stays
    replicated, and its gradients are those of this rank's tokens.

    Args:
        model: a model of TorchTitan, or any module that holds its ``RoutedExperts``.
        group: the EP group. None is the default group, or one rank when torch.distributed is not in use.
        precision: see :func:`~..op.mega_moe`.
        keep: what the forward keeps for the backward, None or "z", see :func:`~..op.mega_moe`.
        max_tokens_per_rank: the most tokens (batch times sequence length) of one forward, equal on all ranks.

    Returns:
        The names of the ``RoutedExperts`` that were switched over.

    Raises:
        ValueError: no ``RoutedExperts``; ones this op does not compute (all of them, each with the reasons);
            an unknown precision or ``keep``; experts that do not divide over the group. The model is
            unchanged.
        RuntimeError: a precision without a kernel, a model that is switched over already.

    A forward raises ValueError where a weight has a ``main_grad``.
    """
    _check_precision(precision, next(iter(DATA_DTYPES)))
    found = dict(_routed_experts(model))
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no RoutedExperts of TorchTitan; dense models and MoE layers of "
            "another kind cannot be switched"
        )
    already = [name for name, routed in found.items() if _is_switched(routed)]
    if already:
        raise RuntimeError(f"{', '.join(already)}: switched over already; call revert(model) first")
    before_experts = {
        name for name, module in model.named_modules() if getattr(module, "score_before_experts", False)
    }
    problems = [
        f"{name} ({type(routed.inner_experts).__name__}): {'; '.join(reasons)}"
        for name, routed in found.items()
        if (reasons := _why_not(name, routed, before_experts))
    ]
    if problems:
        raise ValueError(
            "mega_moe computes bias-free SwiGLU experts, down(silu(gate(x)) * up(x)), with weights "
            f"{', '.join(_WEIGHTS)}, and applies scores to their output. Not possible here: "
            f"{', and '.join(problems)}"
        )
    made = {}
    for name, routed in found.items():
        experts, dispatcher = routed.inner_experts, routed.token_dispatcher
        num_experts, inter, hidden = experts.w1_EFD.shape
        try:
            made[name] = MegaMoE(
                num_experts, dispatcher.top_k, hidden, inter, max_tokens_per_rank=max_tokens_per_rank,
                group=group, precision=precision, keep=keep, device="meta", dtype=torch.bfloat16,
            )  # fmt: skip
        except ValueError as error:
            raise ValueError(f"{name} ({type(experts).__name__}): {error}") from error
        if made[name].num_local_experts < num_experts:
            check_can_shard(f"{name}.inner_experts", experts, _WEIGHTS)
    for name, routed in found.items():
        experts, moe = routed.inner_experts, made[name]
        if moe.num_local_experts < moe.num_experts:
            shard_experts(experts, _WEIGHTS, group, moe.num_local_experts)
        routed.token_dispatcher = _MegaMoEDispatcher(name, moe, routed.token_dispatcher)
        experts.forward = functools.partial(_experts_forward, experts)
    return list(found)


def revert(model: nn.Module) -> list[str]:
    """Give the routed experts of ``model`` back to the library.

    With a group of several ranks it is collective: each rank gets all experts again, as plain parameters.

    Returns:
        The names of the ``RoutedExperts`` that were switched back.

    Raises:
        ValueError: none was switched over.
    """
    switched = [(name, routed) for name, routed in _routed_experts(model) if _is_switched(routed)]
    if not switched:
        raise ValueError(f"no RoutedExperts of this {type(model).__name__} is switched over; see apply()")
    for _, routed in switched:
        moe = routed.token_dispatcher.moe
        if moe.num_local_experts < moe.num_experts:
            gather_experts(routed.inner_experts, _WEIGHTS)
        routed.token_dispatcher = routed.token_dispatcher.library
        del routed.inner_experts.forward
    return [name for name, _ in switched]


def _routed_experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if isinstance(module, RoutedExperts):
            yield name or "the model itself", module


def _is_switched(routed: Any) -> bool:
    return isinstance(routed.token_dispatcher, _MegaMoEDispatcher)


def _why_not(name: str, routed: Any, before_experts: set[str]) -> list[str]:
    """What keeps the op from computing a layer's routed experts; empty when it can."""
    experts, dispatcher = routed.inner_experts, routed.token_dispatcher
    reasons = []
    if _applies_scores_before(name, routed, before_experts):
        reasons.append("score_before_experts is True, the kernels apply scores to the experts' output")
    names = {parameter for parameter, _ in experts.named_parameters()}
    biases = sorted(parameter for parameter in names if "bias" in parameter)
    if biases:
        reasons.append(f"it has biases ({', '.join(biases)})")
    if names != set(_WEIGHTS) and not biases:
        reasons.append(f"its parameters are {', '.join(sorted(names)) or '(none)'}")
    if type(experts) is not GroupedExperts:
        # Also subclasses that change nothing visible here: the FP8 ones wrap the weights alone.
        reasons.append(
            f"it is a subclass of {GroupedExperts.__name__}, which may compute something else than SwiGLU in "
            "bf16 (of one by fully_shard: call apply() before that)"
        )
    if type(routed).forward is not RoutedExperts.forward:
        reasons.append(f"its {type(routed).__name__} has a forward of its own")
    if any("forward" in vars(module) for module in (routed, experts)):
        reasons.append("the library's parallelize (or something else) has wrapped its forward")
    if type(dispatcher) not in _KNOWN_DISPATCHERS:
        known = " or ".join(kind.__name__ for kind in _KNOWN_DISPATCHERS)
        reasons.append(f"its token dispatcher is {type(dispatcher).__name__}, needs {known}")
    for parameter in names & set(_WEIGHTS):
        dtype = getattr(experts, parameter).dtype
        if dtype not in (torch.bfloat16, torch.float32):
            reasons.append(f"its {parameter} is {dtype}, needs torch.bfloat16 or torch.float32")
    return sorted(reasons)


def _applies_scores_before(name: str, routed: Any, before_experts: set[str]) -> bool:
    """Older versions set it at the MoE layer, at the experts or at the dispatcher."""
    layer = name.rpartition(".")[0]
    return getattr(routed.token_dispatcher, "score_before_experts", False) or any(
        place in before_experts for place in (layer, name, f"{name}.inner_experts")
    )
