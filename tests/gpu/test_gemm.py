"""DeepGEMM's BF16 grouped GEMMs through our launcher, against float64 products, on a real GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from sm90_cases import compile_together

import prime_kernels
from prime_kernels import (
    k_grouped_bf16_gemm_tn_contiguous,
    m_grouped_bf16_gemm_nn_contiguous,
    m_grouped_bf16_gemm_nt_contiguous,
)
from prime_kernels.gemm_heuristics import GemmKind, choose_config
from prime_kernels.gemm_kernel import GemmProblem, kernel_source
from prime_kernels.jit import KernelSource

pytestmark = pytest.mark.gpu
if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs an SM90 GPU", allow_module_level=True)

ALIGNMENT = 128
# Relative Frobenius norm against float64; rounding an output to bf16 alone gives 1.7e-3.
BF16_ERROR = 2e-3
FP32_ERROR = 2e-5
# About a tenth of a second.
SLEEP_CYCLES = 200_000_000

# The number of groups is compiled in: as few different ones as the cases allow.
ODD = (1, 0, 127, 128, 129, 0, 33, 15, 17, 31)
SPLITS = (162, 0, 2577, 446, 0, 83, 0, 0, 0, 0)
EMPTY = (0,) * 20 + (5,) + (0,) * 11
SKEWED = (4000, 1, 1, 1, 1, 1, 1, 1, 1, 1)
# (N, K): tiles of 256, 192 and 128 columns, and widths that no tile divides.
WIDTHS = ((1536, 2048), (2048, 768), (2880, 2880), (1408, 2048), (200, 128), (8, 64))
# (groups, M, N) of weight gradients.
K_GROUPED = (
    (ODD, 1536, 2048),
    (SPLITS, 2048, 768),
    (EMPTY, 1536, 256),
    (ODD, 2880, 1408),  # 64-row tiles
    (SKEWED, 384, 768),  # an odd number of tiles: no multicast
    (ODD, 128, 200),  # columns no tile divides
    ((130, 0, 5) * 30, 256, 384),  # many groups
)
SM_COUNTS = (2, 99, 120, 1)
LARGE_ROWS, LARGE = 524416, 4096  # 2^31 elements and more


def source(
    kind: GemmKind, n: int, k_or_m: int, groups: int, *, psum: bool = False, accumulate: bool = False,
    sms: int | None = None, compiled: str | None = None,
) -> KernelSource:  # fmt: skip
    """What a call of the tests compiles. ``k_or_m``: K of the m-grouped kinds, M of the k-grouped one."""
    sms = sms or torch.cuda.get_device_properties(0).multi_processor_count
    sms = max(1, sms // 2 * 2)
    m, k = (k_or_m, 0) if kind is GemmKind.K_TN else (0, k_or_m)
    config = choose_config(kind, m, n, groups, sms, psum)
    m, n, k = (
        size if compiled is None or name in compiled else 0
        for name, size in zip("mnk", (m, n, k), strict=True)
    )
    return kernel_source(GemmProblem(kind, m, n, k, groups, psum, accumulate, sms), config)


def sources() -> Iterator[KernelSource]:
    """All kernels of this file. One that is missing here is compiled when its test needs it."""
    nt, nn, tn = GemmKind.M_NT, GemmKind.M_NN, GemmKind.K_TN
    for kind, psum in itertools.product((nt, nn), (False, True)):
        for groups in {len(groups) for groups in (ODD, SPLITS, EMPTY, SKEWED)}:
            yield source(kind, 1536, 2048, groups, psum=psum)
        for n, k in WIDTHS:
            yield source(kind, n, k, len(ODD), psum=psum)
    for (groups, m, n), accumulate in itertools.product(K_GROUPED, (False, True)):
        yield source(tn, n, m, len(groups), accumulate=accumulate)
    for count in SM_COUNTS:
        yield source(nt, 768, 256, 3, sms=count)
        yield source(tn, 768, 256, 3, sms=count)
    for compiled in ("", "n", "k"):
        yield source(nt, 768, 320, len(ODD), compiled=compiled)
    for kind in (nt, nn):
        yield source(kind, 200, 192, 3)
        yield source(kind, LARGE, LARGE, 80)
    for groups, n, k in ((10, 256, 200), (2, 128, 256), (4, 2048, 768), (4, 1536, 512), (2, 256, 256)):
        yield source(nt, n, k, groups)
    yield source(nt, 128, LARGE, 2)
    yield source(nt, LARGE, 64, 1)
    yield source(tn, 128, LARGE, 2)
    yield source(tn, LARGE, LARGE, 136)
    yield source(tn, 1536, 512, 1, accumulate=True)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    compile_together(sources())


def aligned(rows: int) -> int:
    return -(-rows // ALIGNMENT) * ALIGNMENT


def layout_of(groups: tuple[int, ...], psum: bool) -> tuple[torch.Tensor, list[tuple[int, int]], int]:
    """The layout tensor, the (start, end) of each group, and the rows in all."""
    index: list[int] = []
    ranges = []
    for group, rows in enumerate(groups):
        ranges.append((len(index), len(index) + rows))
        index += [group] * rows + [-1] * (aligned(rows) - rows)
    values = [end for _, end in ranges] if psum else index
    return torch.tensor(values, dtype=torch.int32, device="cuda"), ranges, len(index)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative Frobenius norm; NaN or Inf anywhere in ``actual`` never passes a comparison."""
    return float((actual.double() - expected).norm() / expected.norm())


