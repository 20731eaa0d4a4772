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

from .. import extras
from .._version import __version__
from ..registry import GPU_FAMILIES, KERNELS
from .prime_rl_dispatcher import CONFIG_TABLE, LEAST_SMS, MegaMoEDispatcher, sms_to_use

try:
    from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
except ImportError as error:
    raise ImportError(f"{__name__} needs pydantic 2: {extras.pip_line('integrations')}") from error

__all__ = ["CONFIG_TABLE", "MegaMoEDispatchConfig", "MegaMoEDispatcher", "dispatch_config"]

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
    num_sms: _Int | None = Field(default=None, ge=LEAST_SMS)

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
        return sms_to_use(self, device)


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
            name = ".".join(CONFIG_TABLE[:depth]) or "the config"
            raise ValueError(f"{name} is {table!r}, needs a table")
        if key not in table:
            raise ValueError(f"the config has no table [{'.'.join(CONFIG_TABLE)}]: {key} is missing")
        table = table[key]
    return MegaMoEDispatchConfig.model_validate(table)
