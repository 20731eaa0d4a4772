"""Expert weights of a library's module, sharded over an EP group as DTensors of the whole shape, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


def check_can_shard(name: str, module: nn.Module, weights: Iterable[str]) -> None:
    """Refuse weights that are sharded already or hold no values.

    Raises:
        ValueError: names the weight; ``name`` is the module's.
    """
    for weight in weights:
        value = getattr(module, weight)
        if isinstance(value, DTensor) or value.is_meta:
            kind = "sharded already" if isinstance(value, DTensor) else "on the meta device"
            raise ValueError(
                f"{name}.{weight} is {kind}, and apply() shards whole weights that hold values over the "
                "group; call it after loading the model and before fully_shard"
            )


def shard_experts(
    module: nn.Module, weights: Iterable[str], group: dist.ProcessGroup | None, num_local: int
) -> None:
    """Keep this rank's ``num_local`` experts of each weight [E, ...], as a DTensor of the whole shape."""
    weights = list(weights)
    device_type = getattr(module, weights[0]).device.type
    if group is None:
        group = dist.group.WORLD
        assert group is not None  # several ranks have a default group
    mesh = DeviceMesh.from_group(group, device_type)
    first = mesh.get_local_rank() * num_local

    def shard(weight: Tensor) -> Tensor:
        mine = weight[first : first + num_local].clone()
        return DTensor.from_local(mine, mesh, [Shard(0)], run_check=False)

    _replace(module, weights, shard)


def gather_experts(module: nn.Module, weights: Iterable[str]) -> None:
    """Make each weight a plain tensor of all experts again. Collective over the group."""
    _replace(module, weights, lambda weight: weight.full_tensor())


def _replace(module: nn.Module, weights: Iterable[str], change: Callable[[Any], Tensor]) -> None:
    for name in weights:
        weight = getattr(module, name)
        setattr(module, name, nn.Parameter(change(weight.detach()), requires_grad=weight.requires_grad))
