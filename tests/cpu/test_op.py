"""The trainable op, one rank: values, gradients, what it skips, what it refuses."""

from __future__ import annotations

import gc
import importlib.util
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
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
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import prime_kernels
from prime_kernels import custom_ops, mega_moe, op, symm

EXACT = 1e-12  # float64 against float64
CLAMP = 0.7  # binds for a good part of the test inputs


# ---- values and gradients


@pytest.mark.parametrize("clamp", [None, CLAMP])
@pytest.mark.parametrize("shared", [False, True])
def test_gradcheck(clamp: float | None, shared: bool) -> None:
    inputs = make_inputs(SMALL, 5, shared=shared)
    buffer = make_buffer(SMALL)

    def function(x: Tensor, topk_weights: Tensor, gate_up: Tensor, down: Tensor, *pair: Tensor) -> Tensor:
        perturbed = Inputs(x, inputs.topk_idx, topk_weights, gate_up, down, pair or None)
        return call(perturbed, buffer, activation_clamp=clamp)

    assert torch.autograd.gradcheck(function, inputs.leaves())


@pytest.mark.parametrize("clamp", [None, CLAMP])
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 8])
def test_float64_equals_autograd(num_tokens: int, clamp: float | None) -> None:
    inputs = make_inputs(SMALL, num_tokens, shared=True)
    dy = torch.randn(num_tokens, SMALL.hidden, dtype=torch.float64)
    y = backward(inputs, make_buffer(SMALL), dy, activation_clamp=clamp)
    expected_y, expected_grads = expected(inputs, dy, clamp)
    assert_close(y, expected_y, EXACT, "y")
    assert_all_close(inputs.grads(), expected_grads, EXACT)


@pytest.mark.parametrize("clamp", [None, CLAMP])
def test_bf16(clamp: float | None) -> None:
    inputs = make_inputs(BF16, 15, torch.bfloat16, shared=True)
    dy = torch.randn(15, BF16.hidden).bfloat16()
    y = backward(inputs, make_buffer(BF16, torch.bfloat16), dy, activation_clamp=clamp)
    assert y.dtype == torch.bfloat16
    assert [grad.dtype for grad in inputs.grads()] == [leaf.dtype for leaf in inputs.leaves()]
    expected_y, expected_grads = expected(inputs, dy, clamp)
    assert_close(y, expected_y, BF16_TOLERANCE, "y")
    assert_all_close(inputs.grads(), expected_grads, BF16_TOLERANCE)


def test_a_clamp_that_binds_changes_every_result() -> None:
    """Guards the clamp tests above: with it and without it the references differ."""
    inputs = make_inputs(SMALL, 8, shared=True)
    dy = torch.ones(8, SMALL.hidden, dtype=torch.float64)
    plain_y, plain = expected(inputs, dy)
    clamped_y, clamped = expected(inputs, dy, CLAMP)
    for free, bound in zip([plain_y, *plain], [clamped_y, *clamped], strict=True):
        assert (free - bound).norm() > 1e-2 * free.norm()


def test_tokens_and_slots_without_expert_get_exact_zeros() -> None:
    inputs = make_inputs(SMALL, 6)
    inputs.topk_idx[2] = -1
    inputs.topk_idx[4, 1] = -1
    inputs.topk_idx[inputs.topk_idx == 3] = 1  # nothing for expert 3
    backward(inputs, make_buffer(SMALL), torch.randn(6, SMALL.hidden, dtype=torch.float64))
    dx, dtopk, dgate_up, ddown = inputs.grads()
    assert dx[2].eq(0).all()
    assert dtopk[2].eq(0).all()
    assert dtopk[4, 1] == 0
    assert dgate_up[3].eq(0).all()
    assert ddown[3].eq(0).all()
    assert dgate_up[1].ne(0).any()


