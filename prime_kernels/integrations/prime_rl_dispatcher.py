"""The token dispatcher of prime-rl's MoE layers over :func:`~..op.mega_moe`. Needs no pydantic.

:mod:`.prime_rl` has the config that the framework reads from a file; any object with the same fields will do.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import ep, runtime
from ..checks import check_group
from ..dtensor import check_placements
from ..op import mega_moe
from ..shared_buffers import mma_type_of, shared_buffer
from ..symm import SymmBuffer
from ..validation import check_clamp, check_keep, wide_dtype
from .grouped_experts import check_experts, expert_weights

#: Where the framework's config file holds the fields of :class:`~.prime_rl.MegaMoEDispatchConfig`.
CONFIG_TABLE = ("trainer", "model", "moe", "dispatch")

#: The kernels run in clusters of two SMs.
LEAST_SMS = 2


class DispatchSettings(Protocol):
    """The fields that the dispatcher reads, see :class:`~.prime_rl.MegaMoEDispatchConfig`."""

    @property
    def precision(self) -> str:
        """Of the GEMMs."""

    @property
    def max_tokens_per_rank(self) -> int | None:
        """None: the sequence length."""

    @property
    def num_sms(self) -> int | None:
        """None: all but num_reserved_sms."""

    @property
    def num_reserved_sms(self) -> int:
        """SMs left free when num_sms is None."""

    @property
    def capacity_factor(self) -> float:
        """Room for dispatched rows, times those of even routing."""


def sms_to_use(settings: DispatchSettings, device: torch.device) -> int | None:
    """SMs the kernels use on ``device``; None is no limit, on a CPU.

    Raises:
        ValueError: num_reserved_sms leaves fewer than the two that the kernels need.
    """
    if settings.num_sms is not None or device.type != "cuda":
        return settings.num_sms
    available = torch.cuda.get_device_properties(device).multi_processor_count
    if available - settings.num_reserved_sms < LEAST_SMS:
        raise ValueError(
            f"num_reserved_sms is {settings.num_reserved_sms} and {device} has {available} SMs; leave at "
            f"least {LEAST_SMS} to the kernels"
        )
    return available - settings.num_reserved_sms


class MegaMoEDispatcher:
    """Dispatch, experts and combine of the MoE layers of a model, behind the framework's dispatcher methods.

    One object serves any number of layers; layers of one shape share one staging buffer, also between
    dispatchers (``prime_kernels.module.release_buffers`` lets go of them). Call :meth:`run` inside the
    forward of the experts (or of a module around them), so that FSDP2 has gathered the weights.
    ``torch.compile`` needs the buffer before it traces: call :meth:`build_buffer` first.

    Weight gradients are returned by autograd, or added in fp32 to the ``main_grad`` of each expert weight
    that has one (:func:`~.grouped_experts.allocate_main_grads`).

    A copy of a model shares its dispatcher. A pickled dispatcher holds neither group nor buffers: it uses the
    default group after loading. Set ``group`` after the process group was made anew.

    Args:
        config: a :class:`~.prime_rl.MegaMoEDispatchConfig`. Its limit of SMs is set for the process
            (``set_num_sms``) when the buffer is built.
        num_experts: E, over all ranks of the group.
        top_k: K.
        sequence_length: tokens a rank brings to one call when the config's max_tokens_per_rank is None. A
            batch of b sequences has b times as many.
        group: the EP group. None is the default group, or one rank when torch.distributed is not in use.
        activation_clamp: c of the clamped SwiGLU, None for plain SwiGLU.
        keep: what the forward keeps for the backward, None or "z", see :func:`~..op.mega_moe`.

    Raises:
        ValueError: neither max_tokens_per_rank nor sequence_length; an argument outside its limits.
    """

    def __init__(
        self,
        config: DispatchSettings,
        *,
        num_experts: int,
        top_k: int,
        sequence_length: int | None = None,
        group: dist.ProcessGroup | None = None,
        activation_clamp: float | None = None,
        keep: str | None = None,
    ) -> None:
        tokens = config.max_tokens_per_rank
        if tokens is None:
            tokens = sequence_length
        if tokens is None:
            raise ValueError(
                "max_tokens_per_rank of the config and sequence_length are both None; set one of them"
            )
        for name, value in (("num_experts", num_experts), ("top_k", top_k), ("sequence_length", tokens)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}, needs an integer of at least 1")
        check_clamp(activation_clamp)
        check_keep(keep)
        self.config = config
        # Under torch.compile plain attributes are read, not pydantic's.
        self.precision: str = config.precision
        self.max_tokens_per_rank: int = tokens
        self.num_experts = num_experts
        self.top_k = top_k
        self.group = group
        self.activation_clamp = activation_clamp
        self.keep = keep

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The EP group as it was given."""
        return self._group

    @group.setter
    def group(self, group: dist.ProcessGroup | None) -> None:
        """Move to another group; the buffers are built anew at the next :meth:`run`."""
        check_group(group)
        self._group = group
        self._buffers: dict[tuple[str, int, int], SymmBuffer] = {}

    def build_buffer(self, experts: nn.Module) -> SymmBuffer:
        """The staging buffer for layers of this shape, built if there is none. Collective over the group.

        The first eager :meth:`run` does this by itself. A buffer belongs to a dtype: with ``torch.autocast``
        call it inside the autocast region, with FSDP's mixed precision inside the forward.

        Raises:
            ValueError: experts the kernels cannot compute (see :meth:`run`); see :class:`~..symm.SymmBuffer`.
            RuntimeError: see :class:`~..symm.SymmBuffer`; this GPU has no kernel for the precision.
        """
        check_experts(experts)
        with torch.no_grad():
            return self._buffer(*expert_weights(experts))

    def run(
        self,
        x: Tensor,
        top_scores: Tensor,
        selected_experts_indices: Tensor,
        experts: nn.Module,
        *,
        score_before_experts: bool,
    ) -> Tensor:
        """y_t = sum_k top_scores_tk * expert_e(x_t), e = selected_experts_indices_tk.

        Collective over the group: every rank calls it (and its backward), also one without tokens.

        Args:
            x: [n, H] or [b, s, H] in the dtype of the weights; at most ``max_tokens_per_rank`` tokens in all.
            top_scores: [n, K] (or [b, s, K]), used as given; cast to fp32.
            selected_experts_indices: like top_scores, global experts as integers, -1 for none.
            experts: holds this rank's weights: ``w1`` (gate) [El, I, H], ``w2`` (down) [El, H, I], ``w3``
                (up) [El, I, H], which are concatenated in each call, or ``gate_up`` [El, 2I, H] and ``down``,
                which are not copied.
            score_before_experts: False. The kernels apply scores to what the experts return.

        DTensors are used as their local parts: weights split over dim 0, x over its tokens; y then is a
        DTensor like x.

        Returns:
            y: the shape and dtype of x.

        Raises:
            ValueError: scores before experts, biases, experts without a gate, another activation than SiLU;
                shapes or dtypes that do not fit; DTensors split otherwise.
            RuntimeError: more tokens than max_tokens_per_rank; compiled before the buffer was built.
        """
        if score_before_experts:
            raise ValueError(
                "score_before_experts is True, the kernels apply scores to the experts' output (with SwiGLU "
                "the two differ); set it to False"
            )
        check_experts(experts)
        gate_up, down = expert_weights(experts)
        hidden = gate_up.shape[2]
        if x.dim() not in (2, 3) or x.shape[-1] != hidden:
            raise ValueError(f"x has shape {list(x.shape)}, needs [n, {hidden}] or [b, s, {hidden}]")
        local_x = _local_tokens("x", x)
        tokens = local_x.reshape(-1, hidden)
        routing = {"top_scores": top_scores, "selected_experts_indices": selected_experts_indices}
        scores, indices = (self._rows(name, tensor, tokens.shape[0]) for name, tensor in routing.items())
        if indices.dtype.is_floating_point or indices.dtype == torch.bool:
            raise ValueError(f"selected_experts_indices is {indices.dtype}, needs integers")
        if tokens.shape[0] > self.max_tokens_per_rank:
            raise RuntimeError(
                f"max_tokens_per_rank is {self.max_tokens_per_rank} and this rank has {tokens.shape[0]} "
                f"tokens; set max_tokens_per_rank in [{'.'.join(CONFIG_TABLE)}] to at least that on all ranks"
            )
        buffer = self._buffer(gate_up, down)
        y = mega_moe(
            tokens,
            indices.to(torch.int64),
            scores.to(wide_dtype(buffer.mma_type)),
            gate_up,
            down,
            buffer=buffer,
            precision=self.precision,
            activation_clamp=self.activation_clamp,
            keep=self.keep,
        ).reshape(local_x.shape)
        if isinstance(x, DTensor):
            return DTensor.from_local(
                y, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
            )
        return y

    def synchronize(self) -> None:
        """Order the current stream behind everything :meth:`run` started.

        ``run`` works on the current stream alone, so there is nothing to wait for, and the host does not
        wait. What earlier calls recorded (a peer that did not arrive, too little capacity) is raised here;
        ``buffer.check()`` also waits for the calls under way.

        Raises:
            RuntimeError, ValueError: see :meth:`~..symm.SymmBuffer.check`.
        """
        if torch.compiler.is_compiling():
            return
        for buffer in self._buffers.values():
            if buffer.sm90_memory is not None:
                buffer.sm90_memory.raise_faults()

    def _buffer(self, gate_up: Tensor, down: Tensor) -> SymmBuffer:
        mma_type = mma_type_of(gate_up, type(self).__name__)
        hidden, inter = down.shape[1:]
        buffer = self._buffers.get((mma_type, hidden, inter))
        if buffer is None or buffer.destroyed:
            if torch.compiler.is_compiling():
                raise RuntimeError("no buffer yet; call build_buffer(experts) before torch.compile traces")
            buffer = self._build(mma_type, hidden, inter, gate_up.device)
        if gate_up.shape[0] != buffer.num_local_experts:
            raise ValueError(
                f"this rank holds {gate_up.shape[0]} experts, {self.num_experts} over {buffer.num_ranks} "
                f"ranks are {buffer.num_local_experts} each; call run inside the experts' forward, where "
                "FSDP has gathered them, and give the group they are split over"
            )
        return buffer

    def _build(self, mma_type: str, hidden: int, inter: int, device: torch.device) -> SymmBuffer:
        num_sms = sms_to_use(self.config, device)
        group = ep.resolve_group(self.group)
        if self.num_experts % ep.group_size(group):
            raise ValueError(
                f"num_experts is {self.num_experts}, needs a multiple of the group's {ep.group_size(group)} "
                "ranks; change the group or the expert count"
            )
        shape = (self.num_experts, self.max_tokens_per_rank, self.top_k, hidden, inter, 0)
        capacity_factor = runtime.get_pool_capacity_factor()
        runtime.set_pool_capacity_factor(self.config.capacity_factor)
        try:
            buffer = shared_buffer(group, shape, mma_type, device)
        finally:
            runtime.set_pool_capacity_factor(capacity_factor)
        if num_sms is not None:
            runtime.set_num_sms(num_sms)
        self._buffers[mma_type, hidden, inter] = buffer
        return buffer

    def _rows(self, name: str, routing: Tensor, num_tokens: int) -> Tensor:
        local = _local_tokens(name, routing)
        if local.shape[-1] != self.top_k or local.numel() != num_tokens * self.top_k:
            raise ValueError(
                f"{name} has shape {list(local.shape)}, needs [n, top_k] = [{num_tokens}, {self.top_k}]"
            )
        return local.reshape(-1, self.top_k)

    def __deepcopy__(self, memo: dict[int, Any]) -> MegaMoEDispatcher:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_group": None, "_buffers": {}}


def _local_tokens(name: str, tensor: Tensor) -> Tensor:
    """This rank's tokens; a DTensor may be split over all dims but its last."""
    if not isinstance(tensor, DTensor):
        return tensor
    check_placements(name, tensor, "tokens", tuple(range(tensor.dim() - 1)))
    return tensor.to_local()
