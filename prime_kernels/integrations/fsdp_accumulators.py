"""Expert gradients of FSDP2 models, added in fp32 to the accumulators that FSDP reduces.

Without this the backward returns each expert gradient in the weight's dtype, and FSDP adds them up in its
reduce dtype over micro-batches. With it the kernels add to FSDP's accumulator themselves: in fp32, and with
no gradient tensor beside it. Its price is memory: a layer's accumulators, 12 El I H bytes, exist from its
forward to its reduce-scatter, where they otherwise begin in the backward.

Reads private attributes of ``torch.distributed.fsdp``, as torch 2.9 to 2.13 have them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from .grouped_experts import check_experts, gate_up_accumulator, local_tensor

# Attribute of a DTensor accumulator: its local part, as a parameter's main_grad takes it.
_LOCAL = "local_main_grad"


def accumulate_in_fsdp(model: nn.Module, experts: Iterable[nn.Module]) -> None:
    """From the next forward on, let the kernels add to FSDP's accumulators of these experts.

    Call it once, after ``fully_shard``. With ``torch.compile`` compile modules inside the FSDP modules: the
    latter get hooks. Where a parameter group of FSDP holds other parameters too, FSDP adds
    their gradients to accumulators of the same dtype, since it reduces a group in one.

    Args:
        model: holds the experts; ``fully_shard`` was applied to modules of it.
        experts: modules that the dispatcher's ``run`` is given.

    Raises:
        ValueError: an experts module that no FSDP module of ``model`` manages, or that the kernels cannot
            compute.
    """
    wanted = set(experts)
    for module in wanted:
        check_experts(module)
    missing = set(wanted)
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in _parameter_groups(module):
            managed = {parameter._module_info.module for parameter in group.fsdp_params} & wanted
            if managed:
                _Accumulators(group.fsdp_params, managed).watch(module)
                missing -= managed
    if missing:
        names = ", ".join(sorted(type(module).__name__ for module in missing))
        raise ValueError(f"no FSDP module of the model manages {names}; call fully_shard on the model first")


def _parameter_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # earlier releases have one for each module
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


class _Accumulators:
    """The accumulators of one parameter group of FSDP, present while its module runs forward and backward."""

    def __init__(self, fsdp_params: list[Any], experts: set[nn.Module]) -> None:
        self.fsdp_params = fsdp_params
        self.experts = experts

    def watch(self, module: nn.Module) -> None:
        # After FSDP's own hook, which gathers the parameters and was registered to run first.
        module.register_forward_pre_hook(self._attach)
        # The backward's graph and FSDP hold the accumulators from here on: they are freed with the reduce.
        # Activation checkpointing ends a forward that it repeats by an exception, hence always_call.
        module.register_forward_hook(self._detach, always_call=True)

    def _attach(self, module: nn.Module, inputs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        trained = [p for p in self.fsdp_params if p.unsharded_param.requires_grad]
        if not trained:
            return
        for experts in self.experts:
            _make_gate_up({p._module_info.param_name: p for p in trained if p._module_info.module is experts})
        for parameter in trained:
            if parameter.unsharded_accumulated_grad is None:
                weight = parameter.unsharded_param
                zeros = torch.zeros_like(local_tensor(weight), dtype=_wide(weight)).contiguous()
                _give(parameter, zeros)
            if parameter._module_info.module in self.experts:
                accumulator = parameter.unsharded_accumulated_grad
                parameter.unsharded_param.main_grad = getattr(accumulator, _LOCAL, accumulator)

    def _detach(self, module: nn.Module, inputs: Any, output: Any) -> None:
        for parameter in self.fsdp_params:
            # FSDP may have let go of the gathered parameters by now, the objects remain.
            vars(parameter._unsharded_param).pop("main_grad", None)


def _make_gate_up(named: dict[str, Any]) -> None:
    """New accumulators of w1 and w3 are halves of one tensor."""
    if not {"w1", "w3"} <= set(named):
        return
    pair = [named["w1"], named["w3"]]
    if any(parameter.unsharded_accumulated_grad is None for parameter in pair):
        weight = pair[0].unsharded_param
        halves = gate_up_accumulator(weight, _wide(weight))
        for parameter, half in zip(pair, halves, strict=True):
            _give(parameter, half)


def _wide(weight: Tensor) -> torch.dtype:
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def _give(parameter: Any, accumulator: Tensor) -> None:
    weight = parameter.unsharded_param
    if isinstance(weight, DTensor):
        distributed = DTensor.from_local(
            accumulator, weight.device_mesh, weight.placements, run_check=False,
            shape=weight.shape, stride=weight.stride(),
        )  # fmt: skip
        setattr(distributed, _LOCAL, accumulator)
        parameter.unsharded_accumulated_grad = distributed
    else:
        parameter.unsharded_accumulated_grad = accumulator
