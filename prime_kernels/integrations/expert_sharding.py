"""Expert weights as DTensors of all experts, sharded over an EP group, and FSDP2 over the other ranks.

The experts of a model live on a device mesh whose last dim is expert parallel: a rank holds E/R experts of
each layer, R ranks hold all of them, and the ranks at equal places of the other dims hold the same ones. FSDP
shards those over the mesh dims before the last; a checkpoint sees the whole [E, ...] and does not depend on
R. :func:`fully_shard_experts` makes an experts module such an FSDP unit. The rest of the model is the
caller's, with ``fully_shard`` over all ranks.

Gradients: a rank's expert gradient is the sum over the losses of its EP group, since tokens of all R ranks
reach its experts; any other gradient is of the rank's own loss. FSDP averages the first over the data
parallel ranks and the second over all ranks, so :func:`fully_shard_experts` also divides the first by R.
Every gradient is then that of the mean of the ranks' losses. For a mean over tokens where ranks have unequal
numbers of them, each rank's loss is the sum over its tokens, times the ranks, over the tokens of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ..ep import resolve_group
from ..module import MegaMoE

# Parameters of MegaMoE that every rank of the EP group holds whole.
_REPLICATED = ("shared_gate_up", "shared_down")


def distribute_experts(experts: MegaMoE, mesh: DeviceMesh) -> None:
    """Make the weights of a :class:`~..module.MegaMoE` DTensors, in place; it computes with them as before.

    ``gate_up`` becomes [E, 2I, H] and ``down`` [E, H, I], of which this rank's El experts are its shard of
    dim 0; its values stay. Shared experts' weights become replicated DTensors, and their gradients the sum
    over the mesh. Call it before anything else holds the parameters; also on the meta device.

    Args:
        mesh: one dim, the ranks of the module's group in their order.

    Raises:
        ValueError: a mesh of several dims or of other ranks than the group's; weights that are DTensors
            already.
    """
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh has {mesh.ndim} dims, needs the expert parallel one alone: mesh[name of that dim]"
        )
    _check_ranks(experts, mesh)
    for name, weight in experts.named_parameters(recurse=False):
        if isinstance(weight, DTensor):
            raise ValueError(f"{name} is a DTensor already; call distribute_experts once, before fully_shard")
    for name, weight in list(experts.named_parameters(recurse=False)):
        placement = Replicate() if name in _REPLICATED else Shard(0)
        _place(experts, name, weight.detach(), mesh, [placement])


def fully_shard_experts(
    experts: nn.Module, mesh: DeviceMesh, *, mp_policy: MixedPrecisionPolicy | None = None, **options: Any
) -> FSDPModule:
    """Make an experts module an FSDP2 unit: experts over the last dim of ``mesh``, FSDP over the dims before.

    Call it, on every rank, for each experts module before ``fully_shard`` of what contains it. Shards of FSDP
    are whole experts where the E/R of a rank divide over the data parallel ranks, else rows of each.

    The inputs of the module are not cast under mixed precision: x has to be in ``param_dtype`` and the
    weights of the top-k stay in fp32, as the kernels take them.

    Args:
        experts: a :class:`~..module.MegaMoE`; or a module whose parameters are DTensors already, sharded over
            the EP group on dim 0, as ``apply`` of the integrations leaves them.
        mesh: named dims ("data", "expert"), FSDP over the first; or ("replicate", "data", "expert"), HSDP
            over the first two. Any names. The last one holds the ranks of the module's EP group in order.
        mp_policy: as the rest of the model has it; ``cast_forward_inputs`` is taken as False.
        options: of ``fully_shard``, for example ``reshard_after_forward``; not ``shard_placement_fn``.

    Returns:
        ``experts``.

    Raises:
        ValueError: a mesh without names or of another number of dims or of other ranks than the EP group's; a
            module of another kind; experts and rows that both don't divide over the data parallel ranks.
    """
    names = mesh.mesh_dim_names
    if names is None or mesh.ndim not in (2, 3):
        raise ValueError(
            f"mesh is {mesh}, needs 2 or 3 named dims, expert parallel the last of them; make it with "
            'init_device_mesh(device_type, (data, expert), mesh_dim_names=("data", "expert"))'
        )
    expert_mesh = mesh[names[-1]]
    data_mesh = mesh[names[0]] if mesh.ndim == 2 else mesh[names[:-1]]
    placement_of = _placement_of_fsdp(experts, mesh.size(mesh.ndim - 2))
    if isinstance(experts, MegaMoE):
        distribute_experts(experts, expert_mesh)
    else:
        _adopt(experts, expert_mesh)
    policy = mp_policy or MixedPrecisionPolicy()
    unit = fully_shard(
        experts,
        mesh=data_mesh,
        shard_placement_fn=placement_of,
        mp_policy=MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, policy.output_dtype, False),
        **options,
    )
    if expert_mesh.size() > 1:
        unit.set_all_reduce_hook(_Divide(expert_mesh.size()))
    return unit


class _Divide:
    """What FSDP calls with its reduced gradients.

    Not ``set_gradient_divide_factor``: gloo has no reduction for it, and for a mesh of one rank releases of
    torch differ in whether they divide not at all, once or twice.
    """

    def __init__(self, divisor: int) -> None:
        self.divisor = divisor

    def __call__(self, reduced: Tensor) -> None:
        reduced.div_(self.divisor)
        if reduced.is_cuda:
            # FSDP runs hooks on a stream that the tensor was not allocated on, and may free it before that
            # stream is done.
            reduced.record_stream(torch.cuda.current_stream(reduced.device))


def _placement_of_fsdp(experts: nn.Module, shards: int) -> Callable[[nn.Parameter], Shard]:
    """The dim on which FSDP cuts each parameter."""
    weights = {name: local_part(weight) for name, weight in experts.named_parameters()}
    sizes = {name: tuple(weight.shape) for name, weight in weights.items() if weight.dim() == 3}
    # torch 2.9 reads and saves uneven shards of a dim that is split over experts as well in the wrong places.
    even = (dim for dim in (0, 1) if all(size[dim] % shards == 0 for size in sizes.values()))
    dim = next(even, None)
    if dim is None:
        raise ValueError(
            f"{type(experts).__name__} holds {sizes} on this rank, and FSDP over {shards} ranks cuts experts "
            "or their rows into equal parts; use a number of data parallel ranks that divides either"
        )
    return lambda weight: Shard(dim if weight.dim() == 3 else 0)


def local_part(weight: Tensor) -> Tensor:
    """The local part of a DTensor, outside of autograd; other tensors as they are."""
    return weight._local_tensor if isinstance(weight, DTensor) else weight


def _adopt(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Let DTensors over a group be over the dim of a larger mesh, as FSDP needs them."""
    ranks = mesh.mesh.flatten().tolist()
    for name, weight in list(experts.named_parameters()):
        what = f"{type(experts).__name__}.{name}"
        if not isinstance(weight, DTensor) or tuple(weight.placements) != (Shard(0),):
            placed = weight.placements if isinstance(weight, DTensor) else "a plain tensor"
            raise ValueError(
                f"{what} is {placed}, needs a DTensor sharded on dim 0 over the EP group: a MegaMoE, or what "
                "apply(model, group, ...) of the integrations makes of a library's experts"
            )
        group = weight.device_mesh.mesh.flatten().tolist()
        if group != ranks:
            raise ValueError(
                f"{what} is sharded over the ranks {group}, the last dim of the mesh holds {ranks}; make the "
                "group with mesh[name of that dim].get_group()"
            )
        owner = experts.get_submodule(name.rpartition(".")[0])
        _place(owner, name.rpartition(".")[2], weight.to_local().detach(), mesh, [Shard(0)])


