"""`MegaMoE` on one rank."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from op_helpers import (
    BF16,
    BF16_TOLERANCE,
    SMALL,
    Inputs,
    Shape,
    assert_all_close,
    assert_close,
    expected,
    make_buffer,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from prime_kernels import MegaMoE, SymmBuffer, shared_buffers
from prime_kernels.module import release_buffers

pytestmark = pytest.mark.usefixtures("no_shared_buffers")

EXACT = 1e-12


def make_module(shape: Shape = SMALL, dtype: torch.dtype = torch.float64, **kwargs: Any) -> MegaMoE:
    torch.manual_seed(0)
    if "buffer" not in kwargs:
        kwargs.setdefault("max_tokens_per_rank", shape.tokens)
    return MegaMoE(shape.experts, shape.topk, shape.hidden, shape.inter, dtype=dtype, **kwargs)


def make_batch(
    *leading: int, shape: Shape = SMALL, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*leading, shape.hidden, generator=generator, dtype=torch.float64).to(dtype)
    topk_idx = torch.randint(-1, shape.experts, (*leading, shape.topk), generator=generator)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    topk_weights = torch.rand(*leading, shape.topk, generator=generator, dtype=wide)
    return x.requires_grad_(), topk_idx, topk_weights.requires_grad_()


def as_inputs(experts: MegaMoE, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Inputs:
    """What the module computes, as inputs of the independent reference."""
    shared = None if experts.shared_down is None else (experts.shared_gate_up, experts.shared_down)
    return Inputs(
        x.flatten(0, -2),
        topk_idx.flatten(0, -2),
        topk_weights.flatten(0, -2),
        experts.gate_up,
        experts.down,
        shared,
    )


# ---- computing


@pytest.mark.parametrize("leading", [(7,), (2, 3), (2, 2, 2), (1,), (0,), (2, 0)])
@pytest.mark.parametrize("shared_experts", [0, 2])
def test_forward_and_backward(leading: tuple[int, ...], shared_experts: int) -> None:
    experts = make_module(num_shared_experts=shared_experts, activation_clamp=0.1)
    batch = make_batch(*leading)
    y = experts(*batch)
    assert y.shape == batch[0].shape
    dy = torch.randn_like(y)
    y.backward(dy)
    expected_y, expected_grads = expected(as_inputs(experts, *batch), dy.flatten(0, -2), clamp=0.1)
    assert_close(y.detach().flatten(0, -2), expected_y, EXACT)
    grads = [
        batch[0].grad.flatten(0, -2),
        batch[2].grad.flatten(0, -2),
        *(p.grad for p in experts.parameters()),
    ]
    assert_all_close(grads, expected_grads, EXACT)


def test_bf16_is_the_default() -> None:
    experts = MegaMoE(BF16.experts, BF16.topk, BF16.hidden, BF16.inter, max_tokens_per_rank=8)
    assert {parameter.dtype for parameter in experts.parameters()} == {torch.bfloat16}
    batch = make_batch(7, shape=BF16, dtype=torch.bfloat16)
    y = experts(*batch)
    y.sum().backward()
    expected_y, expected_grads = expected(as_inputs(experts, *batch), torch.ones_like(y))
    assert_close(y.detach(), expected_y, BF16_TOLERANCE)
    assert_all_close([p.grad for p in experts.parameters()], expected_grads[2:], BF16_TOLERANCE)


def test_autocast_with_fp32_parameters() -> None:
    """The buffer follows the dtype the layer computes in; gradients come back in fp32."""
    experts = make_module(BF16, torch.float32)
    x, topk_idx, topk_weights = make_batch(7, shape=BF16, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = experts(x, topk_idx, topk_weights)
        assert experts.buffer.mma_type == "bf16xbf16"
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert experts.gate_up.grad.dtype == x.grad.dtype == torch.float32
    assert experts.buffer is None  # outside of autocast it is another one: fp32
    assert experts(x, topk_idx, topk_weights).dtype == torch.float32
    assert experts.buffer.mma_type == "f32xf32"


def test_a_step_lowers_the_loss() -> None:
    experts = make_module()
    x, topk_idx, topk_weights = make_batch(8)
    target = torch.randn_like(x)
    optimizer = torch.optim.SGD(experts.parameters(), lr=0.5)
    losses = []
    for _ in range(20):
        loss = (experts(x.detach(), topk_idx, topk_weights.detach()) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_buffer_built_without_autograd_serves_training(mode: Any) -> None:
    experts = make_module()
    batch = make_batch(7)
    with mode():
        y = experts(*batch)
    trained = experts(*batch)
    trained.sum().backward()
    assert torch.equal(y, trained)
    assert_all_close(
        [p.grad for p in experts.parameters()],
        expected(as_inputs(experts, *batch), torch.ones_like(trained))[1][2:],
        EXACT,
    )


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_two_checkpointed_layers_share_a_buffer(use_reentrant: bool) -> None:
    layers = [make_module(), make_module(num_shared_experts=0)]
    plain = copy.deepcopy(layers)
    x, topk_idx, topk_weights = make_batch(7)
    for stack, keep in ((layers, False), (plain, True)):
        hidden = x
        for layer in stack:
            if keep:
                hidden = hidden + layer(hidden.tanh(), topk_idx, topk_weights)
            else:
                hidden = hidden + checkpoint(
                    lambda h, layer=layer: layer(h.tanh(), topk_idx, topk_weights), hidden,
                    use_reentrant=use_reentrant,
                )  # fmt: skip
        hidden.square().sum().backward()
    assert layers[0].buffer is layers[1].buffer
    for layer, reference in zip(layers, plain, strict=True):
        assert torch.equal(layer.gate_up.grad, reference.gate_up.grad)
        assert torch.equal(layer.down.grad, reference.down.grad)


# ---- compile


def test_compile_needs_the_buffer_first() -> None:
    torch._dynamo.reset()
    experts = make_module(num_shared_experts=1)
    batch = make_batch(2, 3)
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"call build_buffer\(\) before torch.compile"):
        compiled(*batch)
    torch._dynamo.reset()
    assert experts.build_buffer() is experts.buffer
    y = compiled(*batch)
    y.sum().backward()
    expected_y, expected_grads = expected(as_inputs(experts, *batch), torch.ones(6, SMALL.hidden))
    assert_close(y.detach().flatten(0, -2), expected_y, EXACT)
    assert_all_close([p.grad for p in experts.parameters()], expected_grads[2:], EXACT)


def test_buffer_for_another_dtype_than_the_parameters() -> None:
    """Where mixed precision casts the parameters, only their user knows what the forward computes in."""
    experts = make_module(Shape(), torch.float32)
    assert experts.build_buffer(torch.bfloat16).mma_type == "bf16xbf16"
    assert experts.build_buffer(torch.bfloat16) is experts.build_buffer(torch.bfloat16)
    assert experts.build_buffer().mma_type == "f32xf32"
    with pytest.raises(ValueError, match=r"MegaMoE computes in torch\.float16 here and has no buffer for it"):
        experts.build_buffer(torch.float16)


def test_output_is_no_view() -> None:
    """FSDP's hook is on the output, and an operation in place on a view would drop it."""
    for leading in ((3,), (2, 3)):
        y = make_module()(*make_batch(*leading))
        assert not y._is_view()
        y += 1
        y.sum().backward()