def test_no_tokens_stays_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = record_calls(monkeypatch)
    inputs = make_inputs(SMALL, 0)
    y = call(inputs, make_buffer(SMALL))
    assert y.shape == (0, SMALL.hidden)
    assert y.requires_grad
    y.sum().backward()
    assert len(calls.backward) == 1
    assert inputs.x.grad.shape == (0, SMALL.hidden)
    assert inputs.gate_up.grad.eq(0).all()


def test_expanded_and_strided_dy() -> None:
    reference = make_inputs(SMALL, 7)
    buffer = make_buffer(SMALL)
    for make_dy in (
        lambda y: torch.ones((), dtype=y.dtype).expand(y.shape),
        lambda y: torch.randn(y.shape[1], y.shape[0], dtype=y.dtype).t(),
        lambda y: torch.randn(y.shape[0], 2 * y.shape[1], dtype=y.dtype)[:, ::2],
    ):
        inputs = reference.copy()
        dy = make_dy(inputs.x)
        assert not dy.is_contiguous()
        backward(inputs, buffer, dy)
        assert_all_close(inputs.grads(), expected(inputs, dy)[1], EXACT)


def test_sum_backward() -> None:
    inputs = make_inputs(SMALL, 7)
    call(inputs, make_buffer(SMALL)).sum().backward()
    assert_all_close(inputs.grads(), expected(inputs, torch.ones_like(inputs.x))[1], EXACT)


def test_strided_weights_and_x() -> None:
    """Weights as views into a larger allocation, x as a transposed view; gradients land in the bases."""
    inputs = make_inputs(SMALL, 7)
    experts, rows, hidden = inputs.gate_up.shape
    wide = torch.randn(experts, rows + 3, hidden + 2, dtype=torch.float64)
    wide[:, 1 : rows + 1, :hidden] = inputs.gate_up.detach()
    wide.requires_grad_()
    x_base = inputs.x.detach().t().contiguous().requires_grad_()
    gate_up = wide[:, 1 : rows + 1, :hidden]
    assert not gate_up.is_contiguous()
    view = Inputs(x_base.t(), inputs.topk_idx, inputs.topk_weights, gate_up, inputs.down)
    dy = torch.randn(7, SMALL.hidden, dtype=torch.float64)
    y = backward(view, make_buffer(SMALL), dy)
    expected_y, (dx, _, dgate_up, ddown) = expected(inputs, dy)
    assert_close(y, expected_y, EXACT)
    assert_close(x_base.grad.t(), dx, EXACT)
    assert_close(wide.grad[:, 1 : rows + 1, :hidden], dgate_up, EXACT)
    assert_close(inputs.down.grad, ddown, EXACT)
    assert wide.grad[:, 0].eq(0).all()


# ---- what is not asked for is not computed


@pytest.mark.parametrize(
    ("frozen", "skipped"), [("gate_up", [0]), ("down", [1]), ("both", [0, 1]), ("shared", [2, 3])]
)
def test_frozen_weights_skip_work(monkeypatch: pytest.MonkeyPatch, frozen: str, skipped: list[int]) -> None:
    calls = record_calls(monkeypatch)
    inputs = make_inputs(SMALL, 7, shared=True)
    weights = [inputs.gate_up, inputs.down, *inputs.shared]
    for index in skipped:
        weights[index].requires_grad_(False)
    dy = torch.randn(7, SMALL.hidden, dtype=torch.float64)
    backward(inputs, make_buffer(SMALL), dy)
    assert [index for index, out in enumerate(calls.backward[0]) if out is None] == skipped
    for grad, reference, leaf in zip(inputs.grads(), expected(inputs, dy)[1], inputs.leaves(), strict=True):
        if leaf.requires_grad:
            assert_close(grad, reference, EXACT)
        else:
            assert grad is None


