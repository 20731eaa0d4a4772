"""`warmup`: which kernels a model needs, and filling a cache with no GPU."""

from __future__ import annotations

import dataclasses
import re
import time
from pathlib import Path

import pytest
from jit_helpers import tiny_source

from prime_kernels import cli, warmup
from prime_kernels.jit import KernelCache, ToolchainError, compile_kernel, keys
from prime_kernels.models import MODELS, model_shape


@pytest.fixture
def tiny_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two small kernels in place of those of a model."""
    group = warmup.KernelGroup(
        "two small kernels", lambda shape, ep: (tiny_source(1), tiny_source(ep)), run=True
    )
    monkeypatch.setattr(warmup, "MANIFEST", {("sm_90a", "bf16"): (group,)})


def run(*arguments: str | Path) -> int:
    return cli.main(["warmup", *(str(argument) for argument in arguments)])


def test_public_shapes():
    assert (MODELS["qwen3-30b-a3b"].hidden, MODELS["qwen3-30b-a3b"].intermediate) == (2048, 768)
    shape = model_shape("Qwen3-235B-A22B")
    assert (shape.hidden, shape.intermediate, shape.num_experts, shape.top_k) == (4096, 1536, 128, 8)
    shape = model_shape("deepseek-v3")
    assert (shape.hidden, shape.intermediate, shape.num_experts, shape.top_k) == (7168, 2048, 256, 8)
    assert all(name == shape.name for name, shape in MODELS.items())
    with pytest.raises(ValueError, match=r"unknown model 'qwen9'.*qwen3-30b-a3b"):
        model_shape("qwen9")
    with pytest.raises(ValueError, match="128 experts, which 3 ranks cannot share"):
        MODELS["qwen3-30b-a3b"].experts_per_rank(3)


def test_every_entry_of_the_manifest_yields_sources_for_its_architecture():
    for arch, precision in warmup.MANIFEST:
        sources = warmup.kernel_sources("qwen3-30b-a3b", 8, precision, arch)
        assert sources
        assert {source.arch for source in sources} == {arch}
        assert len(set(sources)) == len(sources)


def test_mega_moe_kernels_with_the_limit_of_the_model():
    for clamp, text in ((None, "2048, 768, false"), (10.0, "2048, 768, true")):
        shape = dataclasses.replace(MODELS["qwen3-30b-a3b"], activation_clamp=clamp)
        count, place, *kernels = warmup._mega_moe(shape, 8)
        assert [count.name, place.name] == ["route_plan_count", "route_plan_place"]
        for keeps_z, (forward, backward) in (("false", kernels[:2]), ("true", kernels[2:])):
            assert f"ForwardConfig<{text}, {keeps_z}," in forward.entry
            assert f"BackwardConfig<{text}, {keeps_z}," in backward.entry


def test_a_model_the_mega_moe_kernels_do_not_take_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(warmup, "_compile_one", lambda source, cache_dir, aot_dir: (True, source.name))
    without = "without the BF16 Mega MoE forward and backward: "
    for sizes, reason in (
        ({"hidden": 192}, "H is 192, they need a multiple of 64 and at least 256"),
        ({"intermediate": 736}, "I is 736, they need a multiple of 64"),
    ):
        monkeypatch.setitem(MODELS, "other", dataclasses.replace(MODELS["qwen3-30b-a3b"], **sizes))
        assert run("other:8:bf16:sm_90a", "--cache-dir", tmp_path) == warmup.EXIT_OK
        printed = capsys.readouterr().out
        assert without + reason in printed
        assert "forward_sm90_bf16" not in printed
    for model in ("qwen3-30b-a3b", "gpt-oss-20b"):
        assert run(f"{model}:8:bf16:sm_90a", "--cache-dir", tmp_path) == warmup.EXIT_OK
        assert {"forward_sm90_bf16", "backward_sm90_bf16"} <= set(capsys.readouterr().out.split())


def test_report_tells_the_kernels_apart():
    for arch, precision in warmup.MANIFEST:
        sources = {
            source
            for model in ("qwen3-30b-a3b", "deepseek-v3")
            for source in warmup.kernel_sources(model, 8, precision, arch)
        }
        told = {warmup.describe(source) for source in sources}
        assert len(told) == len(sources)
        assert max(map(len, told)) <= warmup.NAME_WIDTH
    shape = dataclasses.replace(MODELS["qwen3-30b-a3b"], activation_clamp=10.0)
    told = [warmup.describe(source) for source in warmup._mega_moe(shape, 8)]
    assert "backward_sm90_bf16 H 2048, I 768, clamped" in told
    assert "forward_sm90_bf16 H 2048, I 768, clamped, z kept" in told
    (forward,) = warmup.kernel_sources("qwen3-30b-a3b", 8, "fp8", "sm_90a")
    assert warmup.describe(forward) == f"{forward.name} H 2048, I 768"
    gemms = [warmup.describe(source) for source in warmup._grouped_gemms(shape, 8)]
    assert "m_grouped_nt_bf16_gemm N 1536, K 2048" in gemms
    assert "k_grouped_tn_bf16_gemm M 2048, N 768, added to C" in gemms


def test_kernels_that_never_run_say_so():
    for groups in warmup.MANIFEST.values():
        for group in groups:
            assert group.run != group.description.endswith("compiled, never run")


def test_unknown_precision_and_architecture_are_named():
    with pytest.raises(ValueError, match=r"'fp4' on 'sm_90a'.*sm_90a bf16"):
        warmup.kernel_sources("qwen3-30b-a3b", 8, "fp4", "sm_90a")
    with pytest.raises(ValueError, match="'bf16' on 'sm_80'"):
        warmup.kernel_sources("qwen3-30b-a3b", 8, "bf16", "sm_80")


@pytest.mark.parametrize("text", ["qwen3-30b-a3b", "a:b:c:d", "a:1:bf16", "a:1:bf16:sm_90a:x"])
def test_malformed_targets(text):
    with pytest.raises(ValueError, match="MODEL:EP:PRECISION:ARCH"):
        warmup.Target.parse(text)


@pytest.mark.compile
@pytest.mark.usefixtures("tiny_kernels")
def test_fills_a_directory_and_finds_it_filled(tmp_path, capsys):
    directory = tmp_path / "a cache"
    options = ("--model", "qwen3-30b-a3b", "--ep", "8", "--precision", "bf16", "--arch", "sm_90a")
    assert run(*options, "--cache-dir", directory) == warmup.EXIT_OK
    first = capsys.readouterr().out
    assert str(directory) in first
    assert len(re.findall(r"compiled in .* registers, 0 B stack, no spills", first)) == 2
    assert len(KernelCache(directory).entries()) == 2
    assert run(*options, "--cache-dir", directory, "--jobs", "1") == warmup.EXIT_OK
    assert capsys.readouterr().out.count("found (cache)") == 2
    # What it filled is what a training process looks for.
    assert compile_kernel(tiny_source(8), cache_dir=directory).origin == "cache"


@pytest.mark.compile
@pytest.mark.usefixtures("tiny_kernels")
def test_several_targets_share_kernels(tmp_path):
    targets = ("qwen3-30b-a3b:4:bf16:sm_90a", "deepseek-v3:8:bf16:sm_90a")
    assert run(*targets, "--cache-dir", tmp_path) == warmup.EXIT_OK
    assert len(KernelCache(tmp_path).entries()) == 3


@pytest.mark.compile
@pytest.mark.usefixtures("tiny_kernels")
def test_cubins_for_a_wheel(tmp_path):
    assert (
        run("qwen3-30b-a3b:1:bf16:sm_90a", "--cache-dir", tmp_path / "c", "--aot-dir", tmp_path / "aot") == 0
    )
    (shipped,) = KernelCache(tmp_path / "aot").entries()
    assert keys.source_key(tiny_source(1)) in shipped.name


@pytest.mark.compile
@pytest.mark.usefixtures("tiny_kernels")
def test_a_directory_that_cannot_be_written_is_a_failure(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="cannot be used"):
        code = run("qwen3-30b-a3b:8:bf16:sm_90a", "--cache-dir", tmp_path / "file")
    assert code == warmup.EXIT_FAILED
    assert capsys.readouterr().err.count("could not be written") == 2
    assert (
        run("qwen3-30b-a3b:8:bf16:sm_90a", "--cache-dir", tmp_path / "c", "--aot-dir", tmp_path / "file") == 1
    )


@pytest.mark.compile
def test_a_kernel_that_does_not_compile_fails_and_the_others_are_stored(tmp_path, monkeypatch, capsys):
    broken = tiny_source(1, name="broken", include_dir=tmp_path / "empty")
    group = warmup.KernelGroup("one good, one broken", lambda shape, ep: (broken, tiny_source(1)), run=True)
    monkeypatch.setattr(warmup, "MANIFEST", {("sm_90a", "bf16"): (group,)})
    assert run("--model", "qwen3-30b-a3b", "--cache-dir", tmp_path / "c") == warmup.EXIT_FAILED
    captured = capsys.readouterr()
    assert "value.h" in captured.err
    assert "compiled in" in captured.out
    assert len(KernelCache(tmp_path / "c").entries()) == 1


def test_nothing_else_is_compiled_after_an_interruption(tmp_path, monkeypatch):
    started = []

    def interrupted(source, cache_dir, aot_dir):
        started.append(source)
        time.sleep(0.2)
        raise KeyboardInterrupt

    monkeypatch.setattr(warmup, "_compile_one", interrupted)
    target = warmup.Target("qwen3-30b-a3b", 8, "bf16", "sm_90a")
    assert len(warmup.kernel_sources(target.model, target.ep, target.precision, target.arch)) > 2
    with pytest.raises(KeyboardInterrupt):
        warmup.warm_up([target], cache_dir=tmp_path)
    assert len(started) <= 2  # the second may have begun before the first was seen to fail


def test_arguments_that_cannot_work(capsys):
    assert run("--model", "qwen9") == warmup.EXIT_USAGE
    assert "unknown model" in capsys.readouterr().err
    assert run("--model", "gpt-oss-20b", "--precision", "fp8") == warmup.EXIT_USAGE
    assert "hidden in multiples of 512, got 2880" in capsys.readouterr().err
    assert run("--model", "qwen3-30b-a3b", "--ep", "5") == warmup.EXIT_USAGE
    assert "5 ranks cannot share" in capsys.readouterr().err
    for arguments in (
        (),
        ("--model", "olmoe-1b-7b", "olmoe-1b-7b:1:bf16:sm_90a"),
        ("--model", "x", "--jobs", "0"),
    ):
        with pytest.raises(SystemExit) as caught:
            run(*arguments)
        assert caught.value.code == warmup.EXIT_USAGE


def test_missing_compiler_is_reported_once(tmp_path, monkeypatch, capsys):
    def missing(source, cache_dir):
        raise ToolchainError("install this and that")

    monkeypatch.setattr(warmup, "compile_kernel", missing)
    assert run("qwen3-30b-a3b:8:bf16:sm_90a", "--cache-dir", tmp_path) == warmup.EXIT_USAGE
    assert capsys.readouterr().err.count("install this and that") == 1


@pytest.mark.compile
def test_cubins_for_a_wheel_are_reproducible(tmp_path):
    for name in ("first", "second"):
        warmup.write_aot([tiny_source(7)], tmp_path / name, cache_dir=tmp_path / f"cache of {name}")
    files = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert {Path(name).suffix for name in files} == {".cubin", ".json"}
    for name in files:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
        assert str(tmp_path).encode() not in (tmp_path / "first" / name).read_bytes()
