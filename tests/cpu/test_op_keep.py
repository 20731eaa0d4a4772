"""``keep="z"``: the forward keeps gate and up, the backward takes them instead of recomputing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from gloo_world import GlooWorld
from op_helpers import (
    BF16,
    BF16_TOLERANCE,
    SMALL,
    Inputs,
    assert_all_close,
    assert_close,
    backward,
    call,
    expected,
    expected_forward,
    make_buffer,
    make_inputs,
    record_calls,
)
from test_op_checkpoint import MODES, layer_grads, model
from test_op_compile import INDUCTOR, compiled, two_layers
from test_op_ep import TWO_RANKS, check, rank_step
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from prime_kernels import MegaMoE, custom_ops, op
from prime_kernels.bf16 import backward_from_z, forward_keeping_z
from prime_kernels.module import release_buffers
from prime_kernels.reference import BF16_ROUNDING
from prime_kernels.swiglu import kept_gate_up

EXACT = 1e-12
CLAMP = 0.7  # binds for a good part of the test inputs
CLAMPS = pytest.mark.parametrize("clamp", [None, CLAMP])

keep_z = partial(call, keep="z")


@pytest.fixture(autouse=True)
def _fresh(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor-keep"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    release_buffers()


def received(inputs: Inputs) -> int:
    return int((inputs.topk_idx >= 0).sum())


# ---- values and gradients


@CLAMPS
@pytest.mark.parametrize("shared", [False, True])
def test_gradcheck(clamp: float | None, shared: bool) -> None:
    inputs = make_inputs(SMALL, 5, shared=shared)
    buffer = make_buffer(SMALL)

    def function(x: Tensor, topk_weights: Tensor, gate_up: Tensor, down: Tensor, *pair: Tensor) -> Tensor:
        perturbed = Inputs(x, inputs.topk_idx, topk_weights, gate_up, down, pair or None)
        return keep_z(perturbed, buffer, activation_clamp=clamp)

    assert torch.autograd.gradcheck(function, inputs.leaves())


@CLAMPS
@pytest.mark.parametrize("num_tokens", [0, 1, 8])
def test_without_rounding_it_gives_the_bits_of_recomputing(num_tokens: int, clamp: float | None) -> None:
    inputs = make_inputs(SMALL, num_tokens, shared=True)
    plain, buffer = inputs.copy(), make_buffer(SMALL)
    dy = torch.randn(num_tokens, SMALL.hidden, dtype=torch.float64)
    y = backward(inputs, buffer, dy, activation_clamp=clamp, keep="z")
    assert torch.equal(y, backward(plain, buffer, dy, activation_clamp=clamp))
    for grad, same in zip(inputs.grads(), plain.grads(), strict=True):
        assert torch.equal(grad, same)
    assert_all_close(inputs.grads(), expected(inputs, dy, clamp)[1], EXACT)


@pytest.mark.parametrize("clamp", [None, CLAMP, 0.25])
def test_bf16(clamp: float | None) -> None:
    """z is rounded where the recomputed one is, so that only values next to the clamp differ, by one bit."""
    inputs = make_inputs(BF16, 16, torch.bfloat16, shared=True)
    plain, buffer = inputs.copy(), make_buffer(BF16, torch.bfloat16)
    dy = torch.randn(16, BF16.hidden).bfloat16()
    y = backward(inputs, buffer, dy, activation_clamp=clamp, keep="z")
    assert torch.equal(y, backward(plain, buffer, dy, activation_clamp=clamp))
    if clamp is None:
        for grad, same in zip(inputs.grads(), plain.grads(), strict=True):
            assert torch.equal(grad, same)
    expected_y, expected_grads = expected(inputs, dy, clamp)
    assert_close(y, expected_y, BF16_TOLERANCE, "y")
    assert_all_close(inputs.grads(), expected_grads, BF16_TOLERANCE)


def test_kept_values_stay_on_their_side_of_the_clamp() -> None:
    """The nearest bf16, or its neighbour where rounding went across; a gate is bound from above only."""
    spacing = 2.0**-7  # of bf16 from 1 to 2
    near = torch.arange(-40, 41).float() * spacing / 16
    for clamp in (1.0, 1.0 + spacing / 3, 1.0 + spacing * 3 / 4):
        values = torch.cat([clamp + near, -clamp - near])[None]
        exact = torch.cat([values, values], dim=1)
        rounded = BF16_ROUNDING.gate_up(exact)
        kept = kept_gate_up(exact, rounded, clamp, torch.bfloat16)
        assert kept.dtype == torch.bfloat16
        gate, up = kept.float().chunk(2, dim=1)
        assert torch.equal(gate > clamp, values > clamp)
        assert torch.equal(up.abs() > clamp, values.abs() > clamp)
        crossed = (rounded.abs() > clamp) != (exact.abs() > clamp)
        crossed[:, : values.shape[1]] &= values > 0
        assert crossed.any()
        assert torch.equal(kept.float()[~crossed], rounded[~crossed])
        assert (kept.float() - rounded)[crossed].abs().max() <= spacing
    assert torch.equal(kept_gate_up(exact, rounded, None, torch.bfloat16), rounded.bfloat16())


def test_the_backward_reads_z_and_not_the_gate_and_up_weights() -> None:
    """With zeros for gate_up, all that comes from z stays, and only dx, which needs W13, is lost."""
    inputs = make_inputs(SMALL, 8)
    buffer = make_buffer(SMALL)
    x, topk_idx, topk_weights, gate_up, down = (
        inputs.x.detach(), inputs.topk_idx, inputs.topk_weights.detach(), inputs.gate_up.detach(),
        inputs.down.detach(),
    )  # fmt: skip
    dy = torch.randn_like(x)
    custom_ops._stage(buffer, x, topk_idx, topk_weights)
    z = forward_keeping_z(torch.empty_like(x), gate_up, down, buffer, None, None, None, None)
    results = []
    for weight in (gate_up, torch.zeros_like(gate_up)):
        outputs = [torch.full_like(like, torch.nan) for like in (x, gate_up, down, topk_weights)]
        custom_ops._stage(buffer, x, topk_idx, topk_weights)
        backward_from_z(
            *outputs, dy, weight, down, buffer, None, None, None, None, activation_clamp=None,
            accumulate=False, z=z,
        )  # fmt: skip
        results.append(outputs)
    for genuine, without in zip(results[0][1:], results[1][1:], strict=True):
        assert torch.equal(genuine, without)
    assert results[1][0].eq(0).all()
    dx, dtopk, dgate_up, ddown = expected(inputs, dy)[1]
    assert_all_close(results[0], [dx, dgate_up, ddown, dtopk], EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_z_has_the_rows_received(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    calls = record_calls(monkeypatch)
    for num_tokens in (7, 0):
        inputs = make_inputs(BF16, num_tokens, dtype)
        y = keep_z(inputs, make_buffer(BF16, dtype))
        [z] = calls.kept
        assert z.shape == (received(inputs), 2 * BF16.inter)
        assert z.dtype == dtype
        y.sum().backward()
        assert calls.used[0].data_ptr() == z.data_ptr()
        calls.kept.clear()
        calls.used.clear()
    assert len(calls.backward) == 2


def test_nothing_is_kept_without_grad_mode_or_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, buffer = make_inputs(SMALL, 7), make_buffer(SMALL)
    calls = record_calls(monkeypatch)
    want = call(inputs, buffer)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(keep_z(inputs, buffer), want)
    assert len(calls.forward) == 3
    assert calls.kept == []


@pytest.mark.parametrize(("frozen", "skipped"), [("gate_up", [0]), ("down", [1]), ("both", [0, 1])])
def test_frozen_weights_skip_work(monkeypatch: pytest.MonkeyPatch, frozen: str, skipped: list[int]) -> None:
    calls = record_calls(monkeypatch)
    inputs = make_inputs(SMALL, 7)
    for index in skipped:
        (inputs.gate_up, inputs.down)[index].requires_grad_(False)
    dy = torch.randn_like(inputs.x)
    backward(inputs, make_buffer(SMALL), dy, keep="z")
    assert [out is None for out in calls.backward[0][:2]] == [index in skipped for index in (0, 1)]
    assert len(calls.used) == 1
    for grad, reference, leaf in zip(inputs.grads(), expected(inputs, dy)[1], inputs.leaves(), strict=True):
        assert (grad is None) != leaf.requires_grad
        if grad is not None:
            assert_close(grad, reference, EXACT)


def test_two_layers_over_one_buffer_f1_f2_b2_b1() -> None:
    buffer = make_buffer(SMALL)
    first, second = make_inputs(SMALL, 7, seed=1), make_inputs(SMALL, 4, seed=2)
    dy1, dy2 = torch.randn_like(first.x), torch.randn_like(second.x)
    y1, y2 = keep_z(first, buffer), keep_z(second, buffer)
    for inputs, y, dy in ((second, y2, dy2), (first, y1, dy1)):
        buffer.x.fill_(torch.nan)
        buffer.topk_weights.fill_(torch.nan)
        buffer.topk_idx.fill_(-1)
        y.backward(dy)
        assert_all_close(inputs.grads(), expected(inputs, dy)[1], EXACT)


def test_main_grad() -> None:
    inputs, buffer = make_inputs(SMALL, 8, shared=True), make_buffer(SMALL)
    weights = (inputs.gate_up, inputs.down, *inputs.shared)
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight)
    batches = [inputs.tokens(slice(0, 5)), inputs.tokens(slice(5, 8))]
    for y in [keep_z(batch, buffer) for batch in batches]:  # F1 F2 B1 B2
        y.sum().backward()
    grads = [expected(batch, torch.ones_like(batch.x))[1][2:] for batch in batches]
    for weight, one, other in zip(weights, *grads, strict=True):
        assert weight.grad is None
        assert_close(weight.main_grad, one + other, EXACT)


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


def test_the_backward_runs_where_no_gradient_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is collective: the peers wait for it."""
    calls = record_calls(monkeypatch)
    inputs = make_inputs(SMALL, 7)
    _NoGradient.apply(keep_z(inputs, make_buffer(SMALL))).sum().backward()
    assert len(calls.backward) == 1
    assert all(bool((grad == 0).all()) for grad in inputs.grads())


