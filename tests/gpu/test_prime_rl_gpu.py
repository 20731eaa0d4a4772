"""The prime-rl dispatcher over the SM90 kernels, on one rank, against the layer in float64.

Where pydantic is missing the dispatcher gets an object with the fields of its config.
"""

from __future__ import annotations

import copy
import importlib.util
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from prime_rl_cases import Experts, FusedExperts, Layer, make_config
from sm90_cases import BF16, DEVICE, SHAPES, Case, check, make_case
from torch import Tensor, nn

from prime_kernels import runtime
from prime_kernels.integrations.grouped_experts import allocate_main_grads
from prime_kernels.integrations.prime_rl_dispatcher import MegaMoEDispatcher

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("sm90_kernels", "settings_undone", "no_shared_buffers"),
]

TOKENS, EXPERTS, TOPK = 200, 8, 4
HIDDEN, INTER = SHAPES[0]
KINDS = (Experts, FusedExperts)


@dataclass(frozen=True)
class Settings:
    """The fields of the config that the dispatcher reads, with its defaults."""

    precision: str = "bf16"
    max_tokens_per_rank: int | None = None
    num_sms: int | None = None
    num_reserved_sms: int = 16
    capacity_factor: float = 1.25


def make_layer(case: Case, kind: type[nn.Module] = Experts, config: Any = None, **settings: Any) -> Layer:
    """The layer with the weights of ``case``."""
    count, hidden, inter = case.down.shape
    experts = kind(experts=count, hidden=hidden, inter=inter, dtype=BF16).to(DEVICE)
    values = {
        "w1": case.gate_up[:, :inter], "w2": case.down, "w3": case.gate_up[:, inter:],
        "gate_up": case.gate_up, "down": case.down,
    }  # fmt: skip
    with torch.no_grad():
        for name, weight in experts.named_parameters():
            weight.copy_(values[name])
    dispatcher = MegaMoEDispatcher(
        config or Settings(), num_experts=count, top_k=case.topk_idx.shape[1], sequence_length=TOKENS,
        **settings,
    )  # fmt: skip
    return Layer(experts, dispatcher)


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    return (
        case.x.clone().requires_grad_(), case.topk_weights.clone().requires_grad_(), case.topk_idx.clone()
    )  # fmt: skip


def weight_grads(case: Case) -> dict[str, Tensor]:
    """float64, by the names of both layouts."""
    inter, grads = case.down.shape[2], case.grads
    return {
        "w1": grads.dgate_up[:, :inter], "w2": grads.ddown, "w3": grads.dgate_up[:, inter:],
        "gate_up": grads.dgate_up, "down": grads.ddown,
    }  # fmt: skip


def run_and_judge(case: Case, layer: nn.Module, experts: nn.Module) -> None:
    x, scores, indices = inputs(case)
    y = layer(x, scores, indices)
    y.backward(case.dy)
    check("y", y.detach(), case.y)
    check("gradient of x", x.grad, case.grads.dx)
    check("gradient of scores", scores.grad, case.grads.dtopk)
    for name, weight in experts.named_parameters():
        assert weight.grad.dtype == BF16
        check(f"gradient of {name}", weight.grad, weight_grads(case)[name], matrices=True)


@pytest.mark.parametrize("keep", [None, "z"])
@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_backward(kind: type[nn.Module], keep: str | None) -> None:
    case = make_case(TOKENS, EXPERTS, TOPK, HIDDEN, INTER, "masked")
    layer = make_layer(case, kind, keep=keep)
    run_and_judge(case, layer, layer.experts)
    layer.dispatcher.build_buffer(layer.experts).check()


def test_batches_with_int32_indices_and_bf16_scores() -> None:
    case = make_case(TOKENS, EXPERTS, TOPK, *SHAPES[1], clamp=0.7)
    case = replace(case, topk_weights=case.topk_weights.to(BF16))
    layer = make_layer(case, activation_clamp=case.clamp)
    x, scores, indices = (tensor.detach().unflatten(0, (4, -1)) for tensor in inputs(case))
    scores.requires_grad_()
    y = layer(x, scores, indices.int())
    assert y.shape == x.shape
    y.backward(case.dy.view_as(y))
    check("y", y.detach().flatten(0, 1), case.y)
    assert scores.grad.dtype == BF16
    check("gradient of scores", scores.grad.flatten(0, 1), case.grads.dtopk)