@pytest.mark.parametrize("without", ["x", "topk_weights", "both"])
def test_inputs_without_gradient(without: str) -> None:
    inputs = make_inputs(SMALL, 7)
    if without in ("x", "both"):
        inputs.x.requires_grad_(False)
    if without in ("topk_weights", "both"):
        inputs.topk_weights.requires_grad_(False)
    dy = torch.randn(7, SMALL.hidden, dtype=torch.float64)
    backward(inputs, make_buffer(SMALL), dy)
    assert (inputs.x.grad is None) == (without in ("x", "both"))
    assert (inputs.topk_weights.grad is None) == (without in ("topk_weights", "both"))
    assert_all_close(inputs.grads()[2:], expected(inputs, dy)[1][2:], EXACT)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_autograd(mode: Any) -> None:
    inputs = make_inputs(SMALL, 7)
    buffer = make_buffer(SMALL)
    reference = call(inputs, buffer).detach()
    with mode():
        y = call(inputs, buffer)
    assert not y.requires_grad
    assert y.is_inference() == (mode is torch.inference_mode)
    assert torch.equal(y, reference)
    # And the buffer still serves training afterwards.
    dy = torch.ones_like(inputs.x)
    backward(inputs, buffer, dy)
    assert_all_close(inputs.grads(), expected(inputs, dy)[1], EXACT)


def test_no_second_derivative() -> None:
    inputs = make_inputs(SMALL, 3)
    y = call(inputs, make_buffer(SMALL))
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(y.sum(), inputs.x, create_graph=True)


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp", "functionalize"])
def test_transforms_of_torch_func_are_refused(transform: str) -> None:
    buffer = make_buffer(SMALL)
    inputs = make_inputs(SMALL, 3)
    x = inputs.x.detach()

    def f(x: Tensor) -> Tensor:
        return call(replace(inputs, x=x), buffer).sum()

    arguments = {"jvp": ((x,), (x,)), "vmap": (x[None],)}.get(transform, (x,))
    apply = partial(torch.func.jvp, f) if transform == "jvp" else getattr(torch.func, transform)(f)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"no rules for the transforms of torch\.func"):
        apply(*arguments)


@pytest.mark.parametrize("mode", ["fake", "grad", "inference"])
def test_a_buffer_built_inside_a_mode_serves_outside(mode: str) -> None:
    built = []

    def build(x: Tensor) -> Tensor:
        built.append(make_buffer(SMALL))
        return x.sum()

    x = torch.ones(3)
    if mode == "fake":
        with FakeTensorMode(allow_non_fake_inputs=True):
            build(x)
    elif mode == "grad":
        torch.func.grad(build)(x)
    else:
        with torch.inference_mode():
            build(x)
    inputs = make_inputs(SMALL, 7)
    assert torch.equal(call(inputs, built[0]), call(inputs, make_buffer(SMALL)))


# ---- one buffer, many calls


def test_two_layers_over_one_buffer_f1_f2_b2_b1() -> None:
    """The second forward, and NaN in the whole buffer, lie between the first forward and its backward."""
    buffer = make_buffer(SMALL)
    first, second = make_inputs(SMALL, 7, seed=1), make_inputs(SMALL, 4, seed=2)
    dy1, dy2 = torch.randn_like(first.x), torch.randn_like(second.x)
    y1, y2 = call(first, buffer), call(second, buffer)
    for inputs, y, dy in ((second, y2, dy2), (first, y1, dy1)):
        buffer.x.fill_(float("nan"))
        buffer.topk_weights.fill_(float("nan"))
        buffer.topk_idx.fill_(-1)
        y.backward(dy)
        expected_y, expected_grads = expected(inputs, dy)
        assert_close(y.detach(), expected_y, EXACT)
        assert_all_close(inputs.grads(), expected_grads, EXACT)


def test_stacked_layers_over_one_buffer() -> None:
    """Three layers in one graph, with equal weights: three uses of each tensor in one backward."""
    buffer = make_buffer(SMALL)
    inputs = make_inputs(SMALL, 7)

    def stacked(function: Any, inputs: Inputs) -> Tensor:
        hidden = inputs.x
        for _ in range(3):
            hidden = hidden + function(
                Inputs(hidden, inputs.topk_idx, inputs.topk_weights, inputs.gate_up, inputs.down)
            )
        return hidden.sin().sum()

    stacked(lambda layer: call(layer, buffer), inputs).backward()
    reference = inputs.copy()
    stacked(expected_forward, reference).backward()
    assert_all_close(inputs.grads(), reference.grads(), 1e-10)