# ---- refusals


def test_unknown_keep() -> None:
    for keep in ("y", "", True):
        with pytest.raises(ValueError, match=rf"keep is {keep!r}, needs None .* or one of z"):
            call(make_inputs(SMALL, 3), make_buffer(SMALL), keep=keep)
        with pytest.raises(ValueError, match=f"keep is {keep!r}"):
            MegaMoE(4, 2, 6, 5, max_tokens_per_rank=8, keep=keep, dtype=torch.float64)


def test_other_precisions_are_refused_as_ever() -> None:
    with pytest.raises(RuntimeError, match='no kernel for precision "fp8"'):
        keep_z(make_inputs(SMALL, 3), make_buffer(SMALL), precision="fp8")
    with pytest.raises(ValueError, match="unknown precision 'int4'"):
        keep_z(make_inputs(SMALL, 3), make_buffer(SMALL), precision="int4")


def test_a_z_of_something_else() -> None:
    inputs, buffer = make_inputs(SMALL, 7), make_buffer(SMALL)
    dy = torch.ones_like(inputs.x)
    tensors = [t.detach() for t in (dy, inputs.x, inputs.topk_idx, inputs.topk_weights, inputs.gate_up)]
    needed = [True, True, False, False]
    settings = (inputs.down.detach(), None, None, *[None] * 4, buffer.handle, None, needed)
    rows, columns = received(inputs), 2 * SMALL.inter
    assert rows + 1 < buffer.pool_rows
    right = torch.zeros(rows, columns, dtype=torch.float64)
    op.backward_op(*tensors, *settings, right)
    for wrong, message in (
        (right.new_zeros(rows + 1, columns), rf"shape \[{rows + 1}, 10\].* \[{rows}, 10\] or \[16, 10\]"),
        (right.new_zeros(columns, rows).t(), "stride"),
        (right.new_zeros(rows, 2 * columns)[:, :columns], r"strides \(20, 1\).*contiguous"),
        (right.float(), "z is torch.float32"),
        (right[:, :-1], r"z has shape \[\d+, 9\]"),
        (right[0], "needs what the forward of this call kept"),
    ):
        with pytest.raises(ValueError, match=message):
            op.backward_op(*tensors, *settings, wrong)
    with pytest.raises(ValueError, match="z is to have 3 rows, this buffer takes 16"):
        op.forward_keep_z_op(*tensors[1:], settings[0], *[None] * 6, buffer.handle, None, torch.empty(1), 3)


