"""`prime_kernels.integrations.torchtitan` beside the token-choice experts of the real library."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchtitan_library
from gloo_world import GlooWorld
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from prime_kernels.module import release_buffers

if (reason := torchtitan_library.why_missing()) is not None:
    pytest.skip(reason, allow_module_level=True)

from torchtitan.models.common import moe as titan
from torchtitan.models.common import token_dispatcher as dispatchers
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

from prime_kernels.integrations import torchtitan as integration
from prime_kernels.integrations.torchtitan import apply, revert

# On a CPU the router's fp32 autocast does nothing, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")

HIDDEN, INTER, EXPERTS, TOP_K, LAYERS = 64, 128, 4, 2, 2
BATCH, SEQUENCE = 2, 9
TOKENS = BATCH * SEQUENCE
NAMES = [f"layers.{layer}.routed_experts" for layer in range(LAYERS)]
WEIGHTS = ("w1_EFD", "w2_EDF", "w3_EFD")

# Relative Frobenius norms. The library's experts compute in bf16 too: how much larger our error against
# float64 may be than theirs (over seeds up to 1.22 times), and how much the two differ (up to 0.0064).
BF16_ERROR_RATIO = 1.4
BF16_TOLERANCE = 1e-2
# The op on the same numbers: only the order of some sums in fp32 differs.
SAME = 1e-6


class ExactExperts(titan.GroupedExperts):
    """One expert after the other, in the dtype of the weights."""

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        rows = []
        for expert, tokens in enumerate(x_RD.split(num_tokens_per_expert_E.tolist())):
            gate, down, up = (getattr(self, name)[expert].T for name in WEIGHTS)
            rows.append((nn.functional.silu(tokens @ gate) * (tokens @ up)) @ down)
        return torch.cat(rows)


class Model(nn.Module):
    """Layers side by side: in a row, rounding in one would move tokens to other experts in the next."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers]).sum(0)


def linear(features: int, outputs: int) -> Any:
    return Linear.Config(in_features=features, out_features=outputs)


def moe_config(
    *, experts: int = EXPERTS, top_k: int = TOP_K, shared: bool = True, inner: Any = titan.GroupedExperts,
    dispatcher: Any = dispatchers.LocalTokenDispatcher, **router: Any,
) -> Any:  # fmt: skip
    shared_config = FeedForward.Config(
        w1=linear(HIDDEN, 96), w2=linear(96, HIDDEN), w3=linear(HIDDEN, 96)
    )
    return titan.MoE.Config(
        num_experts=experts,
        routed_experts=titan.RoutedExperts.Config(
            inner_experts=inner.Config(dim=HIDDEN, hidden_dim=INTER, num_experts=experts),
            token_dispatcher=dispatcher.Config(num_experts=experts, top_k=top_k),
        ),
        router=titan.TokenChoiceTopKRouter.Config(
            num_experts=experts, gate=linear(HIDDEN, experts), top_k=top_k, **router
        ),
        shared_experts=shared_config if shared else None,
    )


def make_model(dtype: torch.dtype = torch.float32, seed: int = 0, **settings: Any) -> Model:
    model = Model([moe_config(**settings).build() for _ in range(LAYERS)])
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator) * 1.5 * parameter.shape[-1] ** -0.5
            parameter.copy_(values)
        for layer in model.layers:
            layer.expert_bias_E.copy_(torch.randn(layer.expert_bias_E.shape, generator=generator) * 0.1)
    return model.to(dtype).train()


def make_pair(dtype: torch.dtype = torch.float32, *, keep: str | None = None, **settings: Any) -> Any:
    """A model with the library's experts, and its copy with ours."""
    reference = make_model(dtype, **settings)
    model = copy.deepcopy(reference)
    assert apply(model, keep=keep, max_tokens_per_rank=TOKENS) == NAMES
    return reference, model


def exact_twin(model: Model) -> Model:
    twin = copy.deepcopy(model).double()
    for layer in twin.layers:
        layer.routed_experts.inner_experts.__class__ = ExactExperts
    return twin


def make_x(dtype: torch.dtype = torch.float32, seed: int = 1, batch: int = BATCH) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, SEQUENCE, HIDDEN, generator=generator).to(dtype)


def run(model: Model, x: Tensor) -> dict[str, Tensor]:
    """y, and the gradients of x and of every parameter."""
    x = x.detach().clone().requires_grad_()
    y = model(x)
    (y.float() if y.dtype == torch.bfloat16 else y).square().sum().backward()
    results = {"y": y.detach(), "x": x.grad}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        results[name] = parameter.grad
    return results