# ---- parameters


def test_parameters_and_state_dict() -> None:
    experts = make_module(num_shared_experts=2)
    sizes = {name: tuple(tensor.shape) for name, tensor in experts.state_dict().items()}
    assert sizes == {
        "gate_up": (4, 10, 6), "down": (4, 6, 5), "shared_gate_up": (20, 6), "shared_down": (6, 10)
    }  # fmt: skip
    assert set(make_module().state_dict()) == {"gate_up", "down"}
    other = make_module(num_shared_experts=2)
    other.reset_parameters()
    other.load_state_dict(experts.state_dict())
    batch = make_batch(7)
    assert torch.equal(experts(*batch), other(*batch))


def test_reset_parameters_draws_by_fan_in() -> None:
    experts = MegaMoE(8, 2, 64, 32, max_tokens_per_rank=8, num_shared_experts=1, dtype=torch.float32)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.fill_(7)
    torch.manual_seed(3)
    experts.reset_parameters()
    for parameter in experts.parameters():
        bound = 1 / math.sqrt(parameter.shape[-1])
        assert parameter.abs().max() <= bound
        assert parameter.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert experts.gate_up[0].ne(experts.gate_up[1]).any()


def test_meta_device() -> None:
    """Built without memory, then materialised, as large models are."""
    experts = make_module(device="meta")
    assert experts.gate_up.is_meta
    experts.to_empty(device="cpu").reset_parameters()
    assert torch.isfinite(experts(*make_batch(7))).all()


