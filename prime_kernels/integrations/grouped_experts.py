"""Reading the weights of a framework's grouped-experts module for :func:`~..op.mega_moe`.

Two layouts are known, El local experts each:

* TorchTitan's names: ``w1`` (gate) [El, I, H], ``w2`` (down) [El, H, I], ``w3`` (up) [El, I, H];
* fused: ``gate_up`` [El, 2I, H], rows [gate | up], and ``down`` [El, H, I].

The kernels read gate and up from one matrix. Fused weights go to them as they are; ``w1`` and ``w3`` are
concatenated in every forward, 4 El I H bytes in bf16, which autograd keeps until the backward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..dtensor import local_weight

SPLIT_NAMES = ("w1", "w2", "w3")
FUSED_NAMES = ("gate_up", "down")

# Where modules keep their activation function, and what counts as SiLU (SwiGLU is SiLU of the gate times up).
_ACTIVATION_ATTRIBUTES = ("activation", "activation_fn", "act_fn", "act", "hidden_act")
_SILU_NAMES = ("silu", "swish", "swiglu")

# Attribute of the two halves' accumulators that holds the whole, which the kernels add to.
_WHOLE = "whole_gate_up"


class ExpertWeights(NamedTuple):
    """This rank's experts as the op takes them; both carry the ``main_grad`` of the module's parameters."""

    gate_up: Tensor
    down: Tensor


def check_experts(experts: nn.Module) -> None:
    """Refuse a module that computes something else than SwiGLU experts without biases.

    Raises:
        ValueError: names the module, and the parameter or attribute.
    """
    what = type(experts).__name__
    names = {name for name, _ in experts.named_parameters()}
    known = set(FUSED_NAMES if "gate_up" in names else SPLIT_NAMES)
    if names == {"w1", "w2"}:
        raise ValueError(
            f"{what} has w1 and w2 and no w3: its experts have no gate. The kernels compute SwiGLU, "
            "down(silu(gate) * up); use another dispatch for non-gated experts"
        )
    unknown = sorted(names - known)
    biases = [name for name in unknown if "bias" in name or name in ("b1", "b2", "b3")]
    if biases:
        raise ValueError(f"{what} has biases ({', '.join(biases)}), the kernels add none; build it without")
    if names != known:
        raise ValueError(
            f"{what} has the parameters {', '.join(sorted(names)) or '(none)'}; needs exactly "
            f"{', '.join(SPLIT_NAMES)} or {', '.join(FUSED_NAMES)}"
        )
    for name in _ACTIVATION_ATTRIBUTES:
        activation = getattr(experts, name, None)
        if activation is not None and not _is_silu(activation):
            raise ValueError(
                f"{what}.{name} is {_name_of(activation)}, the kernels compute SwiGLU (SiLU of the gate); "
                "use another dispatch for this activation"
            )


def _is_silu(activation: object) -> bool:
    if isinstance(activation, str):
        return activation.lower() in _SILU_NAMES
    return isinstance(activation, nn.SiLU) or activation in (nn.functional.silu, torch.ops.aten.silu.default)


def _name_of(activation: object) -> str:
    return getattr(activation, "__name__", None) or repr(activation)


def expert_weights(experts: nn.Module) -> ExpertWeights:
    """The module's weights as local tensors, gate and up as one, differentiable.

    Raises:
        ValueError: shapes that do not belong together; a DTensor split over anything but experts; ``w1`` and
            ``w3`` with accumulators that :func:`allocate_main_grads` did not make.
    """
    if hasattr(experts, "gate_up"):
        gate_up, down = (_local(experts, name) for name in FUSED_NAMES)
        _check_shapes(experts, {"gate_up": gate_up, "down": down}, gate_up.shape[1] // 2)
        return ExpertWeights(gate_up, down)
    gate, down, up = (_local(experts, name) for name in SPLIT_NAMES)
    _check_shapes(experts, {"w1": gate, "w2": down, "w3": up}, gate.shape[1])
    gate_up = torch.cat((gate, up), dim=1)
    whole = _whole_main_grad(gate, up)
    if whole is not None:
        gate_up.main_grad = whole  # type: ignore[attr-defined]
    return ExpertWeights(gate_up, down)


def allocate_main_grads(experts: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Give every trained parameter a zeroed ``main_grad``, to which the backward adds instead of returning.

    ``w1.main_grad`` and ``w3.main_grad`` become views of one [El, 2I, H] tensor: the kernels add to it in
    place, and no gradient of that size is made besides. Calling it again starts new accumulators; zero the
    present ones in place between optimizer steps. With DTensor parameters ``main_grad`` is the local tensor.

    Args:
        experts: a module that :func:`check_experts` accepts; ``w1`` and ``w3`` are both trained or both
            frozen.
        dtype: fp32; fp64 for parameters in fp64, which only the reference backend runs.

    Raises:
        ValueError: one of ``w1`` and ``w3`` is frozen and the other is not.
    """
    check_experts(experts)
    parameters = dict(experts.named_parameters())
    if "w1" in parameters:
        w1, w3 = parameters.pop("w1"), parameters.pop("w3")
        _check_trained_together(w1, w3)
        if w1.requires_grad:
            for parameter, half in zip((w1, w3), gate_up_accumulator(w1, dtype), strict=True):
                parameter.main_grad = half  # type: ignore[attr-defined]
    for parameter in parameters.values():
        if parameter.requires_grad:
            main_grad = torch.zeros(local_tensor(parameter).shape, dtype=dtype, device=parameter.device)
            parameter.main_grad = main_grad  # type: ignore[attr-defined]


