"""Grouped GEMMs: the reference backend, argument checks, tile choices and generated kernel sources."""

from __future__ import annotations

import itertools
import sys
import types
from typing import Any

import pytest
import torch

import prime_kernels
from prime_kernels import gemm, gemm_heuristics
from prime_kernels.gemm_heuristics import GemmKind, choose_config, make_config, multicast_legal
from prime_kernels.gemm_kernel import GemmProblem, kernel_source

GROUP_ROWS = (1, 0, 127, 128, 129, 0, 33)
ALIGNMENT = 128


def aligned(rows: int) -> int:
    return -(-rows // ALIGNMENT) * ALIGNMENT


def layouts(group_rows: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, list[tuple[int, int]]]:
    """The row-index layout, the psum layout, and the (start, end) of each group."""
    index, ends, ranges, start = [], [], [], 0
    for group, rows in enumerate(group_rows):
        index += [group] * rows + [-1] * (aligned(rows) - rows)
        ranges.append((start, start + rows))
        ends.append(start + rows)
        start += aligned(rows)
    return torch.tensor(index, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32), ranges


@pytest.mark.parametrize("psum", [False, True])
@pytest.mark.parametrize("nt", [False, True])
def test_m_grouped_reference(psum: bool, nt: bool) -> None:
    index, ends, ranges = layouts(GROUP_ROWS)
    a = torch.randn(len(index), 24).bfloat16()
    b = torch.randn(len(GROUP_ROWS), 40, 24).bfloat16()
    d = torch.full((len(index), 40), float("nan"), dtype=torch.bfloat16)
    if nt:
        function, weights = prime_kernels.m_grouped_bf16_gemm_nt_contiguous, b
    else:
        function, weights = prime_kernels.m_grouped_bf16_gemm_nn_contiguous, b.mT.contiguous()
    function(a, weights, d, ends if psum else index, use_psum_layout=psum)
    for group, (start, end) in enumerate(ranges):
        expected = (a[start:end].double() @ b[group].double().T).bfloat16()
        torch.testing.assert_close(d[start:end], expected, rtol=1e-2, atol=1e-2)
    assert not d.isnan().any()


@pytest.mark.parametrize("psum", [False, True])
@pytest.mark.parametrize("start", ["overwrite", "accumulate", "copy"])
def test_k_grouped_reference(psum: bool, start: str) -> None:
    _, ends, ranges = layouts(GROUP_ROWS)
    ks = [aligned(rows) for rows in GROUP_ROWS]
    a, b = torch.zeros(sum(ks), 64).bfloat16(), torch.zeros(sum(ks), 24).bfloat16()
    for first, last in ranges:
        a[first:last], b[first:last] = torch.randn(last - first, 64), torch.randn(last - first, 24)
    base = torch.randn(len(ks), 64, 24)
    d = base.clone() if start == "accumulate" else torch.full_like(base, float("nan"))
    c = {"overwrite": None, "accumulate": d, "copy": base}[start]
    layout = ends if psum else torch.tensor(ks, dtype=torch.int32)
    prime_kernels.k_grouped_bf16_gemm_tn_contiguous(
        a, b, d, None if psum else ks, layout, c=c, use_psum_layout=psum
    )
    for group, (first, last) in enumerate(ranges):
        expected = a[first:last].double().T @ b[first:last].double()
        if start != "overwrite":
            expected += base[group].double()
        torch.testing.assert_close(d[group].double(), expected, rtol=1e-5, atol=1e-4)
        if first == last and start == "overwrite":
            assert d[group].count_nonzero() == 0


def test_a_psum_group_that_ends_before_it_starts_is_an_error() -> None:
    a, b, d = torch.zeros(256, 8), torch.zeros(2, 8, 8), torch.zeros(256, 8)
    layout = torch.tensor([100, 100], dtype=torch.int32)
    with pytest.raises(ValueError, match="group 1 ends at 100, before its start 128"):
        gemm.m_grouped_bf16_gemm_nn_contiguous(a, b, d, layout, use_psum_layout=True)


def m_arguments() -> dict[str, Any]:
    return {
        "a": torch.zeros(256, 64, dtype=torch.bfloat16),
        "b": torch.zeros(2, 32, 64, dtype=torch.bfloat16),
        "d": torch.zeros(256, 32, dtype=torch.bfloat16),
        "grouped_layout": torch.zeros(256, dtype=torch.int32),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": torch.zeros(256)}, r"a has shape \(256,\), needs 2 dimensions"),
        ({"b": torch.zeros(2, 32, 63)}, r"b has shape \(2, 32, 63\), needs \(2, 32, 64\)"),
        ({"d": torch.zeros(255, 32)}, r"d has shape \(255, 32\), needs \(256, 32\)"),
        ({"grouped_layout": torch.zeros(256)}, r"grouped_layout is torch.float32 .* needs torch.int32"),
        ({"grouped_layout": torch.zeros(255, dtype=torch.int32)}, r"grouped_layout has shape \(255,\)"),
        ({"grouped_layout": torch.zeros(512, dtype=torch.int32)[::2]}, r"grouped_layout has strides"),
        ({"compiled_dims": "mnk"}, r"compiled_dims 'mnk' may hold only letters of 'nk'"),
        ({"expected_m_for_psum_layout": 128}, r"needs use_psum_layout=True"),
        ({"use_psum_layout": True}, r"grouped_layout has shape \(256,\), needs \(2,\)"),
        ({"b": torch.zeros(2, 32, 64, device="meta")}, r"b is on meta, d on cpu"),
    ],
)
def test_m_grouped_argument_errors(change: dict[str, Any], message: str) -> None:
    gemm.m_grouped_bf16_gemm_nt_contiguous(**m_arguments())
    with pytest.raises(ValueError, match=message):
        gemm.m_grouped_bf16_gemm_nt_contiguous(**{**m_arguments(), **change})