def test_extra_repr() -> None:
    text = repr(make_module(num_shared_experts=1, activation_clamp=7.0))
    assert text == (
        "MegaMoE(num_experts=4 (4 local), top_k=2, hidden=6, intermediate=5, max_tokens_per_rank=8, "
        "precision=bf16, num_shared_experts=1, activation_clamp=7.0)"
    )


# ---- the buffer


def test_equal_layers_share_one_buffer() -> None:
    first, second, wider = make_module(), make_module(), make_module(Shape(hidden=8, inter=5, tokens=8))
    batch = make_batch(7)
    assert first.buffer is None
    first(*batch)
    second(*batch)
    assert first.buffer is second.buffer
    assert wider.build_buffer() is not first.buffer
    release_buffers()
    assert first.buffer is second.buffer  # layers keep theirs
    third = make_module()
    assert third.build_buffer() is not first.buffer


def test_a_given_buffer() -> None:
    buffer = make_buffer(SMALL)
    experts = make_module(buffer=buffer)
    batch = make_batch(7)
    assert experts.max_tokens_per_rank == SMALL.tokens
    experts(*batch)
    assert experts.buffer is buffer
    assert not shared_buffers._shared_buffers
    buffer.destroy()
    with pytest.raises(RuntimeError, match=r"destroyed; set module.buffer"):
        experts(*batch)
    experts.buffer = make_buffer(SMALL)
    experts(*batch)


def test_a_view_of_a_larger_buffer() -> None:
    base = make_buffer(Shape(hidden=64, inter=64, tokens=64))
    view = SymmBuffer(
        None,
        SMALL.experts,
        SMALL.tokens,
        SMALL.topk,
        SMALL.hidden,
        SMALL.inter,
        mma_type="f64xf64",
        base=base,
    )
    experts, plain = make_module(buffer=view), make_module()
    batch = make_batch(7)
    assert torch.equal(experts(*batch), plain(*batch))


def test_a_destroyed_shared_buffer_is_built_again() -> None:
    experts = make_module()
    batch = make_batch(7)
    y = experts(*batch)
    old = experts.buffer
    old.destroy()
    assert experts.buffer is None
    assert torch.equal(experts(*batch), y)
    assert experts.buffer is not old


def test_deepcopy_shares_the_buffer_and_not_the_weights() -> None:
    experts = make_module(num_shared_experts=1)
    batch = make_batch(7)
    y = experts(*batch)
    twin = copy.deepcopy(nn.Sequential(experts))[0]
    assert twin.buffer is experts.buffer
    assert twin.gate_up is not experts.gate_up
    assert torch.equal(twin(*batch), y)
    given = make_module(buffer=make_buffer(SMALL))
    assert copy.deepcopy(given).buffer is given.buffer


@pytest.mark.parametrize("given", [False, True])
def test_pickle_holds_no_buffer(given: bool) -> None:
    experts = make_module(buffer=make_buffer(SMALL)) if given else make_module()
    batch = make_batch(7)
    y = experts(*batch)
    size = len(pickle.dumps(experts))
    big = make_module(Shape(hidden=6, inter=5, tokens=100_000))
    big.build_buffer()
    assert len(pickle.dumps(big)) < size + 1000
    loaded = pickle.loads(pickle.dumps(experts))
    assert loaded.buffer is None
    assert torch.equal(loaded(*batch), y)
    file = io.BytesIO()
    torch.save(experts, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(*batch), y)


