"""`prime_kernels.integrations.transformers` on tiny random models of the real library."""

from __future__ import annotations

import copy
import io
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_world import GlooWorld
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers_cases import (
    BATCH,
    COMMON,
    CONFIGS,
    EXPERTS,
    LAYERS,
    SEQUENCE,
    TOP_K,
    CountedCalls,
    assert_as_near_as_the_library,
    choosing_all,
    deepseek_v3,
    distance,
    experts_of,
    gpt_oss,
    make_batch,
    make_model,
    mixtral,
    qwen3,
    run,
    transformers,
)

from prime_kernels.integrations import transformers as integration
from prime_kernels.integrations.transformers import apply, build_buffers, revert
from prime_kernels.module import release_buffers

pytestmark = pytest.mark.usefixtures("no_shared_buffers")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "transformers_qwen3_moe.py"

TOKENS = BATCH * SEQUENCE

# Relative Frobenius norm: the same formula in another order of summation.
FP32_TOLERANCE = 2e-5


def make_pair(config: Any, dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[Any, Any]:
    """A model with the library's experts, and its copy with ours."""
    reference = make_model(config, dtype)
    model = copy.deepcopy(reference)
    apply(model, max_tokens_per_rank=TOKENS, **settings)
    return reference, model


def assert_same(model: Any, reference: Any, output: Any, expected: Any) -> None:
    """Loss, logits and every gradient."""
    assert distance(output.loss, expected.loss) < FP32_TOLERANCE
    assert distance(output.logits, expected.logits) < FP32_TOLERANCE
    pairs = dict(reference.named_parameters())
    assert len(pairs) > 10
    for name, parameter in model.named_parameters():
        assert distance(parameter.grad, pairs[name].grad) < FP32_TOLERANCE, name


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> CountedCalls:
    return CountedCalls(monkeypatch)


# ---- the same results as the library


@pytest.mark.parametrize("keep", [None, "z"])
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_loss_and_every_gradient(family: str, keep: str | None, calls: CountedCalls) -> None:
    reference, model = make_pair(CONFIGS[family](), keep=keep)
    assert_same(model, reference, run(model), run(reference))
    assert calls.count == len(experts_of(model)) > 0


def test_router_settings_stay_the_librarys() -> None:
    for config in (
        qwen3(norm_topk_prob=False),
        deepseek_v3(norm_topk_prob=False, routed_scaling_factor=0.3, n_group=1, topk_group=1),
        mixtral(num_experts_per_tok=1),
    ):
        reference, model = make_pair(config)
        assert_same(model, reference, run(model), run(reference))


@pytest.mark.parametrize("family", CONFIGS)
def test_bf16_is_as_near_to_fp32_as_the_library(family: str) -> None:
    library, model = make_pair(choosing_all(family), torch.bfloat16)
    exact = copy.deepcopy(library).float()
    outputs = (run(model), run(library), run(exact))
    assert outputs[0].logits.dtype == torch.bfloat16
    assert_as_near_as_the_library((model, library, exact), outputs)


def test_autocast() -> None:
    """fp32 weights inside autocast: bf16 experts, fp32 gradients, near to those of fp32."""
    reference, model = make_pair(qwen3(num_experts_per_tok=EXPERTS))
    with torch.autocast("cpu", torch.bfloat16):
        output = model(**make_batch())
    output.loss.backward()
    expected = run(reference)
    assert distance(output.logits, expected.logits) < 0.03
    for module, twin in zip(experts_of(model), experts_of(reference), strict=True):
        assert module.gate_up_proj.grad.dtype == torch.float32
        assert 0 < distance(module.gate_up_proj.grad, twin.gate_up_proj.grad) < 0.05


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool, calls: CountedCalls) -> None:
    # Through a reentrant one the library's auxiliary loss has no gradients.
    reference, model = make_pair(qwen3(output_router_logits=not reentrant))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same(model, reference, run(model, use_cache=False), run(reference))
    assert calls.count == 2 * LAYERS


def test_an_optimizer_step() -> None:
    pair = make_pair(qwen3())
    for model in pair:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        run(model)
        optimizer.step()
        optimizer.zero_grad()
    reference, model = pair
    before = dict(make_model(qwen3()).named_parameters())
    for name, parameter in reference.named_parameters():
        assert distance(dict(model.named_parameters())[name], parameter) < FP32_TOLERANCE
        assert not torch.equal(parameter, before[name]), name
    assert_same(model, reference, run(model), run(reference))