def weights(groups: int, n: int, k: int, nt: bool) -> torch.Tensor:
    shape = (groups, n, k) if nt else (groups, k, n)
    return (torch.randn(shape, device="cuda") * k**-0.5).bfloat16()


def run_m_grouped(a, b, d, layout, nt: bool, **options) -> None:
    gemm = m_grouped_bf16_gemm_nt_contiguous if nt else m_grouped_bf16_gemm_nn_contiguous
    gemm(a, b, d, layout, **options)


def check_m_grouped(groups: tuple[int, ...], n: int, k: int, nt: bool, psum: bool, **options) -> None:
    layout, ranges, rows = layout_of(groups, psum)
    a = torch.randn(rows, k, device="cuda").bfloat16()
    for (_, end), following in zip(ranges, [*(start for start, _ in ranges[1:]), rows], strict=True):
        a[end:following] = float("nan")  # padding rows: whatever was left there must reach no row of a group
    b = weights(len(groups), n, k, nt)
    d = torch.full((rows, n), float("nan"), device="cuda").bfloat16()
    run_m_grouped(a, b, d, layout, nt, use_psum_layout=psum, **options)
    for group, (start, end) in enumerate(ranges):
        if start == end:
            continue
        weight = b[group].double()
        expected = a[start:end].double() @ (weight.T if nt else weight)
        assert error(d[start:end], expected) < BF16_ERROR, f"group {group} of {end - start} rows"


@pytest.mark.parametrize("psum", [False, True])
@pytest.mark.parametrize("nt", [True, False])
@pytest.mark.parametrize("groups", [ODD, SPLITS, EMPTY, SKEWED])
def test_m_grouped_group_sizes(groups: tuple[int, ...], nt: bool, psum: bool) -> None:
    check_m_grouped(groups, 1536, 2048, nt, psum)


@pytest.mark.parametrize("psum", [False, True])
@pytest.mark.parametrize("nt", [True, False])
@pytest.mark.parametrize(("n", "k"), WIDTHS)
def test_m_grouped_widths(n: int, k: int, nt: bool, psum: bool) -> None:
    check_m_grouped(ODD, n, k, nt, psum)


def test_nt_with_a_k_that_ends_inside_a_block() -> None:
    check_m_grouped(ODD, 256, 200, True, False)
    layout, _, rows = layout_of((128,), False)
    a, b = torch.zeros(rows, 200, device="cuda").bfloat16(), torch.zeros(1, 200, 64, device="cuda").bfloat16()
    d = torch.zeros(rows, 64, device="cuda").bfloat16()
    with pytest.raises(ValueError, match="k = 200 must be a multiple of 64"):
        m_grouped_bf16_gemm_nn_contiguous(a, b, d, layout)


