"""Mega MoE as the dispatch backend of prime-rl: ``[trainer.model.moe.dispatch]`` and the dispatcher.

.. code-block:: toml

    [trainer.model.moe.dispatch]
    type = "mega_moe"
    precision = "bf16"

Needs pydantic 2 (the extra ``integrations``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import ep, extras, runtime
from .._version import __version__
from ..module import mma_type_of, resolve_group, shared_buffer
from ..op import mega_moe
from ..registry import GPU_FAMILIES, KERNELS
from ..symm import SymmBuffer
from ..validation import check_clamp, check_keep, wide_dtype
from .grouped_experts import check_experts, check_placements, expert_weights

try:
    from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
except ImportError as error:
    raise ImportError(
        f"{__name__} needs pydantic 2: {extras.pip_line('integrations')}"
    ) from error

#: Where the framework's config file holds the fields of :class:`MegaMoEDispatchConfig`.
CONFIG_TABLE = ("trainer", "model", "moe", "dispatch")

# The kernels run in clusters of two SMs.
_LEAST_SMS = 2
# Operand sets that one weight-gradient launch adds.
_MOST_FUSED_MICRO_BATCHES = 4
_MOST_FUSED_MICRO_BATCHES_WITH_TILE_SCALES = 2

# (forward, backward) kernels of each precision, by their names in the registry.
_KERNELS_OF_PRECISION = {
    "bf16": ("mega_moe_bf16", "mega_moe_bf16_backward"),
    "fp8": ("mega_moe_fp8", "mega_moe_fp8_backward"),
    "fp8_bwd": ("mega_moe_bf16", "mega_moe_fp8_backward"),
    "mxfp8": ("mega_moe_mxfp8", "mega_moe_mxfp8_backward"),
}


def _refuse_bool(value: Any) -> Any:
    """Python counts True as the integer 1, a config file does not."""
    if isinstance(value, bool):
        raise ValueError("is a boolean, needs a number")
    return value


_Int = Annotated[int, BeforeValidator(_refuse_bool)]
_Float = Annotated[float, BeforeValidator(_refuse_bool)]


class MegaMoEDispatchConfig(BaseModel):
    """The fields of ``[trainer.model.moe.dispatch]``. Unknown or contradictory ones are errors.

    Errors name the fields. Those that only FP8 uses are checked in every case; a precision whose kernels are
    not in this version is refused with the reason once everything else is right. Whether the GPU at hand runs
    the kernels is asked when the buffer is built: a config may be read where there is no GPU.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["mega_moe"] = "mega_moe"

    #: Of the GEMMs: "fp8" forward and backward, "fp8_bwd" BF16 forward and FP8 backward (both SM90), "mxfp8"
    #: (SM100).
    precision: Literal["bf16", "mxfp8", "fp8", "fp8_bwd"] = "bf16"

    #: The most tokens a rank brings to one call, equal on all ranks; None is the sequence length.
    max_tokens_per_rank: _Int | None = Field(default=None, ge=1)

    #: SMs the kernels use; the rest stays free for NCCL and other streams. None is all but num_reserved_sms.
    num_sms: _Int | None = Field(default=None, ge=_LEAST_SMS)

    #: SMs left free when num_sms is None.
    num_reserved_sms: _Int = Field(default=16, ge=0)

    #: Room for dispatched rows, times those of even routing. A call that needs more raises, none drops.
    capacity_factor: _Float = Field(default=1.25, gt=0, allow_inf_nan=False)

    #: FP8: one scale per 128x128 tile in the weight-gradient operands instead of one per column of 128 rows.
    wgrad_tile_scales: bool = False

    #: "fp8" and "mxfp8": drop the BF16 copies of expert weights between optimizer steps.
    free_bf16_expert_weights: bool = False

    #: FP8: micro-batches whose weight gradients one launch adds; up to 4, up to 2 with wgrad_tile_scales.
    fused_wgrad_micro_batches: _Int = Field(default=1, ge=1, le=_MOST_FUSED_MICRO_BATCHES)

    @model_validator(mode="after")
    def _check_together(self) -> MegaMoEDispatchConfig:
        problems = self._contradictions()
        # After the rest, so that a config for a later version can be checked with this one.
        problem = _precision_problem(self.precision)
        if problem is not None and not problems:
            problems = [problem]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _contradictions(self) -> list[str]:
        problems = []
        if self.num_sms is not None and "num_reserved_sms" in self.model_fields_set:
            problems.append(
                f"num_sms is {self.num_sms} and num_reserved_sms is {self.num_reserved_sms}: one is the SMs "
                "to use, the other the SMs to leave; set one of them"
            )
        for field, value, precisions in (
            ("wgrad_tile_scales", self.wgrad_tile_scales, ("fp8", "fp8_bwd")),
            ("free_bf16_expert_weights", self.free_bf16_expert_weights, ("fp8", "mxfp8")),
            ("fused_wgrad_micro_batches", self.fused_wgrad_micro_batches, ("fp8", "fp8_bwd")),
        ):
            if value != type(self).model_fields[field].default and self.precision not in precisions:
                problems.append(
                    f'{field} is {value} and precision is "{self.precision}": only '
                    f"{' and '.join(precisions)} use it; leave {field} out"
                )
        most = _MOST_FUSED_MICRO_BATCHES_WITH_TILE_SCALES
        if self.wgrad_tile_scales and self.fused_wgrad_micro_batches > most:
            problems.append(
                f"fused_wgrad_micro_batches is {self.fused_wgrad_micro_batches} and wgrad_tile_scales is "
                f"true: with tile scales it is at most {most}"
            )
        return problems

    def sms_on(self, device: torch.device) -> int | None:
        """SMs the kernels use on ``device``; None is no limit, on a CPU.

        Raises:
            ValueError: num_reserved_sms leaves fewer than the two that the kernels need.
        """
        if self.num_sms is not None or device.type != "cuda":
            return self.num_sms
        available = torch.cuda.get_device_properties(device).multi_processor_count
        if available - self.num_reserved_sms < _LEAST_SMS:
            raise ValueError(
                f"num_reserved_sms is {self.num_reserved_sms} and {device} has {available} SMs; leave at "
                f"least {_LEAST_SMS} to the kernels"
            )
        return available - self.num_reserved_sms


