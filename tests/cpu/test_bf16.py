"""The public BF16 functions on one rank: what is overwritten, skipped, added, and in which layout."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from mega_calls import Outputs, backward, forward, make_buffer, poison_buffer, run_both
from moe_oracle import Problem, make_problem, relative_error, solve

from prime_kernels import (
    SymmBuffer,
    bf16_mega_moe,
    bf16_mega_moe_backward,
    registry,
    transform_weights_for_mega_moe,
)
from prime_kernels.reference import deinterleave_gate_up, interleave_gate_up, moe_backward

BF16_TOLERANCE = 5e-3
BF16_REPEATS = 8
MAX_TOKENS = 11 * BF16_REPEATS + 5
FLOAT32_TOLERANCE = 1e-5
FLOAT64_TOLERANCE = 1e-12
TOLERANCES = {
    torch.bfloat16: BF16_TOLERANCE,
    torch.float32: FLOAT32_TOLERANCE,
    torch.float64: FLOAT64_TOLERANCE,
}


def small(dtype: torch.dtype = torch.float64, **options) -> Problem:
    """5 experts of which the last is idle, 11 tokens of which token 4 has no expert, two masked slots.

    In bf16 the routing is repeated over more tokens, so that the norms judged rest on many numbers.
    """
    topk_idx = torch.tensor(
        [[0, 1], [2, 3], [1, 1], [3, -1], [-1, -1], [0, 2], [2, 1], [-1, 0], [3, 3], [1, 0], [2, 2]]
    )
    hidden, inter, repeats = (64, 128, BF16_REPEATS) if dtype == torch.bfloat16 else (24, 16, 1)
    topk_idx = topk_idx.repeat(repeats, 1)
    return make_problem(11 * repeats, 5, 2, hidden, inter, topk_idx=topk_idx, **options).to(dtype)


def assert_matches_autograd(got: Outputs, problem: Problem) -> None:
    want, tolerance = solve(problem), TOLERANCES[problem.x.dtype]
    pairs = {"y": want.y, "dx": want.dx, "dtopk": want.dtopk, "dw1": want.dgate_up, "dw2": want.ddown}
    if want.shared is not None:
        pairs |= {"shared_dw1": want.shared[0], "shared_dw2": want.shared[1]}
    for name, value in pairs.items():
        assert relative_error(got.named()[name], value) <= tolerance, name


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shared_inter", [None, 128])
def test_against_autograd_with_poisoned_outputs(dtype: torch.dtype, shared_inter: int | None) -> None:
    problem = small(dtype, shared_inter=shared_inter)
    got = run_both(problem, make_buffer(problem, MAX_TOKENS))
    assert_matches_autograd(got, problem)
    assert (got.dw1[4] == 0).all()
    assert (got.dw2[4] == 0).all()
    assert (got.dtopk[problem.topk_idx < 0] == 0).all()
    if shared_inter is None:
        lonely = (problem.topk_idx < 0).all(1)
        assert lonely.any()
        assert (got.y[lonely] == 0).all()
        assert (got.dx[lonely] == 0).all()
    repeats = problem.x.shape[0] // 11
    assert got.stats.tolist() == [count * repeats for count in (4, 5, 5, 4, 0)]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_clamp_reaches_every_output(dtype: torch.dtype) -> None:
    problem = small(dtype, clamp=0.3)
    got = run_both(problem, make_buffer(problem, MAX_TOKENS))
    assert_matches_autograd(got, problem)
    problem.clamp = None
    assert relative_error(run_both(problem, make_buffer(problem, MAX_TOKENS)).dw1, got.dw1) > 0.05


def test_no_tokens_gives_zero_weight_gradients() -> None:
    problem = small(shared_inter=4)
    got = run_both(problem, make_buffer(problem, MAX_TOKENS), tokens=slice(0, 0))
    assert got.y.shape == (0, 24)
    assert got.dtopk.shape == (0, 2)
    for name in ("dw1", "dw2", "shared_dw1", "shared_dw2", "stats"):
        assert (got.named()[name] == 0).all(), name


def test_full_buffer() -> None:
    problem = small()
    assert_matches_autograd(run_both(problem, make_buffer(problem, 11)), problem)


@pytest.mark.parametrize("dw_dtype", [torch.bfloat16, torch.float32])
def test_weight_gradient_dtypes(dw_dtype: torch.dtype) -> None:
    problem = small(torch.bfloat16, shared_inter=128)
    got = run_both(problem, make_buffer(problem, MAX_TOKENS), dw_dtype=dw_dtype)
    assert got.dw1.dtype == dw_dtype
    assert_matches_autograd(got, problem)


@pytest.mark.parametrize("skip", [("dw1",), ("dw2",), ("dw1", "dw2"), ("dw2", "shared_dw1"), ("shared_dw2",)])
def test_frozen_weights_leave_the_rest_alone(skip: tuple[str, ...]) -> None:
    problem = small(shared_inter=4)
    everything = backward(problem, make_buffer(problem, MAX_TOKENS))
    got = backward(problem, make_buffer(problem, MAX_TOKENS), skip=skip)
    for name, value in everything.items():
        if name in skip:
            assert got[name] is None
        else:
            assert torch.equal(got[name], value), name


def test_frozen_weights_skip_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """None must save the GEMM, not compute and drop it: count the matmuls of each setting."""
    problem = small()
    count = 0
    original = torch.Tensor.__matmul__

    def counting(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return original(self, other)

    monkeypatch.setattr(torch.Tensor, "__matmul__", counting)
    matmuls = []
    for skip in ((), ("dw1",), ("dw2",), ("dw1", "dw2")):
        count = 0
        backward(problem, make_buffer(problem, MAX_TOKENS), skip=skip)
        matmuls.append(count)
    busy_experts = 4
    assert matmuls == [5 * busy_experts, 4 * busy_experts, 4 * busy_experts, 3 * busy_experts]


def _accumulate(problem: Problem, wide: torch.dtype, natural: bool) -> None:
    buffer = make_buffer(problem, MAX_TOKENS)
    fresh = backward(problem, buffer, dw_dtype=wide, dw_natural_layout=natural)
    before = {
        name: torch.randn(fresh[name].shape, generator=torch.Generator().manual_seed(7), dtype=wide)
        for name in ("dw1", "dw2", "shared_dw1", "shared_dw2")
    }
    held = {name: value.clone() for name, value in before.items()}
    dx, dtopk = torch.full_like(problem.x, math.nan), torch.full_like(problem.topk_weights, math.nan)
    buffer_n = problem.x.shape[0]
    assert buffer.x[:buffer_n].isfinite().all()
    bf16_mega_moe_backward(
        dx, held["dw1"], held["dw2"], dtopk, problem.dy, problem.gate_up, problem.down, buffer,
        *problem.shared, held["shared_dw1"], held["shared_dw2"], accumulate=True, dw_natural_layout=natural,
    )  # fmt: skip
    for name, value in held.items():
        assert torch.equal(value, before[name] + fresh[name]), name
    assert torch.equal(held["dw2"][4], before["dw2"][4])  # the idle expert
    assert torch.equal(dx, fresh["dx"])  # dx and dtopk are overwritten all the same
    assert torch.equal(dtopk, fresh["dtopk"])


@pytest.mark.parametrize("natural", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_accumulate_adds_in_wide_precision(dtype: torch.dtype, natural: bool) -> None:
    problem = small(dtype, shared_inter=128)
    _accumulate(problem, problem.topk_weights.dtype, natural)


def test_micro_batches_accumulate_to_the_whole() -> None:
    problem = small(torch.bfloat16)
    buffer = make_buffer(problem, MAX_TOKENS)
    dw1, dw2 = torch.zeros(problem.gate_up.shape), torch.zeros(problem.down.shape)
    for start in range(0, problem.x.shape[0], 40):
        tokens = slice(start, start + 40)
        backward(problem, buffer, tokens)  # stages these tokens
        dx, dtopk = torch.empty_like(problem.x[tokens]), torch.empty_like(problem.topk_weights[tokens])
        bf16_mega_moe_backward(
            dx, dw1, dw2, dtopk, problem.dy[tokens], problem.gate_up, problem.down, buffer, accumulate=True
        )
    want = solve(problem)
    assert relative_error(dw1, want.dgate_up) <= BF16_TOLERANCE
    assert relative_error(dw2, want.ddown) <= BF16_TOLERANCE


def test_interleaved_layouts() -> None:
    natural = small(torch.bfloat16, shared_inter=256, clamp=1.5)
    old = small(torch.bfloat16, shared_inter=256, clamp=1.5)
    old.gate_up = interleave_gate_up(natural.gate_up)
    old.shared = (interleave_gate_up(natural.shared[0]), natural.shared[1])
    buffer = make_buffer(natural, MAX_TOKENS)
    y, _ = forward(natural, buffer)
    grads = backward(natural, buffer)
    y_old, _ = forward(old, buffer, l1_natural_layout=False)
    assert torch.equal(y_old, y)
    for dw_natural in (True, False):
        got = backward(old, buffer, l1_natural_layout=False, dw_natural_layout=dw_natural)
        mixed = backward(natural, buffer, dw_natural_layout=dw_natural)
        for name, value in grads.items():
            if not dw_natural and name in ("dw1", "shared_dw1"):
                assert not torch.equal(got[name], value)
                got[name], mixed[name] = deinterleave_gate_up(got[name]), deinterleave_gate_up(mixed[name])
            assert torch.equal(got[name], value), name
            assert torch.equal(mixed[name], value), name


def test_interleaved_weights_read_as_natural_are_wrong() -> None:
    """The flag matters: the test above could not fail if interleaving changed nothing."""
    problem = small(torch.bfloat16)
    buffer = make_buffer(problem, MAX_TOKENS)
    y, _ = forward(problem, buffer)
    problem.gate_up = interleave_gate_up(problem.gate_up)
    assert relative_error(forward(problem, buffer)[0], y) > 0.1


def test_strided_weight_views() -> None:
    """Weights and their gradients as views of a larger allocation, only the last dim contiguous."""
    problem = small(torch.bfloat16)
    buffer = make_buffer(problem, MAX_TOKENS)
    y, _ = forward(problem, buffer)
    grads = backward(problem, buffer)
    experts, rows, hidden = problem.gate_up.shape
    packed = torch.full((experts, 3, rows, 2 * hidden), math.nan, dtype=torch.bfloat16)
    packed_down = torch.full((hidden, experts, rows), math.nan, dtype=torch.bfloat16)
    view1, view2 = packed[:, 1, :, hidden:], packed_down.transpose(0, 1)[:, :, : rows // 2]
    view1.copy_(problem.gate_up)
    view2.copy_(problem.down)
    assert not view1.is_contiguous()
    assert not view2.is_contiguous()
    problem.gate_up, problem.down = view1, view2
    assert torch.equal(forward(problem, buffer)[0], y)
    dw1, dw2 = torch.full_like(packed, math.nan), torch.full_like(packed_down, math.nan)
    dx, dtopk = torch.empty_like(problem.x), torch.empty_like(problem.topk_weights)
    bf16_mega_moe_backward(
        dx,
        dw1[:, 1, :, hidden:],
        dw2.transpose(0, 1)[:, :, : rows // 2],
        dtopk,
        problem.dy,
        view1,
        view2,
        buffer,
    )
    assert torch.equal(dx, grads["dx"])
    assert torch.equal(dw1[:, 1, :, hidden:], grads["dw1"])
    assert torch.equal(dw2.transpose(0, 1)[:, :, : rows // 2], grads["dw2"])
    assert dw1[:, 0].isnan().all()
    assert dw1[:, 1, :, :hidden].isnan().all()
    assert dw2[:, :, rows // 2 :].isnan().all()


def test_inputs_are_left_as_they_are() -> None:
    problem = small(shared_inter=4)
    buffer = make_buffer(problem, MAX_TOKENS)
    tensors = [*problem.arguments(), problem.dy, *problem.shared]
    before = [tensor.clone() for tensor in tensors]
    run_both(problem, buffer)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    assert torch.equal(buffer.x[:11], problem.x)


def test_statistics_add_up() -> None:
    problem = small()
    buffer = make_buffer(problem, MAX_TOKENS)
    forward(problem, buffer)
    stats = torch.tensor([1, 2, 3, 4, 5], dtype=torch.int32)
    y = torch.empty_like(problem.x)
    for _ in range(2):
        bf16_mega_moe(
            y,
            problem.gate_up,
            problem.down,
            buffer,
            cumulative_local_expert_recv_stats=stats,
            fast_math=False,
        )
    assert stats.tolist() == [9, 12, 13, 12, 5]


def test_no_graph_is_built() -> None:
    problem = small()
    problem.gate_up.requires_grad_()
    problem.x.requires_grad_()
    buffer = make_buffer(problem, MAX_TOKENS)
    y = torch.empty_like(problem.dy)
    with torch.no_grad():
        forward(problem, buffer)
    bf16_mega_moe(y, problem.gate_up, problem.down, buffer)
    assert not y.requires_grad


@pytest.fixture
def two_layers() -> tuple[Problem, Problem]:
    """Two layers of one shape with different weights, inputs and routing."""
    return small(), make_problem(9, 5, 2, 24, 16, seed=9)


def test_two_layers_over_one_buffer_in_order_f1_f2_b2_b1(two_layers: tuple[Problem, Problem]) -> None:
    first, second = two_layers
    buffer = make_buffer(first, MAX_TOKENS)
    y1, y2 = forward(first, buffer)[0], forward(second, buffer)[0]
    grads2, grads1 = backward(second, buffer), backward(first, buffer)
    for problem, y, grads in ((first, y1, grads1), (second, y2, grads2)):
        assert_matches_autograd(Outputs(y=y, stats=torch.empty(0), **grads), problem)


def test_two_buffers_alive_do_not_disturb_each_other(two_layers: tuple[Problem, Problem]) -> None:
    buffers = [make_buffer(problem, MAX_TOKENS) for problem in two_layers]
    ys = [forward(problem, buffer)[0] for problem, buffer in zip(two_layers, buffers, strict=True)]
    for problem, buffer, y in zip(two_layers, buffers, ys, strict=True):
        assert torch.equal(buffer.x[: y.shape[0]], problem.x)
        assert_matches_autograd(Outputs(y=y, stats=torch.empty(0), **backward(problem, buffer)), problem)


def test_layers_of_other_shapes_share_the_memory_of_one_base() -> None:
    big, other = small(), make_problem(6, 3, 1, 16, 8, seed=2)
    base = make_buffer(big, MAX_TOKENS)
    view = make_buffer(other, 6, base=base)
    y_big, y_other = forward(big, base)[0], forward(other, view)[0]
    grads_other, grads_big = backward(other, view), backward(big, base)
    assert_matches_autograd(Outputs(y=y_big, stats=torch.empty(0), **grads_big), big)
    assert_matches_autograd(Outputs(y=y_other, stats=torch.empty(0), **grads_other), other)


def test_backward_twice_after_recomputation(two_layers: tuple[Problem, Problem]) -> None:
    """Activation checkpointing runs a forward again before its backward."""
    first, second = two_layers
    buffer = make_buffer(first, MAX_TOKENS)
    y = forward(first, buffer)[0]
    forward(second, buffer)
    assert torch.equal(forward(first, buffer)[0], y)
    assert_matches_autograd(Outputs(y=y, stats=torch.empty(0), **backward(first, buffer)), first)


def test_stale_buffer_contents_reach_no_output() -> None:
    problem = small(torch.bfloat16)
    buffer = make_buffer(problem, MAX_TOKENS)
    clean = run_both(problem, buffer)
    for _ in range(3):
        poison_buffer(buffer)
        again = run_both(problem, buffer)
        for name, value in clean.named().items():
            assert torch.equal(value, again.named()[name]), name


def test_transform_weights_keeps_tensors() -> None:
    problem = small(torch.bfloat16, shared_inter=128)
    l1, l2 = transform_weights_for_mega_moe(problem.gate_up, problem.down)
    assert l1 is problem.gate_up
    assert l2 is problem.down
    assert transform_weights_for_mega_moe(*problem.shared, mma_type="bf16xbf16") == problem.shared


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (
            bf16_mega_moe,
            "y l1_weights l2_weights sym_buffer shared_l1_weights shared_l2_weights "
            "cumulative_local_expert_recv_stats activation activation_clamp fast_math l1_natural_layout",
        ),
        (
            bf16_mega_moe_backward,
            "dx dw1 dw2 dtopk dy l1_weights l2_weights sym_buffer shared_l1_weights shared_l2_weights "
            "shared_dw1_weights shared_dw2_weights activation activation_clamp fast_math dw_natural_layout "
            "l1_natural_layout accumulate",
        ),
        (
            SymmBuffer,
            "group num_experts num_max_tokens_per_rank num_topk hidden intermediate_hidden "
            "num_shared_experts mma_type activation base",
        ),
    ],
)
def test_signatures_clients_inspect(function, names: str) -> None:
    assert list(inspect.signature(function).parameters) == names.split()


class _Kernels:
    """Stands for a kernel's module and notes what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict]] = []

    def forward(self, **arguments) -> None:
        self.calls.append(("forward", arguments))

    def backward(self, **arguments) -> None:
        self.calls.append(("backward", arguments))


