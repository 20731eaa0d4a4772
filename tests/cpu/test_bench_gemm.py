"""The GEMM benchmark's loads, candidates and tables; measuring itself needs a GPU."""

from __future__ import annotations

import pytest

from prime_kernels.bench.gemm import BACKWARD, FORWARD, GemmResult, format_table, layer_load, main, sum_ms
from prime_kernels.bench.gemm_sweep import candidates, label, products
from prime_kernels.cli import EXIT_USAGE
from prime_kernels.gemm_heuristics import SMEM_BUDGET, choose_config


def test_a_load_is_one_ranks_share() -> None:
    load = layer_load("qwen3-30b-a3b:8")
    assert (load.hidden, load.intermediate, load.experts, load.rows) == (2048, 768, 16, 131072)
    assert layer_load("qwen3-235b-a22b:128", 128).experts == 1


@pytest.mark.parametrize(
    ("name", "tokens", "message"),
    [
        ("qwen3-30b-a3b", 16384, "must be MODEL:EP"),
        ("unheard-of:8", 16384, "unknown model 'unheard-of'"),
        ("qwen3-30b-a3b:7", 16384, "128 experts"),
        ("qwen3-30b-a3b:8", 100, "800 rows do not split into multiples of 128 rows for 16 experts"),
        ("qwen3-30b-a3b:8", 0, "--tokens is 0; needs at least 1"),
        ("qwen3-30b-a3b:8", -16384, "--tokens is -16384; needs at least 1"),
    ],
)
def test_loads_that_cannot_be_measured(
    name: str, tokens: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=message):
        layer_load(name, tokens)
    with pytest.raises(SystemExit) as ended:
        main(["--load", name, "--tokens", str(tokens)])
    assert ended.value.code == EXIT_USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["qwen3-30b-a3b:8", "qwen3-235b-a22b:8", "qwen3-30b-a3b:1"])
def test_the_chosen_configuration_is_among_the_candidates(name: str) -> None:
    load = layer_load(name)
    for _, kind, m, n, _ in products(load):
        configs = candidates(kind, m, n, 132)
        assert choose_config(kind, m, n, load.experts, 132, False) in configs
        assert len({label(config) for config in configs}) == len(configs)
        assert all(config.smem_bytes <= SMEM_BUDGET and config.num_stages >= 2 for config in configs)


def test_sums_and_table() -> None:
    names = (*FORWARD, *BACKWARD)
    results = [GemmResult(name, "kind", 1, 1, 2.0**i, 700.0, 1e-3) for i, name in enumerate(names)]
    assert (sum_ms(results, FORWARD), sum_ms(results, BACKWARD)) == (3.0, 60.0)
    table = format_table(layer_load("qwen3-30b-a3b:8"), results).splitlines()
    assert "131072 rows (2 FLOP per multiply-add)" in table[0]
    assert table[-2].split()[:3] == ["forward", "sum", "3.000"]
    assert table[-1].split()[:3] == ["backward", "sum", "60.000"]