def test_weights_of_another_group_with_nan_reach_no_output() -> None:
    layout, ranges, rows = layout_of((128, 0, 128), False)
    for nt in (True, False):
        b = weights(3, 200, 192, nt)
        b[1] = float("nan")
        a, d = (
            torch.randn(rows, 192, device="cuda").bfloat16(),
            torch.empty(rows, 200, device="cuda").bfloat16(),
        )
        run_m_grouped(a, b, d, layout, nt)
        for group in (0, 2):
            start, end = ranges[group]
            weight = b[group].double()
            assert error(d[start:end], a[start:end].double() @ (weight.T if nt else weight)) < BF16_ERROR


def test_strided_operands() -> None:
    """Rows further apart than their length: views into wider tensors, no copy."""
    layout, ranges, rows = layout_of((100, 200), False)
    a = torch.randn(rows, 512, device="cuda").bfloat16()[:, 64:320]
    b = torch.randn(2, 128, 512, device="cuda").bfloat16()[:, :, 128:384]
    d = torch.full((rows, 256), float("nan"), device="cuda").bfloat16()
    m_grouped_bf16_gemm_nt_contiguous(a, b, d[:, 64:192], layout)
    for group, (start, end) in enumerate(ranges):
        assert error(d[start:end, 64:192], a[start:end].double() @ b[group].double().T) < BF16_ERROR
    assert d[:, :64].isnan().all()
    assert d[:, 192:].isnan().all()


@pytest.mark.parametrize("change", ["a column", "a row stride", "address", "stack"])
def test_operands_tma_cannot_read_are_named(change: str) -> None:
    layout, _, rows = layout_of((128, 128), False)
    a = torch.zeros(rows, 128, device="cuda").bfloat16()
    b, d = torch.zeros(2, 64, 128, device="cuda").bfloat16(), torch.zeros(rows, 64, device="cuda").bfloat16()
    if change == "a column":
        a = torch.zeros(128, rows, device="cuda").bfloat16().T
    elif change == "a row stride":
        a = torch.zeros(rows, 132, device="cuda").bfloat16()[:, :128]
    elif change == "address":
        a = torch.zeros(rows, 136, device="cuda").bfloat16()[:, 4:132]
    else:
        b = torch.zeros(2, 65, 128, device="cuda").bfloat16()[:, :64]
    with pytest.raises(ValueError, match=r"a multiple of 16 bytes|groups must follow each other"):
        m_grouped_bf16_gemm_nt_contiguous(a, b, d, layout)


def k_operands(groups: tuple[int, ...], m: int, n: int) -> tuple:
    """a, b (zero in the padding rows), the padded sizes and the (start, end) of each group."""
    _, ranges, rows = layout_of(groups, True)
    a = torch.zeros(rows, m, device="cuda").bfloat16()
    b = torch.zeros(rows, n, device="cuda").bfloat16()
    for start, end in ranges:
        a[start:end] = torch.randn(end - start, m, device="cuda").bfloat16()
        b[start:end] = torch.randn(end - start, n, device="cuda").bfloat16()
    return a, b, [aligned(size) for size in groups], ranges


@pytest.mark.parametrize("layout_kind", ["sizes", "ends", "ends without ks"])
@pytest.mark.parametrize("start_from", ["nan", "accumulate", "other"])
@pytest.mark.parametrize(("groups", "m", "n"), K_GROUPED)
def test_k_grouped(groups: tuple[int, ...], m: int, n: int, start_from: str, layout_kind: str) -> None:
    a, b, sizes, ranges = k_operands(groups, m, n)
    base = torch.randn(len(groups), m, n, device="cuda")
    d = base.clone() if start_from == "accumulate" else torch.full_like(base, float("nan"))
    c = {"nan": None, "accumulate": d, "other": base}[start_from]
    psum = layout_kind != "sizes"
    values = [end for _, end in ranges] if psum else sizes
    layout = torch.tensor(values, dtype=torch.int32, device="cuda")
    ks = None if layout_kind == "ends without ks" else sizes
    k_grouped_bf16_gemm_tn_contiguous(a, b, d, ks, layout, c=c, use_psum_layout=psum)
    for group, (start, end) in enumerate(ranges):
        expected = a[start:end].double().T @ b[start:end].double()
        if c is not None:
            expected += base[group].double()
        if start == end and c is None:
            assert d[group].count_nonzero() == 0, f"empty group {group}"
        else:
            assert error(d[group], expected) < FP32_ERROR, f"group {group} of {end - start} rows"