# ---- registration, checkpointing, compile


@CLAMPS
@pytest.mark.parametrize("num_tokens", [0, 5])
def test_opcheck(num_tokens: int, clamp: float | None) -> None:
    """With z of the rows received (an unbacked size) and of as many rows as the buffer takes."""
    inputs, buffer = make_inputs(SMALL, num_tokens, shared=True), make_buffer(SMALL)
    weights = [inputs.gate_up, inputs.down, *inputs.shared]
    tensors = (inputs.x, inputs.topk_idx, inputs.topk_weights, *weights)
    settings = (*[None] * 4, buffer.handle, clamp)
    for rows in (None, buffer.pool_rows):
        arguments = (*tensors, *settings, torch.empty(1), rows)
        torch.library.opcheck(op.forward_keep_z_op, arguments)
        _, z = op.forward_keep_z_op(*arguments)
        assert not z.requires_grad
        detached = [t.detach() for t in (torch.randn_like(inputs.x), *tensors)]
        torch.library.opcheck(op.backward_op, (*detached, *settings, [True, False, True, True], z))


def keep_y_and_z(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operator is op.forward_keep_z_op
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE_Z = {
    "use_reentrant": False,
    "context_fn": partial(create_selective_checkpoint_contexts, keep_y_and_z),
}


@pytest.mark.parametrize(
    ("mode", "keep", "forwards", "kept"),
    [
        ("full", "z", 4, 4),
        ("reentrant", "z", 4, 2),  # its first forward runs without grad mode
        ("selective z", "z", 2, 2),
        ("selective", "z", 4, 4),  # a policy that keeps the other op's y
        ("selective", None, 2, 0),  # y only
    ],
)
def test_checkpointing_two_layers_over_one_buffer(
    monkeypatch: pytest.MonkeyPatch, mode: str, keep: str | None, forwards: int, kept: int
) -> None:
    monkeypatch.setitem(MODES, "selective z", SELECTIVE_Z)
    layers = [make_inputs(SMALL, 7, shared=True, seed=1), make_inputs(SMALL, 7, shared=True, seed=2)]
    reference = [layer.copy() for layer in layers]
    calls = record_calls(monkeypatch)
    model(layers, partial(call, buffer=make_buffer(SMALL), keep=keep), mode).backward()
    assert (len(calls.forward), len(calls.kept)) == (forwards, kept)
    assert len(calls.backward) == 2
    assert len(calls.used) == (0 if keep is None else 2)
    model(reference, expected_forward).backward()
    assert_all_close(layer_grads(layers), layer_grads(reference), 1e-10)


@pytest.mark.parametrize(
    ("backend", "mode"),
    [
        ("aot_eager", None),
        ("aot_eager", "full"),
        ("aot_eager", "selective z"),
        pytest.param("inductor", None, marks=INDUCTOR.marks),
    ],
)
def test_compile_two_layers_over_one_buffer(
    backend: str, mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token counts change, y and z are kept in any case, and z has the rows that the buffer takes."""
    monkeypatch.setitem(MODES, "selective z", SELECTIVE_Z)
    calls = record_calls(monkeypatch)
    buffer = make_buffer(SMALL)
    function = compiled(two_layers, backend)
    for num_tokens in (7, 0, 8) if backend == "aot_eager" else (7, 0):  # inductor takes its time
        layers = [make_inputs(SMALL, num_tokens, shared=True, seed=seed) for seed in (1, 2)]
        reference = [layer.copy() for layer in layers]
        calls.forward.clear()
        calls.used.clear()
        y = function(*layers, partial(keep_z, buffer=buffer), mode)
        y.sum().backward()
        assert len(calls.forward) == len(calls.used) == 2
        assert [z.shape for z in calls.used] == [(buffer.pool_rows, 2 * SMALL.inter)] * 2
        expected_y = two_layers(*reference, expected_forward)
        expected_y.sum().backward()
        assert_close(y.detach(), expected_y.detach(), 1e-10, "y")
        for layer, other in zip(layers, reference, strict=True):
            zeros = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in other.leaves()]
            got = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in layer.leaves()]
            assert_all_close(got, zeros, 1e-10)


# ---- expert parallel, module


@TWO_RANKS
@pytest.mark.parametrize("counts", [(5, 3), (0, 8), (0, 0)])
@pytest.mark.parametrize(("mode", "backend"), [(None, None), ("full", None), (None, "aot_eager")])
def test_two_ranks(world: GlooWorld, counts: tuple[int, ...], mode: str | None, backend: str | None) -> None:
    check(world.run(rank_step, counts, mode, backend, "z"), counts)


def test_module(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = record_calls(monkeypatch)
    options = {"max_tokens_per_rank": 8, "num_shared_experts": 1, "dtype": torch.float64}
    experts = MegaMoE(SMALL.experts, SMALL.topk, SMALL.hidden, SMALL.inter, keep="z", **options)
    assert "keep='z'" in repr(experts)
    plain = MegaMoE(SMALL.experts, SMALL.topk, SMALL.hidden, SMALL.inter, **options)
    assert "keep" not in repr(plain)
    plain.load_state_dict(experts.state_dict())
    inputs = make_inputs(SMALL, 7)
    batches = [replace(inputs, x=inputs.x.detach().clone().requires_grad_()) for _ in range(2)]
    for layer, batch in zip((experts, plain), batches, strict=True):
        layer(batch.x, batch.topk_idx, batch.topk_weights.detach()).sum().backward()
    assert len(calls.kept) == len(calls.used) == 1
    assert torch.equal(batches[0].x.grad, batches[1].x.grad)
    for one, other in zip(experts.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