def _check_trained_together(gate: Tensor, up: Tensor) -> None:
    if gate.requires_grad != up.requires_grad:
        raise ValueError(
            "one of w1 and w3 is frozen and the other is not; their gradient is accumulated as one, so "
            "freeze both or neither"
        )


def gate_up_accumulator(gate: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Zeroed accumulators of w1 and w3, halves of one tensor; ``gate`` is w1, of which DTensors are local."""
    experts, inter, hidden = local_tensor(gate).shape
    whole = torch.zeros((experts, 2 * inter, hidden), dtype=dtype, device=gate.device)
    gate_half, up_half = whole.split(inter, dim=1)
    for half in (gate_half, up_half):
        setattr(half, _WHOLE, whole)
    return gate_half, up_half


def local_tensor(tensor: Tensor) -> Tensor:
    """The local part of a DTensor, outside of autograd; other tensors as they are."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _local(experts: nn.Module, name: str) -> Tensor:
    """One weight as this rank holds it; it keeps the ``main_grad`` that its parameter has."""
    weight: Tensor = getattr(experts, name)
    if weight.dim() != 3:
        raise ValueError(f"{name} has shape {list(weight.shape)}, needs three dims, experts first")
    return local_weight(name, weight)


def _check_shapes(experts: nn.Module, weights: dict[str, Tensor], inter: int) -> None:
    """gate (and up) [El, I, H], or both [El, 2I, H], and down [El, H, I], of one dtype."""
    what = type(experts).__name__
    first_name, first = next(iter(weights.items()))
    count, rows, hidden = first.shape
    for name, weight in weights.items():
        wanted = (count, hidden, inter) if name in ("w2", "down") else (count, rows, hidden)
        if tuple(weight.shape) != wanted or weight.dtype != first.dtype:
            raise ValueError(
                f"{what}: {first_name} is {first.dtype} {list(first.shape)}, so {name} has to be "
                f"{first.dtype} {list(wanted)} and is {weight.dtype} {list(weight.shape)}"
            )
    if first_name == "gate_up" and rows % 2:
        raise ValueError(f"gate_up has {rows} rows per expert, needs an even number: gate, then up")


def _whole_main_grad(gate: Tensor, up: Tensor) -> Tensor | None:
    """The [El, 2I, H] accumulator of gate and up, None when autograd returns their gradients."""
    halves = [getattr(weight, "main_grad", None) for weight in (gate, up)]
    if halves[0] is None and halves[1] is None:
        return None
    _check_trained_together(gate, up)
    wholes = [getattr(half, _WHOLE, None) for half in halves]
    if wholes[0] is None or wholes[0] is not wholes[1]:
        raise ValueError(
            "w1.main_grad and w3.main_grad have to be views of one tensor, to which the kernels add; make "
            f"them with {__name__}.allocate_main_grads(experts), or hold gate and up as one parameter gate_up"
        )
    return wholes[0]
