"""The prime-rl integration on one rank: its config, and the dispatcher beside a loop over tokens."""

from __future__ import annotations

import copy
import importlib
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from op_helpers import assert_close
from prime_rl_cases import (
    EXPERTS,
    HIDDEN,
    INTER,
    Experts,
    FusedExperts,
    Layer,
    expected,
    make_config,
    make_dispatcher,
    make_tokens,
    weight_grads,
)
from pydantic import ValidationError
from torch import Tensor, nn

from prime_kernels import runtime
from prime_kernels.integrations import prime_rl, prime_rl_dispatcher
from prime_kernels.integrations.grouped_experts import allocate_main_grads, expert_weights
from prime_kernels.integrations.prime_rl import MegaMoEDispatchConfig, dispatch_config

pytestmark = pytest.mark.usefixtures("no_shared_buffers")

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPO = Path(__file__).resolve().parents[2]
EXACT = 1e-12
BF16_TOLERANCE = 1e-2  # of a loop in float64 that rounds nothing


# ---- the config


def parse(fields: str) -> MegaMoEDispatchConfig:
    return dispatch_config(tomllib.loads(f"[trainer.model.moe.dispatch]\n{fields}"))


def test_defaults() -> None:
    assert parse('type = "mega_moe"').model_dump() == {
        "type": "mega_moe", "precision": "bf16", "max_tokens_per_rank": None, "num_sms": None,
        "num_reserved_sms": 16, "capacity_factor": 1.25, "wgrad_tile_scales": False,
        "free_bf16_expert_weights": False, "fused_wgrad_micro_batches": 1,
    }  # fmt: skip


def test_words_of_a_command_line_are_numbers() -> None:
    config = MegaMoEDispatchConfig.model_validate({"num_sms": "120", "capacity_factor": "2"})
    assert (config.num_sms, config.capacity_factor) == (120, 2.0)


def test_fields_of_a_file() -> None:
    config = parse('type = "mega_moe"\nmax_tokens_per_rank = 8192\nnum_sms = 120\ncapacity_factor = 2')
    assert (config.max_tokens_per_rank, config.num_sms, config.capacity_factor) == (8192, 120, 2.0)
    with pytest.raises(ValidationError, match="frozen"):
        config.num_sms = 2