def test_moving_to_another_dtype_takes_another_buffer() -> None:
    experts = make_module(BF16, torch.float64)
    experts(*make_batch(7, shape=BF16))
    first = experts.buffer
    experts.bfloat16()
    y = experts(*make_batch(7, shape=BF16, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16
    assert experts.buffer is not first


# ---- refusals


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda b: (b[0][..., :-1], b[1], b[2]),
            ValueError,
            r"x has shape \[2, 3, 5\].*hidden = 6",
        ),
        (lambda b: (b[0][0, 0, 0], b[1], b[2]), ValueError, r"x has shape \[\].*hidden = 6"),
        (lambda b: (b[0], b[1][:1], b[2]), ValueError, r"topk_idx has shape \[1, 3, 2\].*\[2, 3, 2\]"),
        (
            lambda b: (b[0], b[1], b[2][..., :1]),
            ValueError,
            r"topk_weights has shape \[2, 3, 1\].*\[2, 3, 2\]",
        ),
        (lambda b: (b[0], b[1].int(), b[2]), ValueError, r"topk_idx is torch.int32"),
        (lambda b: (b[0].float(), b[1], b[2]), ValueError, r"x is torch.float32"),
        (lambda b: make_batch(3, 3), RuntimeError, "sized for 8 tokens/rank, got 9.* max_tokens_per_rank"),
    ],
)
def test_wrong_inputs(change: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_module()(*change(make_batch(2, 3)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 0}, "num_experts is 0, needs an integer of at least 1"),
        ({"top_k": 1.5}, "top_k is 1.5, needs an integer of at least 1"),
        ({"top_k": 5}, "top_k is 5, at most 4 is possible"),
        ({"hidden": -64}, "hidden is -64, needs an integer of at least 1"),
        ({"intermediate": "128"}, "intermediate is '128', needs an integer"),
        ({"max_tokens_per_rank": 0}, "max_tokens_per_rank is 0, needs an integer"),
        ({"num_shared_experts": -1}, "num_shared_experts is -1, needs an integer of at least 0"),
        ({"activation_clamp": -1}, "activation_clamp is -1, needs a value above 0"),
        ({"precision": "fp7"}, "unknown precision 'fp7'; use one of bf16"),
        ({"dtype": torch.int32}, "dtype is torch.int32, needs a floating-point type"),
        ({"group": "all"}, "group is 'all', needs a torch.distributed process group"),
        ({"buffer": "mine"}, "buffer is a str, needs a SymmBuffer"),
    ],
)
def test_arguments_outside_their_limits(change: dict[str, Any], message: str) -> None:
    arguments = {"num_experts": 4, "top_k": 2, "hidden": 64, "intermediate": 128, "max_tokens_per_rank": 8}
    with pytest.raises(ValueError, match=message):
        MegaMoE(**{**arguments, **change})


def test_parameters_without_values_are_named() -> None:
    with pytest.raises(RuntimeError, match=r"on the meta device and hold no values; .* to_empty\(device="):
        make_module(device="meta")(*make_batch(3))


def test_wrong_arguments() -> None:
    buffer = make_buffer(SMALL)
    with pytest.raises(ValueError, match="max_tokens_per_rank and buffer are both None"):
        MegaMoE(4, 2, 6, 5)
    with pytest.raises(ValueError, match="max_tokens_per_rank is 9 and the buffer's is 8"):
        make_module(buffer=buffer, max_tokens_per_rank=9)
    with pytest.raises(ValueError, match="buffer's hidden is 6, this MegaMoE needs 7"):
        MegaMoE(4, 2, 7, 5, buffer=buffer)
    with pytest.raises(ValueError, match="buffer's num_topk is 2, this MegaMoE needs 3"):
        make_module(Shape(topk=3, hidden=6, inter=5)).buffer = buffer
    with pytest.raises(RuntimeError, match='no kernel for precision "fp8"'):
        make_module(precision="fp8")(*make_batch(3))
    with pytest.raises(ValueError, match=r"computes in torch.float16.*torch.bfloat16"):
        make_module(dtype=torch.float16)(*make_batch(3))
    with pytest.raises(ValueError, match="hidden"):
        make_module(dtype=torch.bfloat16)(*make_batch(3, dtype=torch.bfloat16))  # H = 6, bf16 needs 64