def test_the_graph_keeps_the_buffer_alive() -> None:
    inputs = make_inputs(SMALL, 7)
    y = call(inputs, make_buffer(SMALL))
    gc.collect()
    y.sum().backward()
    assert_all_close(inputs.grads(), expected(inputs, torch.ones_like(y))[1], EXACT)


def test_destroyed_buffer() -> None:
    inputs = make_inputs(SMALL, 7)
    buffer = make_buffer(SMALL)
    y = call(inputs, buffer)
    buffer.destroy()
    with pytest.raises(RuntimeError, match=f"handle {buffer.handle}"):
        y.sum().backward()
    with pytest.raises(RuntimeError, match=f"handle {buffer.handle}"):
        call(inputs, buffer)


def test_hundreds_of_steps_do_not_leak() -> None:
    inputs = make_inputs(SMALL, 7, shared=True)
    buffer = make_buffer(SMALL)

    def step() -> None:
        backward(inputs, buffer, torch.ones_like(inputs.x))
        for leaf in inputs.leaves():
            leaf.grad = None

    def live_tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    step()
    before = live_tensors(), len(symm._buffers)
    for _ in range(300):
        step()
    assert (live_tensors(), len(symm._buffers)) == before


# ---- refusals


@pytest.mark.parametrize("precision", ["fp8", "fp8_bwd", "mxfp8"])
def test_precision_without_a_kernel(precision: str) -> None:
    with pytest.raises(RuntimeError, match=f'no kernel for precision "{precision}"'):
        call(make_inputs(SMALL, 3), make_buffer(SMALL), precision=precision)


def test_unknown_precision() -> None:
    with pytest.raises(ValueError, match=r"'int4'.*bf16, fp8, fp8_bwd, mxfp8"):
        call(make_inputs(SMALL, 3), make_buffer(SMALL), precision="int4")


def test_more_tokens_than_the_buffer_holds() -> None:
    with pytest.raises(RuntimeError, match=r"sized for 8 tokens/rank, got 9.*num_max_tokens_per_rank >= 9"):
        call(make_inputs(SMALL, 9), make_buffer(SMALL))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("x", lambda t: t.float(), r"x is torch.float32, .*'bf16xbf16' needs torch.bfloat16"),
        ("x", lambda t: t.half(), r"x is torch.float16, .* needs torch.bfloat16"),
        ("x", lambda t: t[:, :-1], r"x has shape \[7, 63\], .*\[7, 64\]"),
        ("x", lambda t: t[0], r"x has shape \[64\]"),
        ("x", lambda t: t[None], r"x has shape \[1, 7, 64\]"),
        ("topk_idx", lambda t: t.int(), r"topk_idx is torch.int32, .* needs torch.int64"),
        ("topk_idx", lambda t: t[:5], r"topk_idx has shape \[5, 2\], .*\[7, 2\]"),
        ("topk_weights", lambda t: t.bfloat16(), r"topk_weights is torch.bfloat16, .* needs torch.float32"),
        ("topk_weights", lambda t: t[:, :1], r"topk_weights has shape \[7, 1\]"),
        ("gate_up", lambda t: t.float(), r"torch.float32.*torch.bfloat16"),
        ("gate_up", lambda t: t[:3], r"\[3, 256, 64\].*\[4, 256, 64\]"),
        ("gate_up", lambda t: t.mT.contiguous().mT, "stride"),
        ("down", lambda t: t[..., :-128], r"\[4, 64, 0\].*\[4, 64, 128\]"),
    ],
)
def test_wrong_tensors(name: str, change: Any, message: str) -> None:
    inputs = make_inputs(BF16, 7, torch.bfloat16)
    setattr(inputs, name, change(getattr(inputs, name)))
    with pytest.raises(ValueError, match=message):
        call(inputs, make_buffer(BF16, torch.bfloat16))