def distance(value: Tensor, expected: Tensor) -> float:
    value, expected = value.detach().double(), expected.detach().double()
    return ((value - expected).norm() / expected.norm().clamp_min(1e-12)).item()


def assert_near(results: dict[str, Tensor], expected: dict[str, Tensor], limit: float) -> None:
    assert results.keys() == expected.keys()
    for name, value in results.items():
        assert distance(value, expected[name]) < limit, (name, distance(value, expected[name]))


class CountedCalls:
    """How often the op computed routed experts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        forward = integration.MegaMoE.forward

        def counted(*args: Any) -> Tensor:
            self.count += 1
            return forward(*args)

        monkeypatch.setattr(integration.MegaMoE, "forward", counted)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> CountedCalls:
    return CountedCalls(monkeypatch)


@pytest.fixture(autouse=True)
def _no_shared_buffers() -> Iterator[None]:
    yield
    release_buffers()


# ---- the same results as the library


@pytest.mark.parametrize("keep", [None, "z"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"shared": False, "score_func": "softmax", "route_norm": True, "route_scale": 1.7},
        {"experts": 8, "num_expert_groups": 2, "num_limited_groups": 1},
        {"top_k": 1},
        {"dispatcher": dispatchers.AllToAllTokenDispatcher},
    ],
    ids=["plain", "softmax", "groups", "top1", "all_to_all"],
)
def test_output_and_every_gradient(settings: dict[str, Any], keep: str | None, calls: CountedCalls) -> None:
    """fp32 weights: as near to float64 as the library, whose experts compute in bf16 as well."""
    reference, model = make_pair(keep=keep, **settings)
    if "dispatcher" in settings:  # which computes only on several ranks
        reference = make_model()
    ours, theirs = run(model, make_x()), run(reference, make_x())
    expected = run(exact_twin(reference), make_x().double())
    assert calls.count == LAYERS
    assert_near(ours, theirs, BF16_TOLERANCE)
    for name, value in expected.items():
        assert ours[name].dtype == theirs[name].dtype == torch.float32
        near, library_near = distance(ours[name], value), distance(theirs[name], value)
        assert near < BF16_ERROR_RATIO * library_near, (name, near, library_near)


def test_bf16_weights() -> None:
    reference, model = make_pair(torch.bfloat16)
    ours, theirs = (run(m, make_x(torch.bfloat16)) for m in (model, reference))
    assert all(value.dtype == torch.bfloat16 for value in ours.values())
    assert_near(ours, theirs, BF16_TOLERANCE)


def test_load_statistics_stay_the_librarys() -> None:
    reference, model = make_pair()
    run(model, make_x()), run(reference, make_x())
    for layer, twin in zip(model.layers, reference.layers, strict=True):
        assert layer.tokens_per_expert_E.sum() == TOKENS * TOP_K
        assert torch.equal(layer.tokens_per_expert_E, twin.tokens_per_expert_E)


def test_no_tokens(calls: CountedCalls) -> None:
    _, model = make_pair(shared=False)
    y = model(make_x()[:1, :0])
    y.sum().backward()
    assert y.shape == (1, 0, HIDDEN)
    assert calls.count == LAYERS
    assert not model.layers[0].routed_experts.inner_experts.w1_EFD.grad.any()


def test_activation_checkpointing(calls: CountedCalls) -> None:
    _, model = make_pair()
    expected = run(copy.deepcopy(model), make_x())
    calls.count = 0
    for layer in model.layers:
        layer.forward = lambda x, forward=layer.forward: checkpoint(forward, x, use_reentrant=False)
    results = run(model, make_x())
    assert calls.count == 2 * LAYERS
    assert_near(results, expected, SAME)


def test_compiled() -> None:
    _, model = make_pair()
    expected = run(copy.deepcopy(model), make_x())
    model(make_x())
    for layer in model.layers:
        layer.routed_experts.inner_experts.compile(backend="aot_eager", fullgraph=True)
    assert_near(run(model, make_x()), expected, SAME)


def test_compiled_before_there_is_a_buffer() -> None:
    _, model = make_pair()
    model.layers[0].routed_experts.inner_experts.compile(backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="no buffer yet; run one eager forward"):
        model(make_x())


# ---- parameters and files


def test_state_dict_is_the_librarys() -> None:
    model = make_model()
    parameters, keys = list(model.parameters()), list(model.state_dict())
    apply(model, max_tokens_per_rank=TOKENS)
    run(model, make_x())
    assert list(model.state_dict()) == keys
    assert all(ours is theirs for ours, theirs in zip(model.parameters(), parameters, strict=True))


def test_applied_on_the_meta_device() -> None:
    """As the library builds its models: memory and values come later."""
    reference, expected = make_pair()
    with torch.device("meta"):
        model = Model([moe_config().build() for _ in range(LAYERS)])
    apply(model, max_tokens_per_rank=TOKENS)
    model.to_empty(device="cpu").load_state_dict(reference.state_dict())
    for layer in model.layers:
        layer.tokens_per_expert_E.zero_()
    assert_near(run(model, make_x()), run(expected, make_x()), SAME)


def test_deepcopy_and_pickle(calls: CountedCalls) -> None:
    _, model = make_pair()
    twins = [copy.deepcopy(model)]
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twins.append(torch.load(file, weights_only=False))
    with torch.no_grad():
        model.layers[0].routed_experts.inner_experts.w2_EDF.zero_()
    for twin in twins:
        calls.count = 0
        fresh = make_pair()[1]
        assert torch.equal(twin(make_x()), fresh(make_x()))
        assert calls.count == 2 * LAYERS
        assert not torch.equal(twin(make_x()), model(make_x()))


def test_revert(calls: CountedCalls) -> None:
    reference, model = make_pair()
    attributes = [set(vars(module)) for module in reference.modules()]
    assert revert(model) == NAMES
    assert [set(vars(module)) for module in model.modules()] == attributes
    ours, theirs = run(model, make_x()), run(reference, make_x())
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert calls.count == 0
    with pytest.raises(ValueError, match="no RoutedExperts of this Model is switched over"):
        revert(model)
    assert apply(model, max_tokens_per_rank=TOKENS) == NAMES
    with pytest.raises(RuntimeError, match=r"layers.0.routed_experts.*switched over already"):
        apply(model, max_tokens_per_rank=TOKENS)


# ---- refusals


class BiasedExperts(titan.GroupedExperts):
    @dataclass(kw_only=True, slots=True)
    class Config(titan.GroupedExperts.Config):
        pass

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.w1_bias_EF = nn.Parameter(torch.zeros(config.num_experts, config.hidden_dim))


class GeluExperts(ExactExperts):
    @dataclass(kw_only=True, slots=True)
    class Config(titan.GroupedExperts.Config):
        pass


class QuantizedExperts(titan.GroupedExperts):
    """As the library's FP8 ones: forward and grouped GEMM are inherited, the weights are something else."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.GroupedExperts.Config):
        pass


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (GptOssGroupedExperts, r"layers.0.routed_experts \(GptOssGroupedExperts\):.*biases \(mlp1_bias"),
        (BiasedExperts, r"layers.0.routed_experts \(BiasedExperts\): it has biases \(w1_bias_EF\)"),
        (GeluExperts, r"layers.1.routed_experts \(GeluExperts\): it is a subclass of GroupedExperts"),
        (QuantizedExperts, r"\(QuantizedExperts\): it is a subclass of GroupedExperts, which may"),
    ],
)
def test_experts_the_kernels_cannot_compute(inner: Any, message: str) -> None:
    model = make_model(inner=inner)
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(ValueError, match=message):
        apply(model, max_tokens_per_rank=TOKENS)
    assert [list(vars(module)) for module in model.modules()] == [list(old) for old in before]