def _check_ranks(experts: MegaMoE, mesh: DeviceMesh) -> None:
    group = resolve_group(experts.group)
    ranks = [0] if group is None else dist.get_process_group_ranks(group)
    wanted = mesh.mesh.flatten().tolist()
    if ranks != wanted:
        raise ValueError(
            f"the group of this MegaMoE holds the ranks {ranks}, the expert parallel dim of the mesh "
            f"{wanted}; make the module with group=mesh[name of that dim].get_group()"
        )


def _place(
    module: nn.Module, name: str, local: Tensor, mesh: DeviceMesh, placements: list[Placement]
) -> None:
    """Replace a parameter by a DTensor that has ``local`` as this rank's part."""
    old: nn.Parameter = getattr(module, name)
    weight = DTensor.from_local(local, mesh, placements, run_check=False)
    setattr(module, name, nn.Parameter(weight, requires_grad=old.requires_grad))


@torch.no_grad()
def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` in the 2-norm, for DTensors of several meshes and plain tensors.

    Experts and the rest of a model usually lie on different meshes, whose DTensors torch does not mix.
    Collective over the ranks that hold parts of the parameters. Plain tensors count as replicated.

    Returns:
        The norm of all gradients together before clipping: a plain tensor [], equal on all ranks.

    Raises:
        ValueError: ``max_norm`` is not positive; a gradient that is still to be summed over ranks.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}, needs a positive number")
    if isinstance(parameters, Tensor):  # to iterate over it would give its rows, which have no gradients
        parameters = [parameters]
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads:
        return torch.zeros(())
    by_shards: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[Tensor]] = {}
    for grad in grads:
        by_shards.setdefault(_sharded_dims(grad), []).append(local_part(grad))
    squares = []
    for shards, locals_ in by_shards.items():
        square = nn.utils.get_total_norm(locals_).square()
        if shards is not None:
            mesh, dims = shards
            for dim in dims:
                dist.all_reduce(square, group=mesh.get_group(dim))
        squares.append(square)
    total = torch.stack(squares).sum().sqrt()
    factor = (max_norm / (total + _NORM_EPSILON)).clamp(max=1.0)
    for grad in grads:
        local_part(grad).mul_(factor)
    return total


# What torch.nn.utils.clip_grad_norm_ adds to the norm that it divides by.
_NORM_EPSILON = 1e-6


def _sharded_dims(grad: Tensor) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """The mesh and those of its dims that split a gradient; None for a plain tensor."""
    if not isinstance(grad, DTensor):
        return None
    if any(placement.is_partial() for placement in grad.placements):
        raise ValueError(
            f"a gradient of shape {tuple(grad.shape)} is {grad.placements}, still to be summed over its "
            "mesh; fully_shard does that, or grad.redistribute(placements=...)"
        )
    dims = (dim for dim, placement in enumerate(grad.placements) if not placement.is_replicate())
    return grad.device_mesh, tuple(dims)


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