def test_another_device() -> None:
    """Straight into the staging: a whole call with meta tensors would run the op's fake."""
    inputs = make_inputs(SMALL, 7)
    with pytest.raises(ValueError, match="topk_idx is on meta, the buffer on cpu"):
        custom_ops._stage(make_buffer(SMALL), inputs.x, inputs.topk_idx.to("meta"), inputs.topk_weights)


@pytest.mark.parametrize("name", ["x", "topk_idx", "topk_weights", "gate_up", "down"])
def test_one_tensor_without_values_or_of_another_type(name: str) -> None:
    """One tensor on the meta device would turn the whole call into one about shapes: y without values."""
    inputs, buffer = make_inputs(BF16, 3, torch.bfloat16), make_buffer(BF16, torch.bfloat16)
    arguments = {key: getattr(inputs, key) for key in ("x", "topk_idx", "topk_weights", "gate_up", "down")}
    with pytest.raises(ValueError, match=r" is on .*, the other tensors on .*; move it there"):
        mega_moe(**{**arguments, name: arguments[name].to("meta")}, buffer=buffer)
    with pytest.raises(ValueError, match=f"{name} is a NoneType, needs a tensor"):
        mega_moe(**{**arguments, name: None}, buffer=buffer)


def test_all_tensors_on_meta_are_a_question_of_shapes() -> None:
    inputs = make_inputs(BF16, 3, torch.bfloat16).map(lambda leaf: leaf.to("meta"))
    y = mega_moe(
        inputs.x, inputs.topk_idx.to("meta"), inputs.topk_weights, inputs.gate_up, inputs.down,
        buffer=make_buffer(BF16, torch.bfloat16),
    )  # fmt: skip
    assert y.is_meta
    assert y.shape == inputs.x.shape
    y.sum().backward()
    assert inputs.gate_up.grad is not None
    assert inputs.gate_up.grad.shape == inputs.gate_up.shape


def test_wrong_shared_buffer_and_main_grad() -> None:
    inputs, buffer = make_inputs(BF16, 3, torch.bfloat16), make_buffer(BF16, torch.bfloat16)
    arguments = {key: getattr(inputs, key) for key in ("x", "topk_idx", "topk_weights", "gate_up", "down")}
    gate_up, down = inputs.gate_up[0], inputs.down[0]
    for shared in ((gate_up,), (gate_up, down, down), gate_up):
        with pytest.raises(ValueError, match=r"needs the pair \(shared_gate_up, shared_down\), or None"):
            mega_moe(**arguments, buffer=buffer, shared=shared)
    with pytest.raises(ValueError, match="shared_down is on meta, the other tensors on cpu"):
        mega_moe(**arguments, buffer=buffer, shared=(gate_up, down.to("meta")))
    for other in (None, buffer.handle):
        with pytest.raises(ValueError, match=r"needs a buffer of mma_type bf16xbf16 .*, got None"):
            mega_moe(**arguments, buffer=other)
    inputs.gate_up.main_grad = "main"
    with pytest.raises(ValueError, match=r"gate_up\.main_grad is a str, needs a torch\.float32 tensor"):
        mega_moe(**arguments, buffer=buffer)


def test_x_inside_the_buffer() -> None:
    inputs = make_inputs(SMALL, 7)
    buffer = make_buffer(SMALL)
    buffer.x[:7].copy_(inputs.x.detach())
    inputs.x = buffer.x[:7]
    with pytest.raises(ValueError, match="x lies in the buffer"):
        call(inputs, buffer)


# ---- autocast: what it casts is defined