def test_frozen_experts() -> None:
    reference, model = make_pair(qwen3())
    for module in experts_of(model):
        module.requires_grad_(False)
    run(model), run(reference)
    assert all(module.gate_up_proj.grad is None for module in experts_of(model))
    for block, twin in zip(blocks_of(model), blocks_of(reference), strict=True):
        assert distance(block.gate.weight.grad, twin.gate.weight.grad) < FP32_TOLERANCE


def blocks_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "gate") and hasattr(module, "experts")]


def test_compiled() -> None:
    reference, model = make_pair(qwen3(num_hidden_layers=1))
    build_buffers(model)
    for module in experts_of(model):
        module.compile(backend="aot_eager", fullgraph=True)
    assert_same(model, reference, run(model), run(reference))


def test_layers_of_one_shape_have_one_buffer() -> None:
    _, model = make_pair(qwen3())
    (buffer,) = build_buffers(model)
    buffer.check()
    assert build_buffers(model) == [buffer]
    assert buffer.num_max_tokens_per_rank == TOKENS


def test_compiled_before_there_is_a_buffer() -> None:
    _, model = make_pair(qwen3(num_hidden_layers=1))
    experts_of(model)[0].compile(backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"no buffer yet; call build_buffers\(model\)"):
        run(model)


# ---- generating and files


def layout_of(model: nn.Module) -> dict[str, Any]:
    return {name: (value.shape, value.dtype, value.data_ptr()) for name, value in model.state_dict().items()}


def test_generate(calls: CountedCalls) -> None:
    reference, model = make_pair(qwen3(output_router_logits=False))
    prompt = make_batch()["input_ids"][:, :4]
    settings = {"max_new_tokens": 5, "do_sample": False}
    settings |= {"output_logits": True, "return_dict_in_generate": True}
    generated, expected = (m.eval().generate(prompt, **settings) for m in (model, reference))
    assert torch.equal(generated.sequences, expected.sequences)
    assert generated.sequences.shape == (BATCH, 4 + 5)
    for ours, theirs in zip(generated.logits, expected.logits, strict=True):
        assert distance(ours, theirs) < FP32_TOLERANCE
    assert calls.count == 5 * LAYERS


@pytest.mark.parametrize("family", CONFIGS)
def test_state_dict_is_the_librarys(family: str) -> None:
    model = make_model(CONFIGS[family]())
    before = layout_of(model)
    parameters = list(model.parameters())
    apply(model, max_tokens_per_rank=TOKENS)
    run(model)
    assert layout_of(model) == before
    assert all(ours is theirs for ours, theirs in zip(model.parameters(), parameters, strict=True))


@pytest.mark.parametrize("family", CONFIGS)
def test_save_and_load(family: str, tmp_path: Path) -> None:
    """A checkpoint of a switched model is one of the library's, and the other way round."""
    reference, model = make_pair(CONFIGS[family]())
    expected = model.eval()(**make_batch()).logits
    reference.save_pretrained(tmp_path / "library")
    model.save_pretrained(tmp_path / "ours")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "ours" / file).read_bytes() == (tmp_path / "library" / file).read_bytes()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    assert distance(loaded(**make_batch()).logits, expected) < FP32_TOLERANCE
    apply(loaded, max_tokens_per_rank=TOKENS)
    assert torch.equal(loaded(**make_batch()).logits, expected)


def test_deepcopy_and_pickle(calls: CountedCalls) -> None:
    _, model = make_pair(qwen3())
    file = io.BytesIO()
    torch.save(model, file)  # the library's models cannot be pickled any more once they have run
    expected = model(**make_batch()).logits
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        calls.count = 0
        assert torch.equal(twin(**make_batch()).logits, expected)
        assert calls.count == LAYERS
        revert(twin)
        assert all(module.config is twin.config for module in experts_of(twin))
        assert distance(twin(**make_batch()).logits, expected) < FP32_TOLERANCE
        assert calls.count == LAYERS


# ---- switching


def test_revert(calls: CountedCalls) -> None:
    reference, model = make_pair(qwen3())
    names = [f"model.layers.{layer}.mlp.experts" for layer in range(LAYERS)]
    attributes = [set(vars(module)) for module in experts_of(reference)]
    assert revert(model) == names
    assert [set(vars(module)) for module in experts_of(model)] == attributes
    expected = run(reference)
    output = run(model)
    assert calls.count == 0
    assert torch.equal(output.logits, expected.logits)
    with pytest.raises(ValueError, match="no experts module of this Qwen3MoeForCausalLM is switched over"):
        revert(model)
    assert apply(model, max_tokens_per_rank=TOKENS) == names
    model.zero_grad()
    assert_same(model, reference, run(model), expected)
    with pytest.raises(RuntimeError, match=r"layers.0.mlp.experts.*switched over already; call revert"):
        apply(model, max_tokens_per_rank=TOKENS)


