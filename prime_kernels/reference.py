"""Mega MoE in plain torch: the semantics every kernel is tested against, and the CPU backend.

Formulas, for a row r = (token t, slot k) sent to expert e, with c the clamp (none: plain SwiGLU)::

    [g | u] = x_t W13_e^T                      a = silu(min(g, c)) * clamp(u, -c, c)
    y_t     = sum_k w_tk (a_r W2_e^T)  (+ the shared expert's output, with weight 1)

    da'_r   = dy_t W2_e                        dtopk_tk = <da'_r, a_r>
    dz_r    = d[a]/d[g | u] * (w_tk da'_r)     zero where the clamp binds (g > c, |u| > c; before rounding)
    dx_t    = sum_k dz_r W13_e  (+ shared)
    dW2_e   = sum_r dy_t^T (w_tk a_r)          dW13_e = sum_r dz_r^T x_t

The weights are used as given (not normalised). A slot whose expert is -1 takes no part: it adds nothing,
its dtopk is exactly 0 and its weight may hold anything. The same expert in two slots counts twice.

Everything runs in the inputs' own dtype, except that 16-bit inputs compute in fp32. :class:`Rounding`
holds what a kernel rounds or quantises, and where. float64 inputs with :data:`NO_ROUNDING` are *the*
reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .rounding import BF16_ROUNDING as BF16_ROUNDING
from .rounding import NO_ROUNDING as NO_ROUNDING
from .rounding import Round as Round
from .rounding import Rounding as Rounding
from .rounding import through as through
from .routing import NO_EXPERT, RoutePlan, make_route_plan
from .swiglu import deinterleave_gate_up as deinterleave_gate_up
from .swiglu import interleave_gate_up as interleave_gate_up
from .swiglu import kept_gate_up, swiglu, swiglu_backward


@dataclass(frozen=True)
class Grads:
    """Gradients of :func:`moe_forward`, each in the shape of its input; shared ones may be None."""

    dx: Tensor
    dtopk: Tensor
    dgate_up: Tensor
    ddown: Tensor
    dshared_gate_up: Tensor | None = None
    dshared_down: Tensor | None = None


@dataclass(frozen=True)
class WeightGrad:
    """Where one weight's gradient goes.

    Attributes:
        out: [experts, rows, columns], or None to skip the work.
        accumulate: add to ``out`` instead of overwriting it.
        interleaved: rows of ``out`` alternate gate and up in groups of 8.
    """

    out: Tensor | None
    accumulate: bool = False
    interleaved: bool = False

    def store(self, expert: int, value: Tensor | None) -> None:
        """Write one expert's gradient; ``None`` means that no row reached it (an exact zero)."""
        if self.out is None:
            return
        out = self.out[expert]
        if value is None:
            if not self.accumulate:
                out.zero_()
            return
        if self.interleaved:
            value = interleave_gate_up(value)
        if self.accumulate:
            out.add_(value.to(out.dtype))
        else:
            out.copy_(value)


class Transport(Protocol):
    """How rows travel between the rank of their token and the rank of their expert."""

    def local_counts(self) -> list[int]:
        """Rows of each local expert, from all ranks."""

    def dispatch(self, rows: Tensor, phase: str) -> Tensor:
        """Rows in route-plan order -> rows of the local experts in pool order."""

    def combine(self, rows: Tensor, phase: str) -> Tensor:
        """The way back: pool order -> route-plan order."""


class LocalTransport:
    """One rank holds all experts: plan order is pool order."""

    def __init__(self, plan: RoutePlan) -> None:
        self._counts = [int(count) for count in plan.counts.tolist()]

    def local_counts(self) -> list[int]:
        return self._counts

    def dispatch(self, rows: Tensor, phase: str) -> Tensor:
        return rows

    def combine(self, rows: Tensor, phase: str) -> Tensor:
        return rows


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype the reference computes in for inputs of ``dtype``: fp32 for 16-bit types, else the same."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