@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast(backward_inside: bool) -> None:
    """fp32 x and weights run as bf16 and get fp32 gradients, like a matmul's; topk_weights become fp32."""
    inputs = make_inputs(BF16, 7, torch.float32, shared=True)
    inputs.topk_weights = inputs.topk_weights.detach().bfloat16().requires_grad_()
    rounded = inputs.map(lambda leaf: leaf.bfloat16())
    rounded.topk_weights = inputs.topk_weights.detach().float().requires_grad_()
    buffer = make_buffer(BF16, torch.bfloat16)
    dy = torch.randn(7, BF16.hidden).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y = call(inputs, buffer)
        if backward_inside:
            y.backward(dy)
    if not backward_inside:
        y.backward(dy)
    assert torch.equal(y, backward(rounded, buffer, dy))
    for grad, leaf, same in zip(inputs.grads(), inputs.leaves(), rounded.grads(), strict=True):
        assert grad.dtype == leaf.dtype
        assert torch.equal(grad, same.to(leaf.dtype))


def test_autocast_leaves_float64_alone() -> None:
    inputs = make_inputs(SMALL, 7)
    with torch.autocast("cpu", torch.bfloat16):
        y = call(inputs, make_buffer(SMALL))
    assert_close(y.detach(), expected(inputs, torch.ones_like(y))[0], EXACT)


def test_autocast_does_not_reach_into_the_backend() -> None:
    """An fp32 buffer's matmuls stay fp32 when the backward happens to run inside an autocast region."""
    inputs = make_inputs(SMALL, 7, torch.float32)
    y = call(inputs, make_buffer(SMALL, torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        y.sum().backward()
    assert_all_close(inputs.grads(), expected(inputs, torch.ones_like(inputs.x))[1], 1e-5)


# ---- registration


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 5])
def test_opcheck(shared: bool, main_grad: bool, num_tokens: int) -> None:
    inputs = make_inputs(SMALL, num_tokens, shared=shared)
    buffer = make_buffer(SMALL)
    weights = [inputs.gate_up, inputs.down, *(inputs.shared or (None, None))]
    mains = [torch.zeros_like(w) if main_grad and w is not None else None for w in weights]
    tensors = (inputs.x, inputs.topk_idx, inputs.topk_weights, *weights)
    torch.library.opcheck(op.forward_op, (*tensors, *mains, buffer.handle, CLAMP, torch.empty(1)))
    detached = [t if t is None else t.detach() for t in (torch.randn_like(inputs.x), *tensors)]
    for weight_grads in ([True] * 4, [False, True, True, False]):
        needed = [wanted and w is not None for wanted, w in zip(weight_grads, weights, strict=True)]
        torch.library.opcheck(op.backward_op, (*detached, *mains, buffer.handle, None, needed))


def test_a_second_copy_of_the_package_has_its_own_ops() -> None:
    """Under another top-level name everything works beside the first: ops, buffers, gradients."""
    name = "another_kernels"
    root = Path(prime_kernels.__file__).parent
    spec = importlib.util.spec_from_file_location(
        name, root / "__init__.py", submodule_search_locations=[str(root)]
    )
    other = importlib.util.module_from_spec(spec)
    sys.modules[name] = other
    finders = list(sys.meta_path)
    try:
        spec.loader.exec_module(other)
        assert other.mega_moe is not mega_moe
        assert importlib.import_module(f"{name}.op").forward_op is torch.ops.another_kernels.mega_moe.default
        buffer = other.get_symm_buffer_for_mega_moe(
            None, SMALL.experts, SMALL.tokens, SMALL.topk, SMALL.hidden, SMALL.inter, mma_type="f64xf64"
        )
        inputs = make_inputs(SMALL, 7)
        y = other.mega_moe(
            inputs.x, inputs.topk_idx, inputs.topk_weights, inputs.gate_up, inputs.down, buffer=buffer
        )
        y.sum().backward()
        assert_all_close(inputs.grads(), expected(inputs, torch.ones_like(y))[1], EXACT)
        backward(inputs, make_buffer(SMALL), torch.ones_like(y))
        # Its handle may be that of another buffer here, which the call would use without a word.
        with pytest.raises(ValueError, match=r"buffer is a another_kernels\.symm\.SymmBuffer, needs"):
            call(inputs, buffer)
    finally:
        sys.meta_path[:] = finders
        for module in [module for module in sys.modules if module.partition(".")[0] == name]:
            del sys.modules[module]