def test_layers_of_one_dispatcher() -> None:
    """F1 F2 B2 B1 over one buffer."""
    cases = [make_case(tokens, EXPERTS, TOPK, HIDDEN, INTER, seed=tokens) for tokens in (TOKENS, 33)]
    layers = [make_layer(case) for case in cases]
    layers[1].dispatcher = layers[0].dispatcher
    given = [inputs(case) for case in cases]
    results = [layer(*tensors) for layer, tensors in zip(layers, given, strict=True)]
    for case, layer, y in reversed(list(zip(cases, layers, results, strict=True))):
        y.backward(case.dy)
        check("y", y.detach(), case.y)
        for name, weight in layer.experts.named_parameters():
            check(f"gradient of {name}", weight.grad, weight_grads(case)[name], matrices=True)


@pytest.mark.parametrize("kind", KINDS)
def test_fp32_accumulators_take_micro_batches(kind: type[nn.Module]) -> None:
    cases = [make_case(tokens, EXPERTS, TOPK, HIDDEN, INTER, seed=tokens) for tokens in (TOKENS, 64, 7)]
    cases = [replace(case, gate_up=cases[0].gate_up, down=cases[0].down) for case in cases]
    layer = make_layer(cases[0], kind)
    allocate_main_grads(layer.experts)
    for case in cases:
        layer(*inputs(case)).backward(case.dy)
    for name, weight in layer.experts.named_parameters():
        assert weight.grad is None
        assert weight.main_grad.dtype == torch.float32
        total = sum(weight_grads(case)[name] for case in cases)
        check(f"main_grad of {name}", weight.main_grad, total, matrices=True)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_fullgraph_compile(kind: type[nn.Module], accumulate: bool) -> None:
    torch._dynamo.reset()
    case = make_case(TOKENS, EXPERTS, TOPK, HIDDEN, INTER)
    layer = make_layer(case, kind)
    layer.dispatcher.build_buffer(layer.experts)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    if not accumulate:
        run_and_judge(case, compiled, layer.experts)
        return
    allocate_main_grads(layer.experts)
    for _ in range(2):
        y = compiled(*inputs(case))
        check("y", y.detach(), case.y)
        y.backward(case.dy)
    for name, weight in layer.experts.named_parameters():
        assert weight.grad is None
        check(f"main_grad of {name}", weight.main_grad, 2 * weight_grads(case)[name], matrices=True)


def test_reserved_sms_are_left_to_others() -> None:
    case = make_case(TOKENS, EXPERTS, TOPK, HIDDEN, INTER)
    available = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    layer = make_layer(case)
    run_and_judge(case, layer, layer.experts)
    assert runtime.get_num_sms() == available - 16
    layer = make_layer(case, config=Settings(num_sms=20, max_tokens_per_rank=TOKENS + 1))
    run_and_judge(case, layer, layer.experts)
    assert runtime.get_num_sms() == 20


def test_too_little_capacity_raises_and_drops_nothing() -> None:
    """The call that has no room is told by synchronize(); the next one, of fewer tokens, is right."""
    case = make_case(TOKENS, 4, TOPK, HIDDEN, INTER)
    layer = make_layer(case, config=Settings(capacity_factor=0.25))
    y = layer.dispatcher.run(*inputs(case), layer.experts, score_before_experts=False)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match=r"needs \d+ pool rows and \d+ are allocated"):
        layer.dispatcher.synchronize()
    del y
    few = make_case(10, 4, TOPK, HIDDEN, INTER)
    few = replace(few, gate_up=case.gate_up, down=case.down)
    run_and_judge(few, layer, layer.experts)


def test_copies_compute_the_same() -> None:
    case = make_case(TOKENS, EXPERTS, TOPK, HIDDEN, INTER)
    layer = make_layer(case)
    with torch.no_grad():
        assert torch.equal(layer(*inputs(case)), copy.deepcopy(layer)(*inputs(case)))


@pytest.mark.skipif(importlib.util.find_spec("pydantic") is None, reason="the config class needs pydantic")
def test_the_frameworks_config() -> None:
    case = make_case(TOKENS, EXPERTS, TOPK, HIDDEN, INTER)
    layer = make_layer(case, config=make_config(num_reserved_sms=12, capacity_factor=2.0))
    run_and_judge(case, layer, layer.experts)
    available = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    assert runtime.get_num_sms() == available - 12