@pytest.mark.parametrize("place", ["layer", "routed", "experts", "dispatcher"])
def test_scores_before_experts_are_refused(place: str) -> None:
    """Version 0.3 has no such setting any more, earlier ones had it at several places."""
    model = make_model()
    layer = model.layers[1]
    routed = layer.routed_experts
    places = {"layer": layer, "routed": routed, "experts": routed.inner_experts}
    places |= {"dispatcher": routed.token_dispatcher}
    places[place].score_before_experts = True
    with pytest.raises(ValueError, match=r"layers.1.routed_experts.*score_before_experts is True") as raised:
        apply(model, max_tokens_per_rank=TOKENS)
    assert "layers.0" not in str(raised.value)


def test_other_dispatchers_and_wrapped_forwards_are_refused() -> None:
    model = make_model()
    model.layers[0].routed_experts.token_dispatcher = object()
    experts = model.layers[1].routed_experts.inner_experts
    experts.forward = experts.forward  # as the library's parallelize leaves it
    with pytest.raises(ValueError, match=r"0.*dispatcher is object.*and layers.1.*has wrapped its forward"):
        apply(model, max_tokens_per_rank=TOKENS)


def test_the_librarys_expert_parallelism_is_refused() -> None:
    _, model = make_pair()
    dispatcher = model.layers[1].routed_experts.token_dispatcher
    dispatcher.wire_meshes(ep_mesh=None)
    with pytest.raises(RuntimeError, match=r"layers.1.routed_experts: mega_moe takes its expert parallelism"):
        dispatcher.wire_meshes(ep_mesh=object())


