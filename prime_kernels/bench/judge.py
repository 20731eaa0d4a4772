"""Judging outputs against the float64 reference.

Each output is judged on its own, in all and by its parts: rows of y and dx, experts of a weight gradient,
slots of dtopk. The error is the relative Frobenius norm ``|actual - expected| / |expected|``. A part whose
reference is exactly zero (an idle expert, a masked slot, a token with no expert) must be exactly zero.
Outputs are filled with a NaN of a known bit pattern before the call, so an element that was never written
is told from one that was computed wrong.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .. import reference
from .cases import Case, RankInputs, Shape, expert_weights, rank_inputs, shared_weights

__all__ = [
    "CaseVerdict",
    "OutputVerdict",
    "RankOutputs",
    "count_poison",
    "expected_outputs",
    "judge_case",
    "judge_output",
    "poison_",
]

# Quiet NaNs with a payload that arithmetic does not produce.
_POISON_BITS = {
    torch.bfloat16: (torch.int16, 0x7FD5),
    torch.float32: (torch.int32, 0x7FC0D5D5),
    torch.float64: (torch.int64, 0x7FF800D5D5D5D5D5),
}
# A row of y or dx averages over H >= 256 elements, so its error stays near that of the whole.
ROW_FACTOR = 2.0
# A slot of dtopk is a single number that may lie near zero: its error is taken relative to the root mean
# square of all slots, and a normally distributed error as large as the limit never reaches 8 times the
# limit.
SLOT_FACTOR = 8.0
# With few rows an expert's gradient is made of few values of a or dz: the largest of them decide its error.
FEW_ROWS = 16
FEW_ROWS_FACTOR = 1.5

WEIGHT_GRADIENTS = ("dw1", "dw2", "shared_dw1", "shared_dw2")


@dataclass
class RankOutputs:
    """What one rank computed.

    ``tensors`` maps an output's name to the tensor, or to None where the output was skipped on purpose;
    weight gradients are in natural layout and hold what the call added when it accumulates. ``faults`` are
    sentences about what the rank saw itself, ``seconds`` is the time of one forward and one backward.
    """

    rank: int
    tensors: dict[str, Tensor | None]
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class OutputVerdict:
    """One output of a case: its error in all, its worst part, their limits, and what failed."""

    output: str
    error: float
    limit: float
    worst_part: str
    worst_error: float
    worst_limit: float
    failures: tuple[str, ...]


@dataclass(frozen=True)
class CaseVerdict:
    """A judged case; ``failures`` has one sentence for each thing that is wrong."""

    case: Case
    outputs: tuple[OutputVerdict, ...]
    failures: tuple[str, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not self.failures


def poison_(tensor: Tensor) -> Tensor:
    """Fill ``tensor`` (bf16, fp32 or fp64) with the poison NaN, in place."""
    bits, pattern = _POISON_BITS[tensor.dtype]
    tensor.view(bits).fill_(pattern)
    return tensor


def count_poison(tensor: Tensor) -> int:
    """How many elements still hold the poison, bit for bit."""
    bits, pattern = _POISON_BITS[tensor.dtype]
    return int((tensor.view(bits) == pattern).sum())


def _part_norms(values: Tensor, output: str) -> Tensor:
    """The norm of each part: of rows, of experts, or of single slots. ``values`` is float64."""
    if output == "dtopk":
        return values.abs().flatten()
    return torch.linalg.vector_norm(values.flatten(1), dim=1)


def _part_name(output: str, part: int, top_k: int) -> str:
    if output == "dtopk":
        return f"token {part // top_k} slot {part % top_k}"
    return f"expert {part}" if output in WEIGHT_GRADIENTS else f"row {part}"


def _part_limits(output: str, limit: float, size: Tensor, rows: Tensor | None) -> Tensor:
    """The limit of each part; ``size`` has one element a part."""
    limits = torch.full_like(size, limit)
    if output == "dtopk":
        return limits * SLOT_FACTOR
    if output in WEIGHT_GRADIENTS:
        return limits if rows is None else torch.where(rows < FEW_ROWS, FEW_ROWS_FACTOR * limits, limits)
    return limits * ROW_FACTOR


def judge_output(
    output: str, actual: Tensor, expected: Tensor, limit: float, rows: Tensor | None = None
) -> OutputVerdict:
    """Judge one output over all ranks.

    Args:
        output: "y", "dx", "dtopk", or a weight gradient's name; decides what the parts are.
        actual: [parts, ...] as computed, any float dtype.
        expected: the float64 reference, same shape.
        limit: largest relative error in all; parts may have a multiple of it (``ROW_FACTOR`` and so on).
        rows: of a weight gradient, how many rows each expert has; None where all have many.

    Raises:
        ValueError: when the shapes differ.
    """
    if actual.shape != expected.shape:
        raise ValueError(
            f"{output}: shape {tuple(actual.shape)}, the reference has {tuple(expected.shape)}; "
            "both must cover the same tokens and experts"
        )
    top_k = expected.shape[-1]
    difference = _part_norms(actual.double() - expected, output).nan_to_num(nan=math.inf, posinf=math.inf)
    failures = [] if bool(torch.isfinite(difference).all()) else _not_finite(actual)
    size = _part_norms(expected, output)
    error = _ratio(float(torch.linalg.vector_norm(difference)), float(torch.linalg.vector_norm(size)))
    if error > limit:
        failures.append(f"error {error:.2e} is above {limit:.1e}")

    not_zero = (size == 0) & (difference != 0)
    if bool(not_zero.any()):
        first = _part_name(output, int(not_zero.nonzero()[0]), top_k)
        failures.append(f"{int(not_zero.sum())} parts that must be exactly 0 are not, the first is {first}")

    worst, worst_error, worst_limit = "-", 0.0, limit
    nonzero = size > 0
    if bool(nonzero.any()):
        scale = size[nonzero].square().mean().sqrt() if output == "dtopk" else size
        errors = torch.where(nonzero, difference / scale, 0)
        limits = _part_limits(output, limit, size, rows)
        part = int((errors / limits).argmax())
        worst, worst_error, worst_limit = (
            _part_name(output, part, top_k),
            float(errors[part]),
            float(limits[part]),
        )
        if worst_error > worst_limit:
            failures.append(f"{worst}: error {worst_error:.2e} is above {worst_limit:.1e}")
    return OutputVerdict(output, error, limit, worst, worst_error, worst_limit, tuple(failures))


def _not_finite(actual: Tensor) -> list[str]:
    untouched = count_poison(actual)
    computed = actual.numel() - int(torch.isfinite(actual).sum()) - untouched
    counts = {"were never written": untouched, "are Inf or NaN": computed}
    return [f"{count} of {actual.numel()} elements {what}" for what, count in counts.items() if count]


def _ratio(difference: float, size: float) -> float:
    """difference / size; nothing wrong with an empty or all-zero output that is right."""
    if difference == 0:
        return 0.0
    return difference / size if size else math.inf


@functools.lru_cache(maxsize=1)
def _all_weights(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """All experts' weights as drawn in ``dtype``, in float64. Kept: many cases in a row have the same."""
    weights = [expert_weights(shape, dtype, expert, device) for expert in range(shape.num_experts)]
    return torch.stack([w[0] for w in weights]).double(), torch.stack([w[1] for w in weights]).double()


