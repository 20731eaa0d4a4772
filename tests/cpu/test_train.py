"""The training job: it learns, writes its files, tells a wrong gradient, and splits over processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_kernels import custom_ops, runtime
from prime_kernels.train import job
from prime_kernels.train.config import TrainConfig, parse_arguments
from prime_kernels.train.corpus import Corpus, load_corpus
from prime_kernels.train.gradcheck import BF16_LIMIT, KINDS, GradientCheck, relative_norm
from prime_kernels.train.parallel import Parallel
from prime_kernels.train.trainer import Trainer

TINY = [
    "--device", "cpu", "--layers", "1", "--experts", "4", "--topk", "2", "--heads", "2", "--kv-heads", "1",
    "--tokens", "128", "--seq-len", "32", "--warmup", "2", "--eval-every", "4", "--sample-bytes", "8",
]  # fmt: skip
TORCHRUN = [
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
    "-m", "prime_kernels",
]  # fmt: skip
ONE_RANK = Parallel(0, 1, None, torch.device("cpu"))


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets process-wide settings; take them back afterwards."""
    monkeypatch.setattr(runtime, "_backend", None)
    monkeypatch.setattr(runtime, "_device", torch.device("cpu"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", runtime.BACKEND_ENV, runtime.DEVICE_ENV):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus(None, min_bytes=64)


def tiny(*more: str) -> TrainConfig:
    return parse_arguments("train", [*TINY, *more])


def trained(corpus: Corpus, *more: str) -> Trainer:
    config = tiny(*more)
    trainer = Trainer(config, corpus, ONE_RANK)
    for step in range(1, config.steps + 1):
        trainer.step(step)
    return trainer


def losses(trainer: Trainer) -> list[float]:
    return [loss for _, loss in trainer.history.loss]


def test_a_short_run_learns_and_writes_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a folder" / "run"
    assert job.main([*TINY, "--steps", "25", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    record = json.loads((out / "run.json").read_text())
    loss = [value for _, value in record["loss"]]
    assert len(loss) == 25
    assert loss[0] > 5  # about ln 256: nothing known yet
    assert sum(loss[-5:]) / 5 < loss[0] - 1.5
    assert [step for step, _ in record["validation_loss"]] == [4, 8, 12, 16, 20, 24, 25]
    assert record["backend"] == "reference"
    assert 3.0 < record["text"]["unigram_entropy"] < 3.5
    assert record["gradient_check"]["passed"]
    assert set(record["gradient_check"]["errors"]) == set(KINDS)
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert (out / "sample.txt").read_text(encoding="utf-8").rstrip("\n") == record["sample"].rstrip("\n")
    assert record["sample"].startswith("The ")
    lines = printed.out.splitlines()
    (verdict,) = [line for line in lines if line.startswith("final gradients match the float64 reference")]
    assert all(kind in verdict for kind in KINDS)
    assert any(line.startswith("backend") and "reference" in line for line in lines)
    assert f"{record['text']['unigram_entropy']:.3f}" in printed.out
    assert "loss.png" in lines[-1]
    assert "25/25" in printed.err  # the progress bar


def test_the_seed_decides_everything(corpus: Corpus) -> None:
    first, again = trained(corpus, "--steps", "3"), trained(corpus, "--steps", "3")
    other = trained(corpus, "--steps", "3", "--seed", "1")
    assert losses(first) == losses(again)
    assert first.sample() == again.sample()
    assert losses(first) != losses(other)


def backward_with(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[..., None]:
    """The backward of the kernels, with `change` applied to its outputs."""
    genuine = custom_ops.bf16_mega_moe_backward

    def backward(dx: Any, dw1: Any, dw2: Any, dtopk: Any, *rest: Any, **named: Any) -> None:
        genuine(dx, dw1, dw2, dtopk, *rest, **named)
        change({"dx": dx, "dgate_up": dw1, "ddown": dw2, "dtopk": dtopk})

    return backward


@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_gradient_error_is_told(kind: str, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        custom_ops, "bf16_mega_moe_backward", backward_with(lambda grads: grads[kind].mul_(1.01))
    )
    check = trained(corpus, "--steps", "1", "--layers", "2").check_gradients()
    assert not check.passed
    assert min(check.errors[kind]) > BF16_LIMIT
    others = [error for other in KINDS if other != kind for error in check.errors[other]]
    assert max(others) <= BF16_LIMIT
    assert "DO NOT MATCH" in check.line()


def test_one_lost_row_fails_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        custom_ops, "bf16_mega_moe_backward", backward_with(lambda grads: grads["dx"][:1].zero_())
    )
    assert job.main([*TINY, "--steps", "2", "--out", str(tmp_path)]) == 1
    assert "final gradients DO NOT MATCH" in capsys.readouterr().out
    assert json.loads((tmp_path / "run.json").read_text())["gradient_check"]["passed"] is False


def test_a_loss_that_is_not_finite_fails_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert job.main([*TINY, "--steps", "6", "--lr", "1e30", "--out", str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert "loss is nan at step" in message
    assert "--lr" in message


def test_gradient_check_judges_nan_and_zero() -> None:
    zero, one, nan = torch.zeros(2), torch.ones(2, dtype=torch.float64), torch.tensor([float("nan"), 1.0])
    assert relative_norm(zero, zero.double()) == 0.0
    assert relative_norm(one, zero.double()) == float("inf")
    assert relative_norm(1.5 * one, one) == pytest.approx(0.5)
    check = GradientCheck({"dx": [0.0, relative_norm(nan, one)]})
    assert not check.passed
    assert "(layer 1)" in check.line()


BAD_ARGUMENTS = [
    (["--experts", "5"], ["--experts 5", "2 ranks", "multiple of 2"], "2"),
    (["--tokens", "96"], ["--tokens 96", "multiple of 64"], "2"),
    (["--tokens", "100"], ["--tokens 100", "multiple of 32"], "1"),
    (["--hidden", "300"], ["--hidden 300", "multiple of 64 and at least 256", "320"], "1"),
    (["--hidden", "192"], ["--hidden 192", "256"], "1"),
    (["--intermediate", "100"], ["--intermediate 100", "multiple of 64", "128"], "1"),
    (["--topk", "5"], ["--topk 5", "more than 4"], "1"),
    (["--topk", "9", "--experts", "16"], ["--topk 9", "more than 8"], "1"),
    (["--heads", "3"], ["--heads 3", "--hidden 256"], "1"),
    (["--heads", "4", "--kv-heads", "3"], ["--kv-heads 3", "--heads 4"], "1"),
    (["--steps", "0"], ["--steps is 0", "at least 1"], "1"),
    (["--lr", "nan"], ["--lr is nan", "positive"], "1"),
    (["--balance", "-1"], ["--balance is -1", "negative"], "1"),
    (["--prompt", ""], ["--prompt is empty"], "1"),
    (["--text", "no-such-file"], ["--text no-such-file", "No such file"], "1"),
    (["--backend", "sm90"], ["sm90", "set_backend"], "1"),
    (["--out", "/dev/null/x"], ["--out /dev/null/x", "choose another folder"], "1"),
]


@pytest.mark.parametrize(("words", "parts", "ranks"), BAD_ARGUMENTS, ids=lambda value: " ".join(value))
def test_bad_arguments_name_value_limit_and_fix(
    words: list[str],
    parts: list[str],
    ranks: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", ranks)
    assert job.main([*TINY, "--out", str(tmp_path), *words]) == 2
    message = capsys.readouterr().err
    assert all(part in message for part in parts), message
    assert len(message.strip().splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_asking_for_a_gpu_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert job.main([*TINY, "--out", str(tmp_path), "--device", "cuda"]) == 2
    assert "--device cpu" in capsys.readouterr().err


def test_the_reference_on_a_gpu_without_a_kernel_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device, mma_type: str) -> str:
        raise RuntimeError("this GPU is SM80")

    monkeypatch.setattr(job, "resolve_backend", refuse)
    backend = job.choose_backend("auto", torch.device("cuda", 0))
    assert (backend.name, runtime.get_backend()) == ("reference", "reference")
    assert "this GPU is SM80" in backend.reason
    assert "not a kernel" in job.describe_backend(backend)
    monkeypatch.setattr(runtime, "_backend", None)
    with pytest.raises(RuntimeError, match="SM80"):
        job.choose_backend("sm90", torch.device("cuda", 0))
    monkeypatch.setattr(runtime, "_backend", None)
    monkeypatch.setenv(runtime.BACKEND_ENV, "sm90")
    with pytest.raises(RuntimeError, match="SM80"):
        job.choose_backend("auto", torch.device("cuda", 0))


def test_two_processes_train_what_one_trains(tmp_path: Path) -> None:
    words = [*TINY, "--layers", "2", "--steps", "5"]
    assert job.main([*words, "--out", str(tmp_path / "one")]) == 0
    done = subprocess.run(
        [*TORCHRUN, "train", *words, "--out", str(tmp_path / "two")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    one, two = (json.loads((tmp_path / name / "run.json").read_text()) for name in ("one", "two"))
    assert (one["ranks"], two["ranks"]) == (1, 2)
    assert one["parameters"] == two["parameters"]
    assert one["active_parameters"] == two["active_parameters"]
    # Same weights, same batches: the runs differ by the order of sums alone.
    for name in ("loss", "validation_loss", "gradient_norm"):
        first, second = torch.tensor(one[name]), torch.tensor(two[name])
        torch.testing.assert_close(first, second, rtol=2e-3, atol=0)
    assert two["gradient_check"]["passed"]
    assert done.stdout.count("final gradients match") == 1  # rank 0 alone reports


def test_two_processes_refuse_experts_they_cannot_share(tmp_path: Path) -> None:
    done = subprocess.run(
        [*TORCHRUN, "train", *TINY, "--experts", "5", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0
    # The first rank that fails makes torchrun end the others, with or without their line.
    lines = [line for line in done.stderr.splitlines() if "--experts 5 cannot be spread evenly" in line]
    told = {line.partition("--experts")[0] for line in lines}
    assert told
    assert told <= {f"{job.PROG}: rank {rank}: " for rank in range(2)}
    assert len(told) == len(lines)


WRONG_AND_SLOW_TO_WRITE = """
import sys, time
from prime_kernels.train import job, report
from prime_kernels.train.gradcheck import GradientCheck

def write(*arguments, genuine=report.write):
    time.sleep(2)
    return genuine(*arguments)

report.write = write
GradientCheck.passed = property(lambda self: False)
sys.exit(job.main(sys.argv[1:]))
"""


def test_two_processes_that_fail_still_write_and_say_everything(tmp_path: Path) -> None:
    """Rank 1 knows of the failure before rank 0 has written; torchrun ends both when one leaves."""
    script = tmp_path / "wrong.py"
    script.write_text(WRONG_AND_SLOW_TO_WRITE)
    command = [*TORCHRUN[:-2], script, *TINY, "--steps", "1", "--out", tmp_path / "out"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(Path(job.__file__).resolve().parents[2])},
    )  # fmt: skip
    assert done.returncode != 0
    assert (tmp_path / "out" / "run.json").exists(), done.stderr
    assert done.stdout.count("final gradients DO NOT MATCH") == 1