def _precision_problem(precision: str) -> str | None:
    """Why this version cannot compute in a precision, or None."""
    missing = [name for name in _KERNELS_OF_PRECISION[precision] if KERNELS[name].module is None]
    if not missing:
        return None
    major, minor = KERNELS[missing[0]].capability
    return (
        f'precision is "{precision}", whose kernels ({", ".join(missing)}, for SM{major}{minor} GPUs, '
        f'{GPU_FAMILIES[major, minor]}) are not in version {__version__}; use precision = "bf16"'
    )


def dispatch_config(document: Mapping[str, Any]) -> MegaMoEDispatchConfig:
    """The config in a parsed config file (``tomllib.load``).

    Raises:
        ValueError: no table ``[trainer.model.moe.dispatch]``; pydantic's ValidationError is one, and names
            each field that is wrong.
    """
    table: Any = document
    for depth, key in enumerate(CONFIG_TABLE):
        if not isinstance(table, Mapping):
            raise ValueError(f"{'.'.join(CONFIG_TABLE[:depth])} is {table!r}, needs a table")
        if key not in table:
            raise ValueError(f"the config has no table [{'.'.join(CONFIG_TABLE)}]: {key} is missing")
        table = table[key]
    return MegaMoEDispatchConfig.model_validate(table)


class MegaMoEDispatcher:
    """Dispatch, experts and combine of the MoE layers of a model, behind the framework's dispatcher methods.

    One object serves any number of layers; layers of one shape share one staging buffer, also between
    dispatchers (``prime_kernels.module.release_buffers`` lets go of them). Call :meth:`run` inside the
    forward of the experts (or of a module around them), so that FSDP2 has gathered the weights.
    ``torch.compile`` needs the buffer before it traces: call :meth:`build_buffer` first.

    Weight gradients are returned by autograd, or added in fp32 to the ``main_grad`` of each expert weight
    that has one (:func:`~.grouped_experts.allocate_main_grads`).

    A copy of a model shares its dispatcher. A pickled dispatcher holds neither group nor buffers: it uses the
    default group after loading.

    Args:
        config: of ``[trainer.model.moe.dispatch]``. Its limit of SMs is set for the process
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
        config: MegaMoEDispatchConfig,
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
        num_sms = self.config.sms_on(device)
        group = resolve_group(self.group)
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
        return {**self.__dict__, "group": None, "_buffers": {}}


def _local_tokens(name: str, tensor: Tensor) -> Tensor:
    """This rank's tokens; a DTensor may be split over all dims but its last."""
    if not isinstance(tensor, DTensor):
        return tensor
    check_placements(name, tensor, "tokens", tuple(range(tensor.dim() - 1)))
    return tensor.to_local()