def expected_outputs(case: Case, inputs: list[RankInputs], device: torch.device) -> dict[str, Tensor]:
    """The float64 reference of a case over all ranks.

    Returns:
        y and dx [sum n, H], dtopk [sum n, K], dw1 [E, 2I, H], dw2 [E, H, I]; with a shared expert also its
        gradients by rank, shared_dw1 [R, 2I, H] and shared_dw2 [R, H, I] (each rank has those of its own
        tokens).
    """
    gate_up, down = _all_weights(case.shape, case.precision.dtype, device)
    x, dy = torch.cat([rank.x for rank in inputs]).double(), torch.cat([rank.dy for rank in inputs]).double()
    idx, topk_weights = _routing_of(inputs)
    clamp = case.variant.clamp
    routed = (x, idx, topk_weights, gate_up, down)
    y = reference.moe_forward(*routed, clamp=clamp)
    grads = reference.moe_backward(dy, *routed, clamp=clamp)
    outputs = {"y": y, "dx": grads.dx, "dtopk": grads.dtopk, "dw1": grads.dgate_up, "dw2": grads.ddown}
    shared = shared_weights(case, device)
    if shared is None:
        return outputs
    # The shared expert is one expert that every token of the rank goes to with weight 1.
    shared_gate_up, shared_down = shared[0].double()[None], shared[1].double()[None]
    parts: list[tuple[Tensor, reference.Grads]] = []
    for rank in inputs:
        ones = torch.ones(len(rank.x), 1, dtype=torch.float64, device=device)
        to_shared = (
            rank.x.double(),
            torch.zeros_like(ones, dtype=torch.int64),
            ones,
            shared_gate_up,
            shared_down,
        )
        parts.append(
            (
                reference.moe_forward(*to_shared, clamp=clamp),
                reference.moe_backward(rank.dy.double(), *to_shared, clamp=clamp),
            )
        )
    outputs["y"] += torch.cat([shared_y for shared_y, _ in parts])
    outputs["dx"] += torch.cat([shared_grads.dx for _, shared_grads in parts])
    outputs["shared_dw1"] = torch.cat([shared_grads.dgate_up for _, shared_grads in parts])
    outputs["shared_dw2"] = torch.cat([shared_grads.ddown for _, shared_grads in parts])
    return outputs


def _routing_of(inputs: list[RankInputs]) -> tuple[Tensor, Tensor]:
    """topk_idx and float64 topk_weights of all ranks."""
    return torch.cat([r.topk_idx for r in inputs]), torch.cat([r.topk_weights for r in inputs]).double()


def _rows_of(output: str, case: Case, inputs: list[RankInputs]) -> Tensor | None:
    """Rows behind each part of a weight gradient: by expert, of the shared expert by rank."""
    if output in ("dw1", "dw2"):
        idx = _routing_of(inputs)[0]
        return torch.bincount(idx[idx >= 0], minlength=case.shape.num_experts)
    if output in WEIGHT_GRADIENTS:
        return torch.tensor(case.tokens_per_rank, device=inputs[0].x.device)
    return None


def judge_case(case: Case, ranks: list[RankOutputs], device: torch.device) -> CaseVerdict:
    """Judge what all ranks of a case computed. ``ranks`` is ordered by rank; tensors may be on any device."""
    inputs = [rank_inputs(case, rank, device) for rank in range(case.ranks)]
    expected = expected_outputs(case, inputs, device)
    verdicts = []
    failures = [f"rank {rank.rank}: {fault}" for rank in ranks for fault in rank.faults]
    for output, reference_value in expected.items():
        parts = [rank.tensors[output] for rank in ranks]
        present = [part.to(device) for part in parts if part is not None]
        if not present:
            continue
        limit, rows = case.precision.limits.of(output), _rows_of(output, case, inputs)
        verdict = judge_output(output, torch.cat(present), reference_value, limit, rows)
        verdicts.append(verdict)
        failures += [f"{output}: {failure}" for failure in verdict.failures]
    seconds = max(rank.seconds for rank in ranks)
    return CaseVerdict(case, tuple(verdicts), tuple(failures), seconds)