def test_another_backend_gets_the_checked_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, loaded = _Kernels(), []
    monkeypatch.setattr(registry, "load", lambda name: loaded.append(name) or kernels)
    problem = small(torch.bfloat16, shared_inter=128, clamp=2.0)
    buffer = make_buffer(problem, MAX_TOKENS)
    buffer.backend = "sm90"
    y, _ = forward(problem, buffer, l1_natural_layout=False)
    grads = backward(problem, buffer, skip=("dw2",), dw_natural_layout=False)
    assert loaded == ["mega_moe_bf16", "mega_moe_bf16_backward"]
    (_, forwarded), (_, backwarded) = kernels.calls
    settled = {"activation"}  # one value is left after validation
    kept = {"z"}  # not for callers of the public functions
    assert set(forwarded) == set(inspect.signature(bf16_mega_moe).parameters) - settled | kept
    assert set(backwarded) == set(inspect.signature(bf16_mega_moe_backward).parameters) - settled | kept
    assert forwarded["z"] is backwarded["z"] is None
    assert forwarded["y"] is y
    assert forwarded["sym_buffer"] is backwarded["sym_buffer"] is buffer
    assert forwarded["l1_natural_layout"] is False
    assert backwarded["dx"] is grads["dx"]
    assert backwarded["dw2"] is None
    assert backwarded["dw_natural_layout"] is False
    assert forwarded["activation_clamp"] == backwarded["activation_clamp"] == 2.0
    assert y.isnan().all()  # nothing ran in its place
    assert grads["dx"].isnan().all()


def test_moe_backward_and_public_function_agree() -> None:
    problem = small()
    grads = moe_backward(problem.dy, *problem.arguments())
    got = backward(problem, make_buffer(problem, MAX_TOKENS))
    assert torch.equal(grads.dgate_up, got["dw1"])
    assert torch.equal(grads.dtopk, got["dtopk"])
