"""Weights that are DTensors: which of them the kernels can compute with, and this rank's part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def local_weight(name: str, weight: Tensor, what: str = "experts", *, replicated: bool = False) -> Tensor:
    """This rank's part of a weight, differentiable; a plain tensor as it is.

    It keeps the ``main_grad`` that the weight has. The gradient of a DTensor weight is a DTensor: sharded as
    the weight; of a replicated weight the sum over the mesh is still to be taken (``Partial``), since each
    rank's gradient is that of its own tokens.

    Args:
        replicated: the weight has to be whole on every rank; else it has to be split over dim 0 alone.

    Raises:
        ValueError: a DTensor of another placement; it names ``name``, the mesh dim and the placement.
    """
    if type(weight) in (Tensor, nn.Parameter):
        return weight
    # Here, since importing torch.distributed.tensor takes half as long as importing torch.
    from torch.distributed.tensor import DTensor, Partial

    if not isinstance(weight, DTensor):
        return weight
    if replicated:
        for mesh_dim, placement in enumerate(weight.placements):
            if not placement.is_replicate() and weight.device_mesh.size(mesh_dim) > 1:
                raise ValueError(
                    _placement_error(name, weight, mesh_dim, f"{what} on each rank: Replicate()")
                )
        local = weight.to_local(grad_placements=[Partial()] * len(weight.placements))
    else:
        check_placements(name, weight, what)
        local = weight.to_local()
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is not None:
        value: Any = main_grad.to_local() if isinstance(main_grad, DTensor) else main_grad
        local.main_grad = value  # type: ignore[attr-defined]
    return local


def check_placements(name: str, tensor: DTensor, what: str, dims: tuple[int, ...] = (0,)) -> None:
    """A DTensor that is split over ``dims`` alone, so that its local part is whole experts or tokens.

    Raises:
        ValueError: names the tensor, and the mesh dim with its placement.
    """
    for mesh_dim, placement in enumerate(tensor.placements):
        if tensor.device_mesh.size(mesh_dim) > 1 and not any(placement.is_shard(dim) for dim in dims):
            wanted = " or ".join(f"Shard({dim})" for dim in dims)
            needed = f"{what} on each rank and each of them once: {wanted}"
            raise ValueError(_placement_error(name, tensor, mesh_dim, needed))


def _placement_error(name: str, tensor: DTensor, mesh_dim: int, needed: str) -> str:
    return (
        f"{name} is {tensor.placements[mesh_dim]} over mesh dim {mesh_dim} of "
        f"{tensor.device_mesh.size(mesh_dim)} ranks; the kernels need whole {needed}"
    )