@pytest.mark.parametrize("name", ["w1_EFD", "w2_EDF", "w3_EFD"])
def test_a_main_grad_is_refused(name: str) -> None:
    """Rather than filled for one weight and not for the others."""
    _, model = make_pair(torch.bfloat16)
    weights = dict(model.named_parameters())
    path = next(path for path in weights if path.endswith(name))
    weights[path].main_grad = torch.zeros(weights[path].shape)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=f"{name} has a main_grad; .* delete main_grad"):
        model(make_x(torch.bfloat16))


def test_wrong_settings() -> None:
    model = make_model()
    for precision in ("fp8", "fp8_bwd", "mxfp8"):
        with pytest.raises(RuntimeError, match=f'no kernel for precision "{precision}"'):
            apply(model, precision=precision, max_tokens_per_rank=TOKENS)
    with pytest.raises(ValueError, match=r"layers.0.routed_experts.*keep"):
        apply(model, keep="y", max_tokens_per_rank=TOKENS)
    with pytest.raises(ValueError, match="Linear has no RoutedExperts"):
        apply(nn.Linear(2, 2), max_tokens_per_rank=TOKENS)
    with pytest.raises(ValueError, match=r"layers.0.*its w1_EFD is torch.float16, needs torch.bfloat16"):
        apply(make_model(torch.float16), max_tokens_per_rank=TOKENS)
    apply(model, max_tokens_per_rank=TOKENS - 1)
    with pytest.raises(RuntimeError, match=f"sized for {TOKENS - 1} tokens/rank, got {TOKENS}"):
        model(make_x())


# ---- several ranks


def _expert_parallel(rank: int, size: int) -> None:
    reference = make_model()
    alone = copy.deepcopy(reference)
    apply(alone, [dist.new_group([member]) for member in range(size)][rank], max_tokens_per_rank=TOKENS)
    model = copy.deepcopy(reference)
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    group = dist.new_group(list(range(size)))
    apply(model, group, max_tokens_per_rank=TOKENS)
    assert {name: value.shape for name, value in model.state_dict().items()} == shapes
    totals: dict[str, Tensor] = {}
    for member, batch in enumerate((2, 1)):  # ranks have batches of different sizes
        expected = run(alone, make_x(seed=member, batch=batch))
        totals = {name: expected[name].clone() for name in expected if name.startswith("layers")}
        if member == rank:
            mine = expected["y"], expected["x"]
            x = make_x(seed=member, batch=batch)
    results = run(model, x)
    assert distance(results["y"], mine[0]) < SAME
    assert distance(results["x"], mine[1]) < SAME
    for layer in range(LAYERS):
        experts = model.layers[layer].routed_experts.inner_experts
        for name in WEIGHTS:
            weight = getattr(experts, name)
            assert weight.to_local().shape[0] == EXPERTS // size
            total = totals[f"layers.{layer}.routed_experts.inner_experts.{name}"]
            assert distance(weight.grad.full_tensor(), total) < BF16_TOLERANCE, name
    revert(model)
    for (name, parameter), twin in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert type(parameter) is nn.Parameter
        assert torch.equal(parameter, twin), name
    with pytest.raises(ValueError, match=r"num_experts is 3, needs a multiple of the group's 2 ranks"):
        apply(make_model(experts=3), group, max_tokens_per_rank=TOKENS)
    release_buffers()


@pytest.mark.parametrize("world", [2], indirect=True, ids=["2ranks"])
def test_expert_parallel(world: GlooWorld) -> None:
    world.run(_expert_parallel)


def _sharded(rank: int, size: int) -> None:
    """FSDP2 with mixed precision, experts in a unit of their own; scores reach the op in fp32."""
    alone = [dist.new_group([member]) for member in range(size)][rank]
    reference = make_model()
    model = copy.deepcopy(reference)
    apply(reference, alone, max_tokens_per_rank=TOKENS)
    apply(model, alone, max_tokens_per_rank=TOKENS)
    settings = {
        "mesh": DeviceMesh("cpu", list(range(size))),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for layer in model.layers:
        fully_shard(layer.routed_experts.inner_experts, **settings)
    for member in range(size):
        run(reference, make_x(seed=member))
        if member == rank:
            expected = reference(make_x(seed=member))
    # Scores rounded to bf16 would make a difference here.
    assert distance(run(model, make_x(seed=rank))["y"], expected) < SAME
    for (name, parameter), twin in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        if name.endswith(WEIGHTS):
            assert distance(parameter.grad.full_tensor() * size, twin[1].grad) < BF16_TOLERANCE, name
    release_buffers()


@pytest.mark.parametrize("world", [2], indirect=True, ids=["2ranks"])
def test_fully_sharded(world: GlooWorld) -> None:
    world.run(_sharded)
