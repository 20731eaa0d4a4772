"""The experts of a mixture-of-experts layer as an ``nn.Module``, without a router."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import ep
from .checks import check_clamp, check_group, check_int, check_tensors
from .dtensor import local_weight
from .op import PRECISIONS, mega_moe
from .shared_buffers import mma_type_of, mma_type_of_dtype, shared_buffer
from .shared_buffers import release_buffers as release_buffers
from .symm import SymmBuffer
from .validation import check_keep, check_topk


class _Placement:
    """What a layer holds of its process: EP group and staging buffers. Copies share them, files have none."""

    def __init__(self, group: dist.ProcessGroup | None = None, buffer: SymmBuffer | None = None) -> None:
        self.group = group if buffer is None else buffer.group
        self.given = buffer
        self.built: dict[str, SymmBuffer] = {}

    def find(self, mma_type: str) -> SymmBuffer | None:
        buffer = self.built.get(mma_type) if self.given is None else self.given
        return None if buffer is None or buffer.destroyed else buffer

    def __deepcopy__(self, memo: dict[int, Any]) -> _Placement:
        copy = _Placement(self.group, self.given)
        copy.built.update(self.built)
        return copy

    def __reduce__(self) -> tuple[type[_Placement], tuple[()]]:
        return _Placement, ()


class MegaMoE(nn.Module):
    """Dispatch, experts and combine of a mixture-of-experts layer; the router stays outside.

    Layers of one shape, group and dtype share one staging buffer, which the first forward (or
    :meth:`build_buffer`) builds; nothing in it survives a call. :func:`release_buffers` lets go of it. Pass
    ``buffer`` to choose one yourself, for example where two layers run at the same time on different streams.
    ``torch.compile`` needs the buffer before it traces: call :meth:`build_buffer` first.

    Parameters (``state_dict`` holds these and nothing else; El = E / ranks of the group):

    * ``gate_up`` [El, 2I, H], rows [gate | up], and ``down`` [El, H, I];
    * with shared experts ``shared_gate_up`` [2Is, H] and ``shared_down`` [H, Is], where Is is
      num_shared_experts * I. They are replicated over the group, and their gradients are those of this rank's
      tokens.

    Parameters may also be DTensors of all experts, sharded over the group on dim 0
    (:mod:`~.integrations.expert_sharding` makes them); this rank computes with its part.

    A parameter with an fp32 ``main_grad`` of its shape has its gradient added there (see
    :func:`~.op.mega_moe`). Inside ``torch.autocast`` x and the weights are cast to the autocast dtype.

    ``copy.deepcopy`` keeps group and buffer. A pickled module holds neither: set ``group`` or ``buffer``
    after loading, or leave both for the default group. Set ``group`` also after the process group was made
    anew.

    Args:
        num_experts: E, over all ranks of the group.
        top_k: K.
        hidden: H.
        intermediate: I of one expert.
        max_tokens_per_rank: T, the most tokens a rank brings to one call, equal on all ranks. None takes the
            ``buffer``'s.
        group: the EP group. None is the default group, or one rank when torch.distributed is not in use.
        buffer: a staging buffer to use instead of the shared one; its group is taken.
        num_shared_experts: shared experts, which every token passes with weight 1.
        precision: see :func:`~.op.mega_moe`.
        activation_clamp: c of the clamped SwiGLU, None for plain SwiGLU.
        keep: what the forward keeps for the backward, None or "z", see :func:`~.op.mega_moe`.
        device, dtype: of the parameters; bf16 for the kernels.

    Raises:
        ValueError: an argument outside its limits, E not divisible by the group's ranks, a buffer of another
            shape, neither a buffer nor max_tokens_per_rank, an unknown ``keep``.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden: int,
        intermediate: int,
        *,
        max_tokens_per_rank: int | None = None,
        group: dist.ProcessGroup | None = None,
        buffer: SymmBuffer | None = None,
        num_shared_experts: int = 0,
        precision: str = "bf16",
        activation_clamp: float | None = None,
        keep: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        check_group(group)
        if buffer is not None:
            _check_is_buffer(buffer)
            if group is not None and group is not buffer.group:
                raise ValueError("group is not the buffer's group; leave it out when a buffer is given")
            if max_tokens_per_rank not in (None, buffer.num_max_tokens_per_rank):
                raise ValueError(
                    f"max_tokens_per_rank is {max_tokens_per_rank} and the buffer's is "
                    f"{buffer.num_max_tokens_per_rank}; leave it out when a buffer is given"
                )
            max_tokens_per_rank = buffer.num_max_tokens_per_rank
        if max_tokens_per_rank is None:
            raise ValueError("max_tokens_per_rank and buffer are both None; pass one, equal on all ranks")
        sizes = {
            "num_experts": num_experts, "top_k": top_k, "hidden": hidden, "intermediate": intermediate,
            "max_tokens_per_rank": max_tokens_per_rank,
        }  # fmt: skip
        for name, size in sizes.items():
            check_int(name, size, 1)
        check_int("num_shared_experts", num_shared_experts, 0)
        check_topk("top_k", top_k, num_experts)
        check_clamp(activation_clamp)
        if precision not in PRECISIONS:
            raise ValueError(f"unknown precision {precision!r}; use one of {', '.join(PRECISIONS)}")
        if not dtype.is_floating_point:
            raise ValueError(f"dtype is {dtype}, needs a floating-point type; bfloat16 for the kernels")
        self.num_experts = num_experts
        self.top_k = top_k
        self.hidden = hidden
        self.intermediate = intermediate
        self.num_shared_experts = num_shared_experts
        self.max_tokens_per_rank = max_tokens_per_rank
        self.precision = precision
        self.activation_clamp = activation_clamp
        check_keep(keep)
        self.keep = keep
        if buffer is not None:
            self._check_shape(buffer)
        self._placement = _Placement(group, buffer)
        num_ranks = ep.group_size(ep.resolve_group(self._placement.group))
        if num_experts % num_ranks:
            raise ValueError(
                f"num_experts is {num_experts}, needs a multiple of the group's {num_ranks} ranks; "
                "change the group or the expert count"
            )
        #: El, the experts this rank holds.
        self.num_local_experts = num_experts // num_ranks

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.gate_up = parameter(self.num_local_experts, 2 * intermediate, hidden)
        self.down = parameter(self.num_local_experts, hidden, intermediate)
        if num_shared_experts:
            shared_intermediate = num_shared_experts * intermediate
            self.shared_gate_up: nn.Parameter | None = parameter(2 * shared_intermediate, hidden)
            self.shared_down: nn.Parameter | None = parameter(hidden, shared_intermediate)
        else:
            self.register_parameter("shared_gate_up", None)
            self.register_parameter("shared_down", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw each weight from U(-b, b), b = 1/sqrt(fan in), as ``nn.Linear`` does.

        Drawn from this rank's generator. Ranks of an EP group hold different experts, so seed them
        differently; the shared experts are drawn last and have to be made equal afterwards (a broadcast).
        """
        for weight in self.parameters():
            bound = 1 / math.sqrt(weight.shape[-1])
            nn.init.uniform_(weight, -bound, bound)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The EP group as it was given; None is the default group, or one rank without torch.distributed."""
        return self._placement.group

    @group.setter
    def group(self, group: dist.ProcessGroup | None) -> None:
        """Move to another group of the same size; the buffer is built anew at the next forward."""
        check_group(group)
        self._placement = _Placement(group)

    @property
    def buffer(self) -> SymmBuffer | None:
        """The buffer the next forward uses, None while there is none. Setting one takes its group as well."""
        return self._placement.find(self._mma_type())

    @buffer.setter
    def buffer(self, buffer: SymmBuffer) -> None:
        _check_is_buffer(buffer)
        self._check_shape(buffer)
        self._check_ranks(buffer.num_ranks)
        self._placement = _Placement(buffer=buffer)
        self.max_tokens_per_rank = buffer.num_max_tokens_per_rank

    def build_buffer(self, dtype: torch.dtype | None = None) -> SymmBuffer:
        """Build the staging buffer now, or take the one an equal layer built. Collective over the group.

        The first eager forward does this by itself. A buffer belongs to a dtype: with ``torch.autocast`` call
        it inside the autocast region.

        Args:
            dtype: what the forward will compute in. None takes the parameters' dtype, or autocast's; under
                FSDP's mixed precision it is the policy's ``param_dtype``.

        Raises:
            ValueError: see :class:`~.symm.SymmBuffer`; a group of another size than the module was made for;
                a dtype that no buffer is for.
            RuntimeError: see :class:`~.symm.SymmBuffer`; the buffer given to this module was destroyed.
        """
        mma_type = self._mma_type() if dtype is None else mma_type_of_dtype(dtype, "MegaMoE")
        found = self._placement.find(mma_type)
        if found is not None:
            return found
        if self._placement.given is not None:
            raise RuntimeError("the given buffer was destroyed; set module.buffer to a live one")
        group = ep.resolve_group(self._placement.group)
        self._check_ranks(ep.group_size(group))
        shape = (
            self.num_experts, self.max_tokens_per_rank, self.top_k, self.hidden, self.intermediate,
            self.num_shared_experts,
        )  # fmt: skip
        buffer = shared_buffer(group, shape, mma_type, self.gate_up.device)
        self._placement.built[mma_type] = buffer
        return buffer

    def forward(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        """Collective over the group: every rank calls it, also one without tokens.

        Args:
            x: [..., H] in the parameters' dtype, at most ``max_tokens_per_rank`` tokens in all.
            topk_idx: [..., K] int64 global experts, -1 for none.
            topk_weights: [..., K] fp32, used as given.

        Returns:
            [..., H] in the dtype of x.

        Raises:
            ValueError: as :func:`~.op.mega_moe`; leading dims that differ.
            RuntimeError: as :func:`~.op.mega_moe`; compiled before the buffer was built.
        """
        check_tensors(None, x=x, topk_idx=topk_idx, topk_weights=topk_weights)
        if x.dim() == 0 or x.shape[-1] != self.hidden:
            raise ValueError(f"x has shape {list(x.shape)}, needs a last dim of hidden = {self.hidden}")
        for name, routing in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
            if routing.shape != (*x.shape[:-1], self.top_k):
                raise ValueError(
                    f"{name} has shape {list(routing.shape)}, needs the leading dims of x and top_k: "
                    f"{[*x.shape[:-1], self.top_k]}"
                )
        buffer = self._placement.find(self._mma_type())
        if buffer is None:
            if torch.compiler.is_compiling():
                raise RuntimeError("no buffer yet; call build_buffer() before torch.compile traces MegaMoE")
            buffer = self.build_buffer()
        if self.shared_gate_up is None or self.shared_down is None:
            shared = None
        else:
            shared = (
                local_weight("shared_gate_up", self.shared_gate_up, "shared experts", replicated=True),
                local_weight("shared_down", self.shared_down, "shared experts", replicated=True),
            )
        y = mega_moe(
            x.reshape(-1, self.hidden),
            topk_idx.reshape(-1, self.top_k),
            topk_weights.reshape(-1, self.top_k),
            local_weight("gate_up", self.gate_up),
            local_weight("down", self.down),
            buffer=buffer,
            precision=self.precision,
            activation_clamp=self.activation_clamp,
            shared=shared,
            keep=self.keep,
        )
        # Not a view for autograd: FSDP's hook on the output would be lost with an operation in place on one.
        return torch.ops.aten._unsafe_view.default(y, x.shape) if x.dim() != 2 else y

    def extra_repr(self) -> str:
        parts = [
            f"num_experts={self.num_experts} ({self.num_local_experts} local), top_k={self.top_k}",
            f"hidden={self.hidden}, intermediate={self.intermediate}",
            f"max_tokens_per_rank={self.max_tokens_per_rank}, precision={self.precision}",
        ]
        if self.num_shared_experts:
            parts.append(f"num_shared_experts={self.num_shared_experts}")
        if self.activation_clamp is not None:
            parts.append(f"activation_clamp={self.activation_clamp}")
        if self.keep is not None:
            parts.append(f"keep={self.keep!r}")
        return ", ".join(parts)

    def _check_shape(self, buffer: SymmBuffer) -> None:
        wanted = {
            "num_experts": self.num_experts,
            "num_topk": self.top_k,
            "hidden": self.hidden,
            "intermediate_hidden": self.intermediate,
        }
        for name, value in wanted.items():
            if getattr(buffer, name) != value:
                raise ValueError(
                    f"the buffer's {name} is {getattr(buffer, name)}, this MegaMoE needs {value}; build "
                    "one of that shape (SymmBuffer(..., base=...) views one allocation for several shapes)"
                )

    def _check_ranks(self, num_ranks: int) -> None:
        if self.num_local_experts * num_ranks != self.num_experts:
            raise ValueError(
                f"this MegaMoE holds {self.num_local_experts} of {self.num_experts} experts, its group has "
                f"{num_ranks} rank(s); set a group of {self.num_experts // self.num_local_experts}"
            )

    def _mma_type(self) -> str:
        """The buffer's type for the dtype this forward computes in."""
        if self.gate_up.device.type == "meta":
            raise RuntimeError(
                "the parameters of this MegaMoE are on the meta device and hold no values; give them memory "
                "first, with to_empty(device=...) and reset_parameters() or a state_dict"
            )
        return mma_type_of(self.gate_up, "MegaMoE")


def _check_is_buffer(buffer: Any) -> None:
    if not isinstance(buffer, SymmBuffer):
        raise ValueError(f"buffer is a {type(buffer).__name__}, needs a SymmBuffer")