def test_models_of_one_config_object(calls: CountedCalls) -> None:
    config = qwen3()
    torch.manual_seed(0)
    first, second, third = (transformers.Qwen3MoeForCausalLM(config) for _ in range(3))
    references = [copy.deepcopy(model) for model in (first, second, third)]
    apply(first, max_tokens_per_rank=TOKENS)
    apply(second, keep="z", max_tokens_per_rank=TOKENS + 1)
    outputs = [run(model) for model in (first, second, third)]
    assert calls.count == 2 * LAYERS  # third's experts are the library's
    expected = [run(model) for model in references]
    revert(second)
    second.zero_grad()
    outputs[1] = run(second)
    assert calls.count == 2 * LAYERS
    for model, reference, output, theirs in zip(
        (first, second, third), references, outputs, expected, strict=True
    ):
        assert_same(model, reference, output, theirs)
    # A model made from the config of one that is switched over is the library's.
    transformers.Qwen3MoeForCausalLM(first.config)(**make_batch())
    assert calls.count == 2 * LAYERS


def test_two_models_between_forward_and_backward() -> None:
    """Buffers are shared, nothing in them is: F1 F2 B1 B2."""
    first, reference = make_model(qwen3()), make_model(qwen3())
    second, second_reference = make_model(mixtral(), seed=5), make_model(mixtral(), seed=5)
    for model in (first, second):
        apply(model, max_tokens_per_rank=TOKENS)
    outputs = [model(**make_batch()) for model in (first, second)]
    for output in outputs:
        output.loss.backward()
    assert_same(first, reference, outputs[0], run(reference))
    assert_same(second, second_reference, outputs[1], run(second_reference))


# ---- refusals


def test_gpt_oss_is_refused_with_the_reasons() -> None:
    model = make_model(gpt_oss())
    state = set(vars(experts_of(model)[0]))
    with pytest.raises(ValueError, match=r"bias-free SwiGLU") as raised:
        apply(model, max_tokens_per_rank=TOKENS)
    text = str(raised.value)
    for layer in range(LAYERS):
        assert f"model.layers.{layer}.mlp.experts (GptOssExperts): " in text
    for reason in ("projections have biases", "transposed", "interleaved", "GptOssExperts._apply_gate"):
        assert reason in text
    assert set(vars(experts_of(model)[0])) == state
    run(model)


def test_other_activations_are_refused() -> None:
    model = make_model(qwen3(hidden_act="gelu"))
    with pytest.raises(ValueError, match=r"layers.0.mlp.experts \(Qwen3MoeExperts\): its activation is GELU"):
        apply(model, max_tokens_per_rank=TOKENS)


def test_silu_as_a_function() -> None:
    """As LFM2-MoE has it."""
    reference = make_model(qwen3())
    model = copy.deepcopy(reference)
    for module in experts_of(model):
        del module.act_fn
        module.act_fn = nn.functional.gelu
    with pytest.raises(ValueError, match="its activation is gelu, not SiLU"):
        apply(model, max_tokens_per_rank=TOKENS)
    for module in experts_of(model):
        module.act_fn = nn.functional.silu
    apply(model, max_tokens_per_rank=TOKENS)
    assert distance(run(model).logits, run(reference).logits) < FP32_TOLERANCE


def test_float16_is_refused() -> None:
    with pytest.raises(ValueError, match=r"its gate_up_proj is torch.float16, needs torch.bfloat16"):
        apply(make_model(qwen3(), torch.float16), max_tokens_per_rank=TOKENS)


def test_the_librarys_own_parallelism_is_refused() -> None:
    model = make_model(qwen3())
    experts_of(model)[1]._is_hooked = True  # as its tensor and expert parallelism mark a module
    with pytest.raises(ValueError, match=r"Not possible here: model.layers.1.*parallelism is on") as raised:
        apply(model, max_tokens_per_rank=TOKENS)
    assert "layers.0" not in str(raised.value)