def test_all_groups_empty() -> None:
    a, b = torch.zeros(0, 128, device="cuda").bfloat16(), torch.zeros(0, 256, device="cuda").bfloat16()
    layout = torch.zeros(3, dtype=torch.int32, device="cuda")
    d = torch.full((3, 128, 256), float("nan"), device="cuda")
    k_grouped_bf16_gemm_tn_contiguous(a, b, d, [0, 0, 0], layout)
    assert d.count_nonzero() == 0
    m_grouped_bf16_gemm_nt_contiguous(
        a, torch.zeros(3, 64, 128, device="cuda").bfloat16(), a.new_empty(0, 64), layout[:0]
    )


def test_repeated_runs_are_bitwise_equal() -> None:
    layout, _, rows = layout_of((8192,) * 4, False)
    a, b = torch.randn(rows, 768, device="cuda").bfloat16(), weights(4, 2048, 768, True)
    outputs = []
    for _ in range(3):
        d = torch.empty(rows, 2048, device="cuda").bfloat16()
        m_grouped_bf16_gemm_nt_contiguous(a, b, d, layout)
        outputs.append(d)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.fixture
def sms() -> Iterator[None]:
    everything = prime_kernels.get_num_sms()
    yield
    prime_kernels.set_num_sms(everything)


@pytest.mark.parametrize("count", SM_COUNTS)
def test_fewer_sms(count: int, sms: None) -> None:
    prime_kernels.set_num_sms(count)
    check_m_grouped((300, 1, 128), 768, 256, True, False)
    a, b, sizes, ranges = k_operands((300, 0, 128), 256, 768)
    d = torch.full((3, 256, 768), float("nan"), device="cuda")
    layout = torch.tensor(sizes, dtype=torch.int32, device="cuda")
    k_grouped_bf16_gemm_tn_contiguous(a, b, d, sizes, layout)
    start, end = ranges[0]
    assert error(d[0], a[start:end].double().T @ b[start:end].double()) < FP32_ERROR


@pytest.mark.parametrize("compiled_dims", ["", "n", "k"])
def test_dimensions_at_run_time(compiled_dims: str) -> None:
    check_m_grouped(ODD, 768, 320, True, False, compiled_dims=compiled_dims)


