"""The reference's explicit formulas against autograd over loops, and its rounding points."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_oracle import Answer, Problem, make_problem, relative_error, solve

from prime_kernels import reference, swiglu
from prime_kernels.quantize import through_blocks
from prime_kernels.reference import BF16_ROUNDING, NO_ROUNDING, Rounding, through

# float64 sums in another order differ by this much at most, on outputs of order 1.
FLOAT64_TOLERANCE = 1e-12
# kernels.md section 5, against the float64 reference.
BF16_TOLERANCE = 5e-3


def run(problem: Problem, rounding: Rounding = NO_ROUNDING) -> Answer:
    common = {"clamp": problem.clamp, "shared": problem.shared, "rounding": rounding}
    y = reference.moe_forward(*problem.arguments(), **common)
    grads = reference.moe_backward(problem.dy, *problem.arguments(), **common)
    shared = None if problem.shared is None else (grads.dshared_gate_up, grads.dshared_down)
    return Answer(y, grads.dx, grads.dtopk, grads.dgate_up, grads.ddown, shared)


def assert_close(got: Answer, want: Answer, tolerance: float) -> None:
    for name in ("y", "dx", "dtopk", "dgate_up", "ddown"):
        error = relative_error(getattr(got, name), getattr(want, name))
        assert error <= tolerance, f"{name}: {error}"
    assert (got.shared is None) == (want.shared is None)
    for ours, theirs in zip(got.shared or (), want.shared or (), strict=True):
        assert relative_error(ours, theirs) <= tolerance


def assert_unrouted_is_exactly_zero(got: Answer, problem: Problem) -> None:
    idle = torch.bincount(problem.topk_idx[problem.topk_idx >= 0], minlength=problem.gate_up.shape[0]) == 0
    assert (got.dgate_up[idle] == 0).all()
    assert (got.ddown[idle] == 0).all()
    assert (got.dtopk[problem.topk_idx < 0] == 0).all()
    if problem.shared is None:
        lonely = (problem.topk_idx < 0).all(1)
        assert (got.y[lonely] == 0).all()
        assert (got.dx[lonely] == 0).all()


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    experts = draw(st.integers(1, 7))
    topk = draw(st.integers(1, experts))
    tokens = draw(st.integers(0, 9))
    ids = st.lists(st.integers(-1, experts - 1), min_size=topk, max_size=topk)
    topk_idx = torch.tensor(draw(st.lists(ids, min_size=tokens, max_size=tokens)), dtype=torch.int64)
    return make_problem(
        tokens, experts, topk, draw(st.integers(1, 9)), draw(st.integers(1, 6)),
        seed=draw(st.integers(0, 2**31)), topk_idx=topk_idx.reshape(tokens, topk),
        clamp=draw(st.sampled_from([None, 0.3, 1.0, 50.0])), shared_inter=draw(st.sampled_from([None, 1, 5])),
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_against_autograd(problem: Problem) -> None:
    got = run(problem)
    assert_close(got, solve(problem), FLOAT64_TOLERANCE)
    assert_unrouted_is_exactly_zero(got, problem)


def _zipf(tokens: int, experts: int, topk: int) -> torch.Tensor:
    popularity = 1.0 / torch.arange(1, experts + 1) ** 1.2
    return torch.multinomial(popularity.expand(tokens, -1), topk, generator=torch.Generator().manual_seed(3))


ROUTINGS = {
    "every token to one expert": torch.full((20, 1), 2),
    "the same expert in all slots": torch.full((6, 3), 1),
    "nothing routed": torch.full((5, 2), -1),
    "first slot masked": torch.tensor([[-1, 0], [-1, 3]]),
    "K = E": torch.arange(6).repeat(4, 1),
    "K above 8": torch.stack(
        [torch.randperm(12, generator=torch.Generator().manual_seed(i))[:11] for i in range(4)]
    ),
    "Zipf": _zipf(40, 10, 3),
    "no tokens": torch.empty(0, 2, dtype=torch.int64),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_routing(name: str) -> None:
    topk_idx = ROUTINGS[name]
    experts = max(6, int(topk_idx.max()) + 1) if topk_idx.numel() else 6
    problem = make_problem(*topk_idx.shape[:1], experts, topk_idx.shape[1], 8, 4, topk_idx=topk_idx)
    got = run(problem)
    assert_close(got, solve(problem), FLOAT64_TOLERANCE)
    assert_unrouted_is_exactly_zero(got, problem)


@pytest.mark.parametrize("rows", [1, 15, 17, 31, 33, 127, 128, 129])
def test_rows_of_one_group(rows: int) -> None:
    topk_idx = torch.cat([torch.full((rows, 1), 1), torch.full((2, 1), 3)])
    problem = make_problem(rows + 2, 4, 1, 6, 3, topk_idx=topk_idx)
    got = run(problem)
    assert_close(got, solve(problem), FLOAT64_TOLERANCE)
    assert_unrouted_is_exactly_zero(got, problem)


def test_splits_with_empty_and_large_groups() -> None:
    topk_idx = torch.repeat_interleave(torch.arange(6), torch.tensor([162, 0, 2577, 446, 0, 83]))
    topk_idx = topk_idx[torch.randperm(len(topk_idx), generator=torch.Generator().manual_seed(0))]
    problem = make_problem(len(topk_idx), 6, 1, 6, 3, topk_idx=topk_idx[:, None])
    got = run(problem)
    assert_close(got, solve(problem), FLOAT64_TOLERANCE)
    assert_unrouted_is_exactly_zero(got, problem)


def test_same_expert_twice_counts_twice() -> None:
    once = make_problem(5, 3, 1, 8, 4, topk_idx=torch.full((5, 1), 2))
    twice = dataclasses.replace(
        once, topk_idx=once.topk_idx.repeat(1, 2), topk_weights=once.topk_weights.repeat(1, 2)
    )
    a, b = run(once), run(twice)
    assert relative_error(b.y, 2 * a.y) < FLOAT64_TOLERANCE
    assert relative_error(b.ddown, 2 * a.ddown) < FLOAT64_TOLERANCE
    assert relative_error(b.dtopk, a.dtopk.repeat(1, 2)) < FLOAT64_TOLERANCE


def test_clamp_binds_and_stops_the_gradient() -> None:
    """One token, one expert, hidden size 1: g = 3 (above c), u = -5 (below -c), then each inside again."""
    c = 2.0
    silu = c / (1 + math.exp(-c))

    def dz(gate: float, up: float) -> tuple[torch.Tensor, torch.Tensor]:
        z = torch.tensor([[gate, up]], dtype=torch.float64)
        return swiglu.swiglu(z, c), swiglu.swiglu_backward(z, torch.ones(1, 1, dtype=torch.float64), c)

    act, grad = dz(3.0, -5.0)
    assert act.item() == pytest.approx(-silu * c)
    assert grad.tolist() == [[0.0, 0.0]]
    act, grad = dz(3.0, 1.5)
    assert act.item() == pytest.approx(silu * 1.5)
    assert grad[0, 0] == 0
    assert grad[0, 1] == pytest.approx(silu)
    _, grad = dz(-3.0, 5.0)  # min(g, c) has no lower bound
    assert grad[0, 0] != 0
    assert grad[0, 1] == 0
    _, at_bound = dz(c, c)  # the clamp does not bind yet
    assert (at_bound != 0).all()


def test_rounding_across_the_clamp_keeps_the_gradient() -> None:
    """g a little below c that rounds to above it keeps its gradient, as without rounding. And the reverse."""
    exact = torch.tensor([[1.0001, 0.9999], [0.9999, -1.0001]], dtype=torch.float64)
    rounded = torch.tensor([[0.99, 1.01], [1.01, -0.99]], dtype=torch.float64)
    dact = torch.ones(2, 1, dtype=torch.float64)
    grad = swiglu.swiglu_backward(rounded, dact, 1.0, exact)
    assert (grad == 0).tolist() == [[True, False], [False, True]]


def test_clamp_is_seen_in_all_outputs() -> None:
    problem = make_problem(30, 4, 2, 8, 4, clamp=0.2)
    clamped, plain = run(problem), run(dataclasses.replace(problem, clamp=None))
    assert_close(clamped, solve(problem), FLOAT64_TOLERANCE)
    for name in ("y", "dx", "dtopk", "dgate_up", "ddown"):
        assert relative_error(getattr(clamped, name), getattr(plain, name)) > 0.05, name


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_weight_of_a_masked_slot_may_hold_anything(garbage: float) -> None:
    problem = make_problem(12, 4, 3, 8, 4)
    problem.topk_idx[3, 1] = -1
    clean = run(problem)
    dirty = dataclasses.replace(
        problem, topk_weights=problem.topk_weights.masked_fill(problem.topk_idx < 0, garbage)
    )
    assert_close(run(dirty), clean, 0.0)


def test_nan_and_inf_inputs_are_not_hidden() -> None:
    problem = make_problem(4, 2, 1, 8, 4, topk_idx=torch.tensor([[0], [1], [0], [1]]))
    problem.x[1, 2] = math.nan
    got = run(problem)
    assert got.y[1].isnan().all()
    assert got.y[[0, 2, 3]].isfinite().all()
    assert got.dgate_up[0].isfinite().all()
    assert got.dgate_up[1].isnan().any()


@pytest.mark.parametrize("zero", ["dy", "gate_up", "down", "topk_weights", "x"])
def test_zero_inputs(zero: str) -> None:
    problem = make_problem(10, 4, 2, 8, 4)
    problem = dataclasses.replace(problem, **{zero: torch.zeros_like(getattr(problem, zero))})
    assert_close(run(problem), solve(problem), FLOAT64_TOLERANCE)


@pytest.mark.parametrize("clamp", [None, 1.0])
def test_bf16_rounding_against_float64(clamp: float | None) -> None:
    """Inputs in bf16, every output and every expert on its own."""
    problem = make_problem(96, 5, 2, 128, 128, clamp=clamp, shared_inter=64).to(torch.bfloat16)
    got, want = run(problem, BF16_ROUNDING), run(problem.to(torch.float64))
    assert_close(got, want, BF16_TOLERANCE)
    for expert in range(5):
        assert relative_error(got.dgate_up[expert], want.dgate_up[expert]) <= BF16_TOLERANCE
        assert relative_error(got.ddown[expert], want.ddown[expert]) <= BF16_TOLERANCE
    assert got.y.dtype == torch.float32  # 16-bit inputs compute in fp32
    assert torch.equal(got.y, got.y.bfloat16().float())
    assert torch.equal(got.dx, got.dx.bfloat16().float())


# What a rounding point must reach (and nothing before it in the formulas can change).
REACHES = {
    "x": {"y", "dx", "dtopk", "dgate_up", "ddown"},
    "dy": {"dx", "dtopk", "dgate_up", "ddown"},
    "gate_up_weight": {"y", "dx", "dtopk", "dgate_up", "ddown"},
    "down_weight": {"y", "dx", "dtopk", "dgate_up"},
    "gate_up": {"y", "dx", "dtopk", "dgate_up", "ddown"},
    "act": {"y"},
    "out_row": {"y"},
    "y": {"y"},
    "dact": {"dx", "dtopk", "dgate_up"},
    "dz": {"dx"},
    "x_wgrad": {"dgate_up"},
    "dy_wgrad": {"ddown"},
    "dz_wgrad": {"dgate_up"},
    "weighted_act": {"ddown"},
    "dx_row": {"dx"},
    "dx": {"dx"},
}


def test_every_rounding_point_is_listed() -> None:
    assert set(REACHES) == {f.name for f in dataclasses.fields(Rounding)}


@pytest.mark.parametrize("point", REACHES)
@pytest.mark.parametrize(
    "quantiser",
    [through(torch.bfloat16), through_blocks(1, 128), through_blocks(128, 1)],
    ids=["bf16", "rows", "columns"],
)
def test_rounding_point_changes_exactly_what_follows_it(point: str, quantiser: reference.Round) -> None:
    problem = make_problem(20, 3, 2, 10, 6)
    exact, rounded = run(problem), run(problem, Rounding(**{point: quantiser}))
    for name in ("y", "dx", "dtopk", "dgate_up", "ddown"):
        error = relative_error(getattr(rounded, name), getattr(exact, name))
        if name in REACHES[point]:
            assert 1e-5 < error < 0.2, name
        else:
            assert error == 0, name


def test_interleave_round_trip_and_order() -> None:
    weight = torch.arange(2 * 32 * 3).reshape(2, 32, 3)
    interleaved = reference.interleave_gate_up(weight)
    rows = [weight[:, 0:8], weight[:, 16:24], weight[:, 8:16], weight[:, 24:32]]
    assert torch.equal(interleaved, torch.cat(rows, dim=1))
    assert torch.equal(reference.deinterleave_gate_up(interleaved), weight)
    assert torch.equal(reference.interleave_gate_up(weight[0]), interleaved[0])


def test_two_runs_agree_bitwise() -> None:
    problem = make_problem(64, 6, 3, 32, 16).to(torch.bfloat16)
    assert_close(run(problem, BF16_ROUNDING), run(problem, BF16_ROUNDING), 0.0)