def k_arguments() -> dict[str, Any]:
    return {
        "a": torch.zeros(256, 64, dtype=torch.bfloat16),
        "b": torch.zeros(256, 32, dtype=torch.bfloat16),
        "d": torch.zeros(2, 64, 32),
        "ks": [64, 192],
        "grouped_layout": torch.tensor([64, 192], dtype=torch.int32),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ks": None}, "ks may be None only with use_psum_layout=True"),
        ({"ks": [256]}, "ks has 1 entries for 2 groups"),
        ({"ks": [60, 196]}, r"ks\[0\] = 60 must be a multiple of 64"),
        ({"ks": [-64, 320]}, r"ks\[0\] = -64"),
        ({"ks": [64, 128]}, "ks add up to 192, a has 256 rows"),
        ({"b": torch.zeros(255, 32)}, r"b has shape \(255, 32\), needs \(256, 32\)"),
        ({"c": torch.zeros(2, 64, 31)}, r"c has shape \(2, 64, 31\)"),
        ({"c": torch.zeros(2, 64, 32).bfloat16()}, "c is torch.bfloat16 .* they must agree"),
        ({"d": torch.zeros(2, 32, 64).mT}, "d has strides .* needs a contiguous tensor"),
        ({"compiled_dims": "k"}, "compiled_dims 'k'"),
    ],
)
def test_k_grouped_argument_errors(change: dict[str, Any], message: str) -> None:
    gemm.k_grouped_bf16_gemm_tn_contiguous(**k_arguments())
    with pytest.raises(ValueError, match=message):
        gemm.k_grouped_bf16_gemm_tn_contiguous(**{**k_arguments(), **change})


def test_an_epilogue_without_deep_gemm_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    with pytest.raises(ImportError, match=r"m_grouped_bf16_gemm_nt_contiguous.*sgl-deep-gemm"):
        gemm.m_grouped_bf16_gemm_nt_contiguous(**m_arguments(), epilogue=object())