@pytest.mark.parametrize(
    ("fields", "field", "reason"),
    [
        ("reserved_sms = 3", "reserved_sms", "Extra inputs"),
        ('type = "deepep"', "type", "'mega_moe'"),
        ('precision = "fp4"', "precision", "'fp8_bwd'"),
        ("max_tokens_per_rank = 0", "max_tokens_per_rank", "greater than or equal to 1"),
        ("max_tokens_per_rank = 1.5", "max_tokens_per_rank", "integer"),
        ("num_sms = 1", "num_sms", "greater than or equal to 2"),
        ("num_sms = true", "num_sms", "is a boolean, needs a number"),
        ("num_reserved_sms = -1", "num_reserved_sms", "greater than or equal to 0"),
        ("capacity_factor = 0", "capacity_factor", "greater than 0"),
        ("capacity_factor = inf", "capacity_factor", "finite"),
        ("capacity_factor = nan", "capacity_factor", "finite|greater than 0"),
        ("capacity_factor = true", "capacity_factor", "is a boolean"),
        ('wgrad_tile_scales = "maybe"', "wgrad_tile_scales", "boolean"),
        ("fused_wgrad_micro_batches = 0", "fused_wgrad_micro_batches", "greater than or equal to 1"),
        ("fused_wgrad_micro_batches = 5", "fused_wgrad_micro_batches", "less than or equal to 4"),
    ],
)
def test_one_wrong_field(fields: str, field: str, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason) as error:
        parse(fields)
    assert [entry["loc"] for entry in error.value.errors()] == [(field,)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("num_sms = 100\nnum_reserved_sms = 16", "num_sms is 100 and num_reserved_sms is 16.*set one"),
        ("wgrad_tile_scales = true", 'tile_scales is True and precision is "bf16": only fp8 and fp8_bwd'),
        ("fused_wgrad_micro_batches = 2", 'fused_wgrad_micro_batches is 2 and precision is "bf16"'),
        ("free_bf16_expert_weights = true", 'free_bf16_expert_weights is True and precision is "bf16"'),
        (
            'precision = "fp8_bwd"\nfree_bf16_expert_weights = true',
            'free_bf16_expert_weights is True and precision is "fp8_bwd": only fp8 and mxfp8',
        ),
        ('precision = "mxfp8"\nwgrad_tile_scales = true', 'tile_scales is True and precision is "mxfp8"'),
        (
            'precision = "fp8"\nwgrad_tile_scales = true\nfused_wgrad_micro_batches = 3',
            "fused_wgrad_micro_batches is 3 and wgrad_tile_scales is true.*at most 2",
        ),
        (
            "wgrad_tile_scales = true\nnum_sms = 100\nnum_reserved_sms = 16",
            "num_sms is 100 .*; wgrad_tile_scales is True",
        ),
    ],
)
def test_contradictory_fields(fields: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message) as error:
        parse(fields)
    assert "not in version" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "kernels"),
    [
        (
            'precision = "fp8"\nwgrad_tile_scales = true\nfree_bf16_expert_weights = true\n'
            "fused_wgrad_micro_batches = 2",
            "mega_moe_fp8, mega_moe_fp8_backward, for SM90",
        ),
        ('precision = "fp8_bwd"\nfused_wgrad_micro_batches = 4', r"\(mega_moe_fp8_backward, for SM90"),
        ('precision = "mxfp8"\nfree_bf16_expert_weights = true', "mega_moe_mxfp8_backward, for SM100"),
    ],
)
def test_a_precision_that_is_not_built(fields: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything else is right: it is the one thing refused, and accepted once the kernels are there."""
    with pytest.raises(ValidationError, match=rf'precision is "\w+".*{kernels}.*not in version'):
        parse(fields)
    built = SimpleNamespace(module=".somewhere")
    monkeypatch.setattr(prime_rl, "KERNELS", dict.fromkeys(prime_rl.KERNELS, built))
    assert parse(fields).precision != "bf16"


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, r"no table \[trainer.model.moe.dispatch\]: trainer is missing"),
        ({"trainer": {"model": {"moe": {}}}}, "dispatch is missing"),
        ({"trainer": {"model": 3}}, "trainer.model is 3, needs a table"),
        ([], r"the config is \[\], needs a table"),
    ],
)
def test_a_file_without_the_table(document: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dispatch_config(document)


def test_without_pydantic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydantic", None)
    monkeypatch.delitem(sys.modules, prime_rl.__name__)
    with pytest.raises(ImportError, match=r"needs pydantic 2: pip install 'pydantic>=2\.7'"):
        importlib.import_module(prime_rl.__name__)


def test_the_dispatcher_alone_needs_no_pydantic() -> None:
    """Any object with the fields will do for it."""
    code = (
        "import sys; sys.modules['pydantic'] = None\n"
        "from types import SimpleNamespace\n"
        "from prime_kernels.integrations.prime_rl_dispatcher import MegaMoEDispatcher\n"
        "settings = SimpleNamespace(precision='bf16', max_tokens_per_rank=4, num_sms=None,"
        " num_reserved_sms=16, capacity_factor=1.25)\n"
        "print(MegaMoEDispatcher(settings, num_experts=4, top_k=2).max_tokens_per_rank)"
    )
    command, environment = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(REPO)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (result.stdout, result.returncode) == ("4\n", 0), result.stderr


def test_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    h200 = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h200)
    assert make_config().sms_on(cpu) is None
    assert make_config().sms_on(gpu) == 116
    assert make_config(num_reserved_sms=0).sms_on(gpu) == 132
    assert make_config(num_sms=100).sms_on(gpu) == 100
    with pytest.raises(ValueError, match="num_reserved_sms is 131 and cuda:0 has 132 SMs"):
        make_config(num_reserved_sms=131).sms_on(gpu)


# ---- computing


@pytest.mark.parametrize("leading", [(7,), (2, 3), (1,), (0,)])
@pytest.mark.parametrize("kind", [Experts, FusedExperts])
def test_forward_and_backward(kind: type[nn.Module], leading: tuple[int, ...]) -> None:
    layer = Layer(kind(), make_dispatcher())
    x, scores, indices = make_tokens(*leading)
    y = layer(x, scores, indices)
    assert y.shape == x.shape
    dy = torch.randn_like(y)
    y.backward(dy)
    wanted_y, wanted = expected(layer.experts, x, scores, indices, dy)
    assert_close(y.detach(), wanted_y, EXACT)
    assert_close(x.grad, wanted["x"], EXACT)
    assert_close(scores.grad, wanted["scores"], EXACT)
    for name, grad in weight_grads(layer.experts).items():
        assert_close(grad, wanted[name], EXACT, name)


def test_bf16_with_int32_indices_and_bf16_scores() -> None:
    sizes = {"hidden": 64, "inter": 128}
    layer = Layer(Experts(dtype=torch.bfloat16, **sizes), make_dispatcher())
    x, scores, indices = make_tokens(7, hidden=64, dtype=torch.bfloat16)
    y = layer(x, scores, indices.int())
    assert y.dtype == scores.dtype == torch.bfloat16
    y.backward(torch.ones_like(y))
    wanted_y, wanted = expected(layer.experts, x, scores, indices, torch.ones_like(y))
    assert_close(y.detach(), wanted_y, BF16_TOLERANCE)
    assert_close(scores.grad, wanted["scores"], BF16_TOLERANCE)
    for name, grad in weight_grads(layer.experts).items():
        assert_close(grad, wanted[name], BF16_TOLERANCE, name)


def test_keep_and_clamp_reach_the_kernels() -> None:
    x, scores, indices = make_tokens(7)
    layer = Layer(Experts(), make_dispatcher(activation_clamp=0.1, keep="z"))
    y = layer(x, scores, indices)
    y.backward(torch.ones_like(y))
    wanted_y, wanted = expected(layer.experts, x, scores, indices, torch.ones_like(y), clamp=0.1)
    assert_close(y.detach(), wanted_y, EXACT)
    assert_close(layer.experts.w1.grad, wanted["w1"], EXACT)
    assert not torch.equal(Layer(layer.experts, make_dispatcher())(x, scores, indices), y)


def test_fused_weights_are_not_copied_and_split_ones_are() -> None:
    fused, split = FusedExperts(), Experts()
    assert expert_weights(fused).gate_up is fused.gate_up
    assert expert_weights(split).down is split.w2
    assert torch.equal(expert_weights(split).gate_up, torch.cat((split.w1, split.w3), dim=1))


def test_layers_and_dispatchers_share_a_buffer() -> None:
    first, second = make_dispatcher(), make_dispatcher()
    small, large = Experts(), Experts(hidden=2 * HIDDEN)
    assert first.build_buffer(small) is first.build_buffer(Experts()) is second.build_buffer(small)
    assert first.build_buffer(large) is not first.build_buffer(small)
    roomy = make_dispatcher(make_config(capacity_factor=4.0))
    assert roomy.build_buffer(small) is not first.build_buffer(small)
    first.build_buffer(small).destroy()
    assert first.run(*make_tokens(3), small, score_before_experts=False).shape == (3, HIDDEN)


def test_settings_of_the_config_reach_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float | None] = []
    build = prime_rl_dispatcher.shared_buffer

    def record(*args: Any) -> Any:
        seen.append(runtime.get_pool_capacity_factor())
        return build(*args)

    monkeypatch.setattr(prime_rl_dispatcher, "shared_buffer", record)
    monkeypatch.setattr(runtime, "_num_sms", None)
    monkeypatch.setattr(runtime, "_pool_capacity_factor", 3.0)
    buffer = make_dispatcher(make_config(capacity_factor=1.5, num_sms=64)).build_buffer(Experts())
    assert seen == [1.5]
    assert runtime.get_pool_capacity_factor() == 3.0
    assert runtime.get_num_sms() == 64
    assert buffer.num_max_tokens_per_rank == 8
    given = make_dispatcher(make_config(max_tokens_per_rank=5), sequence_length=8)
    assert given.build_buffer(Experts()).num_max_tokens_per_rank == 5


def test_copies_share_and_files_hold_no_buffer() -> None:
    layer = Layer(Experts(), make_dispatcher())
    tokens = make_tokens(7)
    y = layer(*tokens)
    twin = copy.deepcopy(layer)
    assert twin.dispatcher is layer.dispatcher
    assert torch.equal(twin(*tokens), y)
    loaded = pickle.loads(pickle.dumps(layer))
    assert loaded.dispatcher._buffers == {}
    assert torch.equal(loaded(*tokens), y)


def test_a_new_group_after_the_process_group_was_made_anew() -> None:
    dispatcher, experts, tokens = make_dispatcher(), Experts(), make_tokens(3)
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            dispatcher.group = None
            y = dispatcher.run(*tokens, experts, score_before_experts=False)
        finally:
            dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="a dispatcher: set its group"):
        dispatcher.run(*tokens, experts, score_before_experts=False)
    dispatcher.group = None
    assert torch.equal(dispatcher.run(*tokens, experts, score_before_experts=False), y)
    with pytest.raises(ValueError, match="group is 'all', needs a"):
        dispatcher.group = "all"


# ---- compile


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("kind", [Experts, FusedExperts])
def test_fullgraph_compile(kind: type[nn.Module], accumulate: bool) -> None:
    torch._dynamo.reset()
    layer = Layer(kind(), make_dispatcher())
    if accumulate:
        allocate_main_grads(layer.experts, torch.float64)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"call build_buffer\(experts\) before torch.compile"):
        compiled(*make_tokens(7))
    torch._dynamo.reset()
    layer.dispatcher.build_buffer(layer.experts)
    totals: dict[str, Tensor] = {}
    for num_tokens in (7, 4, 0):
        x, scores, indices = make_tokens(num_tokens, seed=num_tokens)
        y = compiled(x, scores, indices)
        y.sum().backward()
        wanted_y, wanted = expected(layer.experts, x, scores, indices, torch.ones_like(y))
        assert_close(y.detach(), wanted_y, EXACT)
        assert_close(x.grad, wanted["x"], EXACT)
        for name in weight_grads(layer.experts):
            totals[name] = totals.get(name, 0) + wanted[name]
    for name, weight in layer.experts.named_parameters():
        assert_close(weight.main_grad if accumulate else weight.grad, totals[name], EXACT, name)
        assert not accumulate or weight.grad is None


# ---- accumulators


@pytest.mark.parametrize("kind", [Experts, FusedExperts])
def test_main_grads_take_micro_batches(kind: type[nn.Module]) -> None:
    layer = Layer(kind(), make_dispatcher())
    allocate_main_grads(layer.experts, torch.float64)
    mains = {name: weight.main_grad for name, weight in layer.experts.named_parameters()}
    totals: dict[str, Tensor] = {}
    for step in range(3):
        x, scores, indices = make_tokens(5, seed=step)
        y = layer(x, scores, indices)
        y.backward(torch.ones_like(y))
        wanted = expected(layer.experts, x, scores, indices, torch.ones_like(y))[1]
        for name in mains:
            totals[name] = totals.get(name, 0) + wanted[name]
    for name, weight in layer.experts.named_parameters():
        assert weight.grad is None
        assert weight.main_grad is mains[name]
        assert_close(weight.main_grad, totals[name], EXACT, name)


def test_main_grads_of_bf16_weights_are_fp32() -> None:
    """64 micro-batches: a bf16 accumulator would lose more than the limit."""
    layer = Layer(Experts(hidden=64, inter=128, dtype=torch.bfloat16), make_dispatcher())
    allocate_main_grads(layer.experts)
    totals: dict[str, Tensor] = {}
    for step in range(64):
        x, scores, indices = make_tokens(3, hidden=64, dtype=torch.bfloat16, seed=step % 7)
        y = layer(x, scores.float(), indices)
        y.backward(torch.ones_like(y))
        wanted = expected(layer.experts, x, scores, indices, torch.ones_like(y))[1]
        for name, _ in layer.experts.named_parameters():
            totals[name] = totals.get(name, 0) + wanted[name]
    for name, weight in layer.experts.named_parameters():
        assert weight.main_grad.dtype == torch.float32
        assert_close(weight.main_grad, totals[name], BF16_TOLERANCE, name)


def test_frozen_experts() -> None:
    layer = Layer(Experts(), make_dispatcher())
    layer.experts.w1.requires_grad_(False)
    with pytest.raises(ValueError, match="one of w1 and w3 is frozen"):
        allocate_main_grads(layer.experts, torch.float64)
    layer.experts.w3.requires_grad_(False)
    allocate_main_grads(layer.experts, torch.float64)
    assert not hasattr(layer.experts.w1, "main_grad")
    x, scores, indices = make_tokens(7)
    layer(x, scores, indices).sum().backward()
    wanted = expected(layer.experts, x, scores, indices, torch.ones_like(x))[1]
    assert_close(layer.experts.w2.main_grad, wanted["w2"], EXACT)
    assert layer.experts.w1.grad is layer.experts.w3.grad is None


def test_one_half_frozen_after_accumulators_were_made() -> None:
    layer = Layer(Experts(), make_dispatcher())
    allocate_main_grads(layer.experts, torch.float64)
    layer.experts.w3.requires_grad_(False)
    with pytest.raises(ValueError, match="one of w1 and w3 is frozen"):
        layer(*make_tokens(3))
    layer.experts.w1.requires_grad_(False)
    layer(*make_tokens(3)).sum().backward()
    assert not layer.experts.w1.main_grad.any()
    assert layer.experts.w2.main_grad.any()


def test_accumulators_that_are_not_one_tensor() -> None:
    layer = Layer(Experts(), make_dispatcher())
    layer.experts.w1.main_grad = torch.zeros(EXPERTS, INTER, HIDDEN, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"views of one tensor.*allocate_main_grads\(experts\)"):
        layer(*make_tokens(3))
    layer.experts.w1.main_grad = None
    assert layer(*make_tokens(3)).requires_grad


# ---- refusals


def with_attribute(name: str, value: Any) -> Experts:
    experts = Experts()
    setattr(experts, name, value)
    return experts


def without(name: str) -> Experts:
    experts = Experts()
    delattr(experts, name)
    return experts


BIAS = nn.Parameter(torch.zeros(EXPERTS, INTER))


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (without("w3"), "Experts has w1 and w2 and no w3: its experts have no gate"),
        (without("w2"), "Experts has the parameters w1, w3; needs exactly w1, w2, w3 or gate_up, down"),
        (nn.Linear(2, 2, bias=False), "Linear has the parameters weight"),
        (with_attribute("b1", BIAS), r"Experts has biases \(b1\)"),
        (with_attribute("w1_bias", BIAS), r"Experts has biases \(w1_bias\)"),
        (with_attribute("lora_a", BIAS), "has the parameters lora_a, w1, w2, w3"),
        (with_attribute("act_fn", nn.GELU()), r"Experts.act_fn is GELU.*SwiGLU"),
        (with_attribute("activation", torch.nn.functional.relu), "Experts.activation is relu"),
        (with_attribute("hidden_act", "gelu"), "Experts.hidden_act is 'gelu'"),
        (Experts(experts=EXPERTS + 1), "this rank holds 5 experts, 4 over 1 ranks are 4 each"),
        (
            with_attribute("w3", nn.Parameter(torch.zeros(EXPERTS, INTER + 1, HIDDEN))),
            r"w1 is torch.float64 \[4, 5, 6\], so w3 has to be torch.float64 \[4, 5, 6\] and is",
        ),
        (with_attribute("w2", nn.Parameter(torch.zeros(2, 2))), r"w2 has shape \[2, 2\], needs three dims"),
    ],
)
def test_experts_the_kernels_cannot_compute(experts: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_dispatcher().run(*make_tokens(3), experts, score_before_experts=False)


@pytest.mark.parametrize("activation", [nn.SiLU(), torch.nn.functional.silu, "silu", "swish", "SwiGLU"])
def test_silu_by_any_name(activation: Any) -> None:
    experts = with_attribute("act_fn", activation)
    assert make_dispatcher().run(*make_tokens(3), experts, score_before_experts=False).shape == (3, HIDDEN)


def test_calls_that_are_refused() -> None:
    dispatcher, experts = make_dispatcher(), Experts()
    x, scores, indices = make_tokens(3)

    def run(x: Tensor = x, scores: Tensor = scores, indices: Tensor = indices) -> Tensor:
        return dispatcher.run(x, scores, indices, experts, score_before_experts=False)

    with pytest.raises(ValueError, match="score_before_experts is True"):
        dispatcher.run(x, scores, indices, experts, score_before_experts=True)
    with pytest.raises(ValueError, match=r"x has shape \[3, 5\], needs \[n, 6\]"):
        run(x[:, :-1])
    with pytest.raises(ValueError, match=r"top_scores has shape \[2, 2\], needs \[n, top_k\] = \[3, 2\]"):
        run(scores=scores[:2])
    with pytest.raises(ValueError, match=r"selected_experts_indices has shape \[3, 1\]"):
        run(indices=indices[:, :1])
    with pytest.raises(ValueError, match=r"selected_experts_indices is torch.float64, needs integers"):
        run(indices=indices.double())
    with pytest.raises(RuntimeError, match=r"max_tokens_per_rank is 8 and this rank has 9 tokens; set"):
        run(*make_tokens(9))
    with pytest.raises(ValueError, match=r"x is torch.float32"):
        run(x.float())


def test_a_dispatcher_that_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens_per_rank of the config and sequence_length are both"):
        make_dispatcher(sequence_length=None)
    with pytest.raises(ValueError, match="top_k is 0"):
        make_dispatcher(top_k=0)
    with pytest.raises(ValueError, match="keep is 'y'"):
        make_dispatcher(keep="y")


def test_synchronize_raises_what_kernels_recorded() -> None:
    dispatcher, experts = make_dispatcher(), Experts()
    dispatcher.run(*make_tokens(3), experts, score_before_experts=False)
    dispatcher.synchronize()

    def raise_faults() -> None:
        raise RuntimeError("rank 1 did not arrive")

    dispatcher.build_buffer(experts).sm90_memory = SimpleNamespace(
        raise_faults=raise_faults, close=lambda: None
    )
    with pytest.raises(RuntimeError, match="rank 1 did not arrive"):
        dispatcher.synchronize()


# ---- the example


def test_the_example_trains() -> None:
    command = [sys.executable, REPO / "examples" / "prime_rl_dispatch.py", "--steps", "20"]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    losses = [float(line.split()[-1]) for line in result.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 20
    assert losses[-1] < 0.9 * losses[0]
