"""The parts of the training job: the text, the model's layers, the optimizer."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from prime_kernels import runtime
from prime_kernels.symm import SymmBuffer
from prime_kernels.train import corpus as corpus_module
from prime_kernels.train.config import TrainConfig
from prime_kernels.train.corpus import (
    MIN_DUPLICATE_CHARS,
    CorpusError,
    bigram_entropy,
    load_corpus,
    sample_windows,
    unigram_entropy,
)
from prime_kernels.train.model import ByteMoE, initialize, rotary_tables, rotate
from prime_kernels.train.optim import Optimizer, fp32_gradient
from prime_kernels.train.parallel import Parallel
from prime_kernels.train.report import final_loss, moving_mean
from prime_kernels.train.trainer import History, printable

ONE_RANK = Parallel(0, 1, None, torch.device("cpu"))


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_device", torch.device("cpu"))


def build(tmp_path: Path, **changes: object) -> tuple[ByteMoE, TrainConfig]:
    settings = {"layers": 2, "experts": 4, "topk": 2, "heads": 4, "kv_heads": 2, "tokens": 64, "seq_len": 32}
    config = TrainConfig(out=tmp_path, **{**settings, **changes})  # type: ignore[arg-type]
    buffer = SymmBuffer(
        None,
        config.experts,
        config.tokens,
        config.topk,
        config.hidden,
        config.intermediate,
        mma_type="bf16xbf16",
    )
    model = ByteMoE(config, buffer, ONE_RANK)
    initialize(model, config, ONE_RANK)
    return model, config


def random_text(config: TrainConfig, seed: int = 0) -> torch.Tensor:
    shape = (config.batch, config.seq_len)
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


def test_entropies_by_hand() -> None:
    assert unigram_entropy(b"aabb") == pytest.approx(math.log(2))
    assert unigram_entropy(b"aaaa") == 0
    assert unigram_entropy(bytes(range(256))) == pytest.approx(math.log(256))
    assert bigram_entropy(b"abababab") == pytest.approx(0)
    # After "a" comes a or b once each, after "b" always a: H = P(a) ln 2 with P(a) = 2/3.
    assert bigram_entropy(b"aaba") == pytest.approx(2 / 3 * math.log(2))


def test_the_held_out_text_is_not_in_the_training_text() -> None:
    corpus = load_corpus(None, min_bytes=1024)
    assert corpus.size > 200_000
    assert 0.05 < corpus.validation.numel() / corpus.size < 0.15
    assert corpus.bigram_entropy < corpus.unigram_entropy < math.log(128)
    train, held_out = (bytes(part.tolist()).decode() for part in (corpus.train, corpus.validation))
    seen = {paragraph.strip() for paragraph in train.split("\n\n")}
    paragraphs = [paragraph.strip() for paragraph in held_out.split("\n\n")]
    long = [paragraph for paragraph in paragraphs if len(paragraph) >= MIN_DUPLICATE_CHARS]
    assert len(long) > 50
    assert not [paragraph for paragraph in long if paragraph in seen]


def test_windows_are_text_and_what_follows() -> None:
    text = torch.arange(100, dtype=torch.uint8)
    inputs, targets = sample_windows(text, 50, 8, torch.Generator().manual_seed(0))
    assert inputs.shape == targets.shape == (50, 8)
    assert torch.equal(inputs + 1, targets)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert int(targets.max()) == 99  # the last byte is reached


def test_a_python_without_topics_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(CorpusError, match="--text FILE"):
        load_corpus(None, min_bytes=1)
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", corpus_module)
    with pytest.raises(CorpusError, match="--text FILE"):
        load_corpus(None, min_bytes=1)


def test_a_text_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("short")
    with pytest.raises(CorpusError, match="longer text"):
        load_corpus(path, min_bytes=64)
    path.write_text(
        "\n\n".join(f"paragraph {i} of a text that is long enough to be split" for i in range(2000))
    )
    corpus = load_corpus(path, min_bytes=64)
    assert corpus.name == str(path)
    assert corpus.size > 100_000


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    cos, sin = rotary_tables(64, 16, torch.device("cpu"))
    query, key = torch.randn(2, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def score(i: int, j: int) -> float:
        return float(
            rotate(query, cos[i].double(), sin[i].double()) @ rotate(key, cos[j].double(), sin[j].double())
        )

    assert score(0, 0) == pytest.approx(float(query @ key))
    assert score(40, 37) == pytest.approx(score(3, 0), rel=1e-5)
    assert score(40, 30) != pytest.approx(score(3, 0), rel=1e-2)


@torch.no_grad()
def test_the_model_sees_the_past_alone(tmp_path: Path) -> None:
    model, config = build(tmp_path)
    text = random_text(config)
    before = model(text)
    assert before.shape == (config.batch, config.seq_len, 256)
    text[:, 20:] = (text[:, 20:] + 1) % 256
    after = model(text)
    torch.testing.assert_close(before[:, :20], after[:, :20], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(before[:, 20:], after[:, 20:], rtol=1e-2, atol=1e-2)


def test_routing_weights_are_normalised_and_balance_is_one_when_even(tmp_path: Path) -> None:
    model, config = build(tmp_path)
    for moe in model.moe_layers():
        moe.record = True
        nn.init.zeros_(moe.router.weight)  # every expert is as likely as every other
    model.train()
    model(random_text(config))
    for moe in model.moe_layers():
        assert moe.call is not None
        torch.testing.assert_close(
            moe.call.topk_weights.sum(-1), torch.ones(config.tokens), rtol=1e-6, atol=1e-6
        )
        assert float(moe.balance_loss.detach()) == pytest.approx(1.0)


def test_untied_head_is_a_matrix_of_its_own(tmp_path: Path) -> None:
    tied, _ = build(tmp_path)
    untied, config = build(tmp_path, untied=True)
    extra = 256 * config.hidden
    count = [sum(p.numel() for p in model.parameters()) for model in (tied, untied)]
    assert count[1] == count[0] + extra
    assert len(untied.expert_parameters()) == 2 * config.layers


def test_weights_do_not_depend_on_how_many_ranks_share_them(tmp_path: Path) -> None:
    whole, config = build(tmp_path)
    gate_up, down = whole.moe_layers()[0].experts.gate_up, whole.moe_layers()[0].experts.down
    for rank in range(2):
        part, _ = build(tmp_path)
        half = config.experts // 2
        for moe in part.moe_layers():  # as on one of two ranks
            moe.experts.gate_up = nn.Parameter(moe.experts.gate_up[:half].clone())
            moe.experts.down = nn.Parameter(moe.experts.down[:half].clone())
        initialize(part, config, Parallel(rank, 2, None, torch.device("cpu")))
        mine = slice(rank * half, (rank + 1) * half)
        assert torch.equal(part.moe_layers()[0].experts.gate_up, gate_up[mine])
        assert torch.equal(part.moe_layers()[0].experts.down, down[mine])
        assert torch.equal(part.embedding.weight, whole.embedding.weight)


def test_the_optimizer_is_adamw_in_fp32(tmp_path: Path) -> None:
    model, config = build(tmp_path, warmup_steps=0, steps=1000, clip_norm=1e9)
    optimizer = Optimizer(model, config, ONE_RANK)
    weight = model.layers[0].attention.query.weight  # type: ignore[union-attr]
    twin = nn.Parameter(weight.detach().clone())
    adamw = torch.optim.AdamW(
        [twin], lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=config.weight_decay
    )
    for step in range(3):
        optimizer.zero_grad()
        weight.grad = torch.full_like(weight, 0.5 + step)
        twin.grad = weight.grad.clone()
        adamw.param_groups[0]["lr"] = optimizer.learning_rate(step)
        optimizer.step(step)
        adamw.step()
    torch.testing.assert_close(weight, twin)


def test_steps_below_a_bf16_weights_last_bit_add_up(tmp_path: Path) -> None:
    model, config = build(tmp_path, learning_rate=1e-4, warmup_steps=0, steps=10_000, weight_decay=0.0)
    optimizer = Optimizer(model, config, ONE_RANK)
    down = model.moe_layers()[0].experts.down
    with torch.no_grad():
        down.fill_(1.0)
    optimizer = Optimizer(model, config, ONE_RANK)
    for step in range(40):  # each moves by about 1e-4, the last bit below 1 is 2^-8
        optimizer.zero_grad()
        down.main_grad.fill_(1.0)  # type: ignore[attr-defined]
        optimizer.step(step)
    assert float(down.detach().float().mean()) == pytest.approx(1 - 40e-4, abs=2**-9)
    assert float(down.detach().float().max()) < 1


def test_gradients_are_clipped_by_their_global_norm(tmp_path: Path) -> None:
    model, config = build(tmp_path, clip_norm=1.0)
    optimizer = Optimizer(model, config, ONE_RANK)
    optimizer.zero_grad()
    for parameter in model.replicated_parameters():
        parameter.grad = torch.ones_like(parameter)
    for parameter in model.expert_parameters():
        parameter.main_grad.fill_(1.0)  # type: ignore[attr-defined]
    count = sum(parameter.numel() for parameter in model.parameters())
    assert optimizer.step(0) == pytest.approx(math.sqrt(count), rel=1e-5)
    clipped = torch.cat([master.grad.flatten() for master in optimizer.masters if master.grad is not None])
    assert clipped.numel() == count
    assert float(clipped.double().norm()) == pytest.approx(1.0, rel=1e-4)


def test_the_learning_rate_warms_up_and_decays(tmp_path: Path) -> None:
    model, config = build(tmp_path, learning_rate=1.0, warmup_steps=10, steps=110)
    rate = Optimizer(model, config, ONE_RANK).learning_rate
    assert rate(0) == pytest.approx(0.1)
    assert rate(9) == pytest.approx(1.0)
    assert rate(60) == pytest.approx(0.55)
    assert rate(110) == pytest.approx(0.1)


def test_a_parameter_without_gradient_counts_as_zero() -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    assert torch.equal(fp32_gradient(parameter), torch.zeros(3))


def test_a_sample_is_safe_to_print() -> None:
    assert printable(b"a line\nand \xc3\xa9") == "a line\nand é"
    assert printable(b"\x1b[2J\x00\r\t\xff") == "\ufffd[2J\ufffd\ufffd\ufffd\ufffd"


@pytest.mark.parametrize(
    ("field", "value"), [("seed", -1), ("seed", 2**32), ("weight_decay", math.nan), ("balance", math.inf)]
)
def test_values_that_no_run_can_use(field: str, value: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"--{field.replace('_', '-')} is {value}; it must"):
        TrainConfig(out=tmp_path, **{field: value}).check(ranks=1)


def test_the_plotted_loss_is_a_centred_mean() -> None:
    assert moving_mean([4.0, 1.0, 4.0, 10.0, 1.0], radius=1) == pytest.approx([4.0, 3.0, 5.0, 5.0, 1.0])
    ramp = [float(i) for i in range(30)]
    assert moving_mean(ramp) == pytest.approx(ramp)  # a straight line is kept, to its ends
    history = History(loss=[(step, float(step)) for step in range(1, 31)])
    assert final_loss(history) == pytest.approx(25.5)