@dataclass(frozen=True)
class Experts:
    """The weights one rank holds, and how to compute with them.

    Attributes:
        gate_up: [El, 2I, H], rows [gate | up], or interleaved by 8.
        down: [El, H, I].
        clamp: activation clamp, None for plain SwiGLU.
        rounding: see :class:`Rounding`.
        interleaved: layout of ``gate_up``.
    """

    gate_up: Tensor
    down: Tensor
    clamp: float | None
    rounding: Rounding
    interleaved: bool = False

    def weights(self, expert: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """One expert's weights, natural rows, in the compute dtype."""
        gate_up, down = self.gate_up[expert].to(dtype), self.down[expert].to(dtype)
        if self.interleaved:
            gate_up = deinterleave_gate_up(gate_up)
        return self.rounding.gate_up_weight(gate_up), self.rounding.down_weight(down)

    def forward(self, x: Tensor, counts: list[int], kept: Tensor | None = None) -> Tensor:
        """Output rows [rows, H] of the pool ``x`` [rows, H], whose expert e owns ``counts[e]`` rows.

        ``kept`` [rows, 2I] takes gate and up for :meth:`backward`, see :func:`kept_gate_up`.
        """
        rounding = self.rounding
        out = torch.empty_like(x)
        start = 0
        for expert, count in enumerate(counts):
            rows = slice(start, start + count)
            start += count
            if count == 0:
                continue
            gate_up, down = self.weights(expert, x.dtype)
            exact_z = x[rows] @ gate_up.T
            z = rounding.gate_up(exact_z)
            if kept is not None:
                kept[rows] = kept_gate_up(exact_z, z, self.clamp, kept.dtype)
            act = rounding.act(swiglu(z, self.clamp))
            out[rows] = rounding.out_row(act @ down.T)
        return out

    def backward(
        self, x: Tensor, dy: Tensor, row_weights: Tensor, counts: list[int],
        dgate_up: WeightGrad, ddown: WeightGrad, kept: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Backward of :meth:`forward`, with the top-k weights inside.

        Args:
            x, dy: pools [rows, H]; dy holds the gradient of the row's token.
            row_weights: [rows] top-k weight of each row.
            counts: rows of each expert.
            dgate_up, ddown: where the weight gradients go.
            kept: [rows, 2I], what the forward kept; None: recomputed.

        Returns:
            dx rows [rows, H] and dtopk rows [rows].
        """
        rounding = self.rounding
        dx, dtopk = torch.empty_like(x), x.new_empty(x.shape[0])
        start = 0
        for expert, count in enumerate(counts):
            rows = slice(start, start + count)
            start += count
            if count == 0:
                dgate_up.store(expert, None)
                ddown.store(expert, None)
                continue
            gate_up, down = self.weights(expert, x.dtype)
            if kept is None:
                exact_z = x[rows] @ gate_up.T
                z = rounding.gate_up(exact_z)
            else:
                exact_z = z = kept[rows].to(x.dtype)
            act = swiglu(z, self.clamp)  # never an operand of its own here, so nothing rounds it
            dact = rounding.dact(dy[rows] @ down)
            weight = row_weights[rows, None]
            dz = swiglu_backward(z, weight * dact, self.clamp, exact_z)
            dtopk[rows] = (dact * act).sum(1)
            dx[rows] = rounding.dx_row(rounding.dz(dz) @ gate_up)
            if ddown.out is not None:
                ddown.store(expert, rounding.dy_wgrad(dy[rows]).T @ rounding.weighted_act(weight * act))
            if dgate_up.out is not None:
                dgate_up.store(expert, rounding.dz_wgrad(dz).T @ rounding.x_wgrad(x[rows]))
        return dx, dtopk


def _sum_slots(rows: Tensor, plan: RoutePlan, shape: torch.Size, weights: Tensor | None) -> Tensor:
    """Sum rows (plan order) over the slots of each token, in slot order. ``shape`` is [n, K]."""
    slots = rows.new_zeros(*shape, rows.shape[1])
    slots[plan.token, plan.slot] = rows
    total = rows.new_zeros(shape[0], rows.shape[1])
    for slot in range(shape[1]):
        total += slots[:, slot] if weights is None else weights[:, slot, None] * slots[:, slot]
    return total


def run_forward(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, plan: RoutePlan,
    transport: Transport, experts: Experts, shared: Experts | None, kept: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Forward of one rank over any transport. Returns y [n, H] in the compute dtype.

    ``kept`` [rows, 2I], with at least this rank's pool rows, takes gate and up of the routed experts.
    """
    dtype = compute_dtype(x.dtype)
    rounding = experts.rounding
    pool = rounding.x(transport.dispatch(x[plan.token], "dispatch").to(dtype))
    out = transport.combine(experts.forward(pool, transport.local_counts(), kept), "combine")
    # A masked slot's weight may be Inf or NaN: it must not meet the zero row of that slot.
    weights = topk_weights.to(dtype).masked_fill(topk_idx == NO_EXPERT, 0)
    y = _sum_slots(out, plan, topk_idx.shape, weights)
    if shared is not None and x.shape[0]:
        y += shared.forward(rounding.x(x.to(dtype)), [x.shape[0]])
    return rounding.y(y)


def run_backward(
    dy: Tensor, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, plan: RoutePlan,
    transport: Transport, experts: Experts, dgate_up: WeightGrad, ddown: WeightGrad,
    shared: Experts | None, dshared_gate_up: WeightGrad, dshared_down: WeightGrad,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Backward of one rank over any transport. Returns dx [n, H] and dtopk [n, K] in the compute dtype.

    ``kept`` is what :func:`run_forward` of the same routing filled; None: gate and up are recomputed.
    """
    dtype = compute_dtype(x.dtype)
    rounding = experts.rounding
    pool_x = rounding.x(transport.dispatch(x[plan.token], "dispatch x").to(dtype))
    pool_dy = rounding.dy(transport.dispatch(dy[plan.token], "dispatch dy").to(dtype))
    row_weights = topk_weights[plan.token, plan.slot].to(dtype)
    pool_weights = transport.dispatch(row_weights[:, None], "dispatch weights")[:, 0]
    dx_rows, dtopk_rows = experts.backward(
        pool_x, pool_dy, pool_weights, transport.local_counts(), dgate_up, ddown, kept
    )
    dx_rows = transport.combine(dx_rows, "combine dx")
    dtopk_rows = transport.combine(dtopk_rows[:, None], "combine dtopk")[:, 0]
    dx = _sum_slots(dx_rows, plan, topk_idx.shape, None)
    dtopk = x.new_zeros(topk_idx.shape, dtype=dtype)
    dtopk[plan.token, plan.slot] = dtopk_rows
    if shared is not None:
        count = x.shape[0]
        ones = torch.ones(count, dtype=dtype, device=x.device)
        shared_dx, _ = shared.backward(
            rounding.x(x.to(dtype)), rounding.dy(dy.to(dtype)), ones, [count], dshared_gate_up, dshared_down
        )
        dx += shared_dx
    return rounding.dx(dx), dtopk


def shared_experts(
    shared: tuple[Tensor, Tensor] | None, clamp: float | None, rounding: Rounding, interleaved: bool = False
) -> Experts | None:
    """A shared expert's 2-D weights (gate_up [2Is, H], down [H, Is]) as one expert without a route."""
    if shared is None:
        return None
    return Experts(shared[0].unsqueeze(0), shared[1].unsqueeze(0), clamp, rounding, interleaved)


def moe_forward(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, gate_up: Tensor, down: Tensor, *,
    clamp: float | None = None, shared: tuple[Tensor, Tensor] | None = None, rounding: Rounding = NO_ROUNDING,
) -> Tensor:  # fmt: skip
    """Mega MoE forward of one rank that holds all experts.

    Args:
        x: [n, H] any float dtype.
        topk_idx: integer [n, K], -1 for no expert.
        topk_weights: [n, K].
        gate_up: [E, 2I, H], rows [gate | up].
        down: [E, H, I].
        clamp: activation clamp c, None for plain SwiGLU.
        shared: (gate_up [2Is, H], down [H, Is]) of a shared expert.
        rounding: what to round where; the default rounds nothing.

    Returns:
        y [n, H] in the compute dtype (fp32 for 16-bit inputs, else the inputs' own).
    """
    plan = make_route_plan(topk_idx, gate_up.shape[0])
    return run_forward(
        x, topk_idx, topk_weights, plan, LocalTransport(plan), Experts(gate_up, down, clamp, rounding),
        shared_experts(shared, clamp, rounding),
    )  # fmt: skip


def moe_backward(
    dy: Tensor, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, gate_up: Tensor, down: Tensor, *,
    clamp: float | None = None, shared: tuple[Tensor, Tensor] | None = None, rounding: Rounding = NO_ROUNDING,
) -> Grads:  # fmt: skip
    """Mega MoE backward of one rank that holds all experts; the arguments are those of :func:`moe_forward`.

    Args:
        dy: [n, H] gradient of y.

    Returns:
        All gradients, in the compute dtype.
    """
    plan = make_route_plan(topk_idx, gate_up.shape[0])
    dtype = compute_dtype(x.dtype)
    dgate_up = torch.empty(gate_up.shape, dtype=dtype, device=x.device)
    ddown = torch.empty(down.shape, dtype=dtype, device=x.device)
    dshared = None
    if shared is not None:
        dshared = tuple(torch.empty((1, *w.shape), dtype=dtype, device=x.device) for w in shared)
    dx, dtopk = run_backward(
        dy, x, topk_idx, topk_weights, plan, LocalTransport(plan), Experts(gate_up, down, clamp, rounding),
        WeightGrad(dgate_up), WeightGrad(ddown), shared_experts(shared, clamp, rounding),
        WeightGrad(dshared[0] if dshared else None), WeightGrad(dshared[1] if dshared else None),
    )  # fmt: skip
    if dshared is None:
        return Grads(dx, dtopk, dgate_up, ddown)
    return Grads(dx, dtopk, dgate_up, ddown, dshared[0][0], dshared[1][0])