def test_graph_replay_with_other_routing_and_data() -> None:
    n, k = 1536, 512
    layout, _, rows = layout_of((300, 200, 100, 424), False)
    a, b = torch.randn(rows, k, device="cuda").bfloat16(), weights(4, n, k, True)
    d = torch.empty(rows, n, device="cuda").bfloat16()
    dw = torch.zeros(1, k, n, device="cuda")
    whole = torch.tensor([rows], dtype=torch.int32, device="cuda")
    m_grouped_bf16_gemm_nt_contiguous(a, b, d, layout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        m_grouped_bf16_gemm_nt_contiguous(a, b, d, layout)
        k_grouped_bf16_gemm_tn_contiguous(a, d, dw, [rows], whole, c=dw)
    assert rows == 1280
    for groups in ((300, 200, 100, 424), (0, 1280, 0, 0), (128, 256, 384, 512)):
        other, ranges, _ = layout_of(groups, False)
        layout.copy_(other)
        a.copy_(torch.randn(rows, k, device="cuda"))
        before = dw.clone()
        d.fill_(float("nan"))
        graph.replay()
        for group, (start, end) in enumerate(ranges):
            if end > start:
                assert error(d[start:end], a[start:end].double() @ b[group].double().T) < BF16_ERROR
        assert error(dw - before, (a.double().T @ d.double())[None]) < 1e-4


def test_a_side_stream() -> None:
    stream = torch.cuda.Stream()
    check_m_grouped(
        (512, 512), 256, 256, True, False
    )  # loads everything, so that the sleep outlasts the launches
    layout, ranges, rows = layout_of((512, 512), False)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        a = torch.randn(rows, 256, device="cuda").bfloat16()
        b = weights(2, 256, 256, True)
        d = torch.empty(rows, 256, device="cuda").bfloat16()
        m_grouped_bf16_gemm_nt_contiguous(a, b, d, layout)
    assert not stream.query()
    stream.synchronize()
    for group, (start, end) in enumerate(ranges):
        assert error(d[start:end], a[start:end].double() @ b[group].double().T) < BF16_ERROR


def test_more_than_2_to_the_31_elements_in_a() -> None:
    rows, k, n = LARGE_ROWS, LARGE, 128
    assert rows * k > 2**31
    a = torch.empty(rows, k, dtype=torch.bfloat16, device="cuda").normal_()
    layout = torch.zeros(rows, dtype=torch.int32, device="cuda")
    layout[rows // 2 // 128 * 128 :] = 1
    b = weights(2, n, k, True)
    d = torch.full((rows, n), float("nan"), dtype=torch.bfloat16, device="cuda")
    m_grouped_bf16_gemm_nt_contiguous(a, b, d, layout)
    assert not d.isnan().any()
    for part in (slice(0, 256), slice(rows - 256, rows)):
        group = int(layout[part][0])
        assert error(d[part], a[part].double() @ b[group].double().T) < BF16_ERROR
    # The same rows as the K of a weight gradient.
    dw = torch.full((2, k, n), float("nan"), device="cuda")
    sizes = [rows // 2 // 128 * 128, rows - rows // 2 // 128 * 128]
    k_grouped_bf16_gemm_tn_contiguous(a, d, dw, sizes, torch.tensor(sizes, dtype=torch.int32, device="cuda"))
    tail = slice(sizes[0], rows)
    expected = a[tail, :64].double().T @ d[tail].double()
    # The tensor cores truncate when they add to the accumulator: the error grows with K, 1e-9 a row.
    assert error(dw[1, :64], expected) < 1e-3


def test_more_than_2_to_the_31_elements_in_d_and_bytes_in_b() -> None:
    rows, k, n = LARGE_ROWS, 64, LARGE
    a = torch.randn(rows, k, device="cuda").bfloat16()
    layout = torch.zeros(rows, dtype=torch.int32, device="cuda")
    d = torch.full((rows, n), float("nan"), dtype=torch.bfloat16, device="cuda")
    b = weights(1, n, k, True)
    m_grouped_bf16_gemm_nt_contiguous(a, b, d, layout)
    assert error(d[-256:], a[-256:].double() @ b[0].double().T) < BF16_ERROR
    del d
    groups, wide = 80, LARGE
    b = torch.empty(groups, wide, wide, dtype=torch.bfloat16, device="cuda").normal_()
    assert b.numel() * 2 > 2**31
    layout = torch.full((256,), groups - 1, dtype=torch.int32, device="cuda")
    a = torch.randn(256, wide, device="cuda").bfloat16()
    d = torch.empty(256, wide, device="cuda").bfloat16()
    for nt in (True, False):
        run_m_grouped(a, b, d, layout, nt)
        weight = b[-1].double()
        assert error(d, a.double() @ (weight.T if nt else weight)) < BF16_ERROR


def test_more_than_2_to_the_31_elements_in_a_weight_gradient() -> None:
    groups, m, n = 136, LARGE, LARGE
    a, b = torch.randn(128, m, device="cuda").bfloat16(), torch.randn(128, n, device="cuda").bfloat16()
    d = torch.full((groups, m, n), float("nan"), device="cuda")
    assert d.numel() > 2**31
    sizes = [0] * (groups - 1) + [128]
    k_grouped_bf16_gemm_tn_contiguous(a, b, d, sizes, torch.tensor(sizes, dtype=torch.int32, device="cuda"))
    assert error(d[-1], a.double().T @ b.double()) < FP32_ERROR
    assert d[:-1].count_nonzero() == 0