def test_a_model_without_experts_is_refused() -> None:
    small = {key: COMMON[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")}
    dense = make_model(transformers.LlamaConfig(**small, intermediate_size=96, num_attention_heads=4))
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts module"):
        apply(dense, max_tokens_per_rank=TOKENS)


def test_wrong_settings() -> None:
    model = make_model(qwen3())
    for precision in ("fp8", "fp8_bwd", "mxfp8"):
        with pytest.raises(RuntimeError, match=f'no kernel for precision "{precision}"'):
            apply(model, precision=precision, max_tokens_per_rank=TOKENS)
    with pytest.raises(ValueError, match="unknown precision 'int4'"):
        apply(model, precision="int4", max_tokens_per_rank=TOKENS)
    with pytest.raises(ValueError, match=r"layers.0.mlp.experts.*keep"):
        apply(model, keep="y", max_tokens_per_rank=TOKENS)
    with pytest.raises(ValueError, match="no experts module of this Qwen3MoeForCausalLM is switched over"):
        build_buffers(model)
    apply(model, max_tokens_per_rank=TOKENS - 1)
    with pytest.raises(RuntimeError, match=f"sized for {TOKENS - 1} tokens/rank, got {TOKENS}"):
        model(**make_batch())


def test_selected_by_name_without_apply() -> None:
    make_pair(qwen3())
    other = make_model(qwen3())
    other.set_experts_implementation(integration.IMPLEMENTATION)
    with pytest.raises(RuntimeError, match=r"apply\(model, ...\), which was not called on this Qwen3Moe"):
        other(**make_batch())


# ---- the example


def test_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(EXAMPLE))
    losses = example["main"](["--steps", "12", "--save", str(tmp_path)])
    assert losses[-1] < 0.8 * losses[0]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "computed by mega_moe: model.layers.0.mlp.experts, model.layers.1.mlp.experts"
    assert lines[-1].startswith("hijkl")
    assert len(lines[-1]) == 5 + 8
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.num_experts == 8


# ---- expert parallel


def _expert_parallel(rank: int, size: int, folder: Path) -> None:
    reference = make_model(mixtral(num_experts_per_tok=TOP_K, router_aux_loss_coef=0.0))
    model = copy.deepcopy(reference)
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    group = dist.new_group(list(range(size)))
    apply(model, group, max_tokens_per_rank=TOKENS)
    assert {name: value.shape for name, value in model.state_dict().items()} == shapes
    # Ranks have batches of different sizes; the experts' gradients are those of all of them.
    counts = (2, 1)
    for member in range(size):
        expected = reference(**make_batch(member, counts[member]))
        expected.loss.backward()
        if member == rank:
            output = model(**make_batch(member, counts[member]))
            output.loss.backward()
            assert distance(output.logits, expected.logits) < FP32_TOLERANCE
    for module, twin in zip(experts_of(model), experts_of(reference), strict=True):
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(module, name)
            assert weight.to_local().shape[0] == EXPERTS // size
            assert distance(weight.grad.full_tensor(), getattr(twin, name).grad) < FP32_TOLERANCE
    first = experts_of(model)[0].down_proj
    first.main_grad = torch.zeros_like(first.to_local())
    wanted, first.grad = first.grad, None
    model(**make_batch(rank, counts[rank])).loss.backward()
    assert first.grad is None
    assert distance(first.main_grad, wanted.to_local()) < FP32_TOLERANCE
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    model.save_pretrained(folder, state_dict=whole)  # by the first rank alone, as the library does
    dist.barrier()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for parameter, twin in zip(loaded.parameters(), reference.parameters(), strict=True):
        assert torch.equal(parameter, twin)
    with torch.no_grad():
        for module in experts_of(model):
            module.down_proj.mul_(2)
    revert(model)
    for (name, parameter), twin in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert type(parameter) is nn.Parameter
        assert torch.equal(parameter, 2 * twin if name.endswith("down_proj") else twin), name
    with pytest.raises(ValueError, match=r"num_experts is 3, needs a multiple of the group's 2 ranks"):
        apply(make_model(mixtral(num_local_experts=3)), group, max_tokens_per_rank=TOKENS)
    release_buffers()


@pytest.mark.parametrize("world", [2], indirect=True, ids=["2ranks"])
def test_expert_parallel(world: GlooWorld, tmp_path: Path) -> None:
    world.run(_expert_parallel, tmp_path)


def _sharded(rank: int, size: int) -> None:
    """FSDP2 over data parallel ranks, each with all experts."""
    alone = [dist.new_group([member]) for member in range(size)][rank]
    reference = make_model(qwen3())
    model = copy.deepcopy(reference)
    apply(model, alone, max_tokens_per_rank=TOKENS)
    mesh = DeviceMesh("cpu", list(range(size)))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for member in range(size):
        expected = reference(**make_batch(member))
        (expected.loss / size).backward()
        if member == rank:
            output = model(**make_batch(member))
            output.loss.backward()
            assert distance(output.logits, expected.logits) < FP32_TOLERANCE
    for (name, parameter), twin in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert distance(parameter.grad.full_tensor(), twin.grad) < FP32_TOLERANCE, name
    release_buffers()


@pytest.mark.parametrize("world", [2], indirect=True, ids=["2ranks"])
def test_fully_sharded(world: GlooWorld) -> None:
    world.run(_sharded)