@pytest.mark.parametrize("name", ["nt", "nn", "tn"])
def test_an_epilogue_goes_to_an_installed_deep_gemm(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    calls = []
    stand_in = types.ModuleType("deep_gemm")
    stand_in.__dict__[FULL_NAMES[name]] = lambda *arguments: calls.append(arguments)
    monkeypatch.setitem(sys.modules, "deep_gemm", stand_in)
    epilogue = object()
    arguments = k_arguments() if name == "tn" else m_arguments()
    getattr(gemm, FULL_NAMES[name])(**arguments, epilogue=epilogue)
    (call,) = calls
    assert call[: len(arguments)] == tuple(arguments.values())
    # Upstream takes its arguments in the same order, epilogue last.
    assert call[-1] is epilogue
    assert len(call) == {"nt": 9, "nn": 8, "tn": 9}[name]


FULL_NAMES = {
    "nt": "m_grouped_bf16_gemm_nt_contiguous",
    "nn": "m_grouped_bf16_gemm_nn_contiguous",
    "tn": "k_grouped_bf16_gemm_tn_contiguous",
}


def test_signatures_are_upstreams() -> None:
    import inspect

    def names(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)

    common = ["a", "b", "d", "grouped_layout", "compiled_dims", "use_psum_layout", "ensure_zero_padding"]
    assert names(prime_kernels.m_grouped_bf16_gemm_nt_contiguous) == [
        *common,
        "expected_m_for_psum_layout",
        "epilogue",
    ]
    assert names(prime_kernels.m_grouped_bf16_gemm_nn_contiguous) == [*common, "epilogue"]
    assert names(prime_kernels.k_grouped_bf16_gemm_tn_contiguous) == [
        "a", "b", "d", "ks", "grouped_layout", "c", "compiled_dims", "use_psum_layout", "epilogue",
    ]  # fmt: skip


def test_the_alignment_is_a_public_name() -> None:
    assert prime_kernels.get_mk_alignment_for_contiguous_layout() == ALIGNMENT


@pytest.mark.parametrize("backend", ["sm90"])
def test_the_kernel_backend_refuses_cpu_tensors(backend: str) -> None:
    prime_kernels.set_backend(backend)
    try:
        with pytest.raises(RuntimeError, match="needs an SM90 GPU and d is on cpu"):
            gemm.m_grouped_bf16_gemm_nt_contiguous(**m_arguments())
    finally:
        prime_kernels.set_backend("auto")


SHAPES = [
    (kind, m, n)
    for kind in GemmKind
    for m in ((0,) if kind is not GemmKind.K_TN else (64, 128, 1536, 2816, 2880, 4096))
    for n in (8, 64, 128, 200, 768, 1408, 1536, 2048, 2816, 2880, 4096, 7168)
]


@pytest.mark.parametrize(("kind", "m", "n"), SHAPES)
@pytest.mark.parametrize("num_sms", [132, 131, 78, 1])
def test_chosen_configurations_fit_and_never_pair_blocks_of_two_groups(
    kind: GemmKind, m: int, n: int, num_sms: int
) -> None:
    for psum, groups in itertools.product((False, True), (1, 128)):
        config = choose_config(kind, m, n, groups, num_sms, psum)
        assert config.smem_bytes <= gemm_heuristics.SMEM_BUDGET
        assert config.num_stages >= 2
        assert config.threads in (256, 384)
        assert config.block_n % 64 == 0
        if kind is GemmKind.K_TN:
            # An output tile must not reach into the next group's output.
            assert m % config.block_m == 0
        else:
            # A tile must not span two groups.
            assert config.block_m == gemm_heuristics.GROUP_ALIGNMENT
        if config.multicast == 2:
            assert num_sms % 2 == 0
            tiles = -(-n // config.block_n)
            if kind is GemmKind.K_TN:
                assert tiles * (m // config.block_m) % 2 == 0
            elif psum:
                assert tiles % 2 == 0


def test_multicast_is_used_where_it_is_safe() -> None:
    assert multicast_legal(GemmKind.M_NT, 0, 768, 128, 256, 132, False)
    assert not multicast_legal(GemmKind.M_NT, 0, 768, 128, 256, 132, True)
    assert not multicast_legal(GemmKind.K_TN, 384, 768, 128, 256, 132, False)
    assert not multicast_legal(GemmKind.M_NT, 0, 768, 128, 256, 131, False)
    assert choose_config(GemmKind.M_NT, 0, 1536, 16, 132, False).multicast == 2


def test_an_output_no_tile_divides_is_an_error() -> None:
    with pytest.raises(ValueError, match="m = 96 must be a multiple of 64"):
        choose_config(GemmKind.K_TN, 96, 256, 16, 132, False)


def test_the_row_count_is_in_no_kernel_source() -> None:
    """Only weight shapes decide what is compiled: warming up needs no token count."""
    sources = gemm.kernel_sources(2048, 768, 16)
    assert len(sources) == 8
    assert len({source.entry for source in sources}) == 8
    config = make_config(128, 256, 2, "b")
    problem = GemmProblem(GemmKind.M_NT, 0, 1536, 2048, 16, False, False, 132)
    assert kernel_source(problem, config).entry == (
        "deep_gemm::sm90_bf16_gemm_impl<cute::UMMA::Major::K, cute::UMMA::Major::K, 0, 1536, 2048, 16, "
        "128, 256, 64, 128, 128, 128, 3, 128, 256, 2, false, 132, "
        "deep_gemm::GemmType::MGroupedContiguous, false, cutlass::bfloat16_t>"
    )


def test_an_odd_number_of_sms_is_rounded_down_to_whole_clusters() -> None:
    assert {source.entry.split(", ")[17] for source in gemm.kernel_sources(2048, 768, 16, num_sms=131)} == {
        "130"
    }


def test_psum_ends_become_padded_sizes() -> None:
    _, ends, _ = layouts(GROUP_ROWS)
    sizes = gemm._aligned_sizes(ends)
    assert sizes.tolist() == [aligned(rows) for rows in GROUP_ROWS]
    assert sizes.dtype == torch.int32
