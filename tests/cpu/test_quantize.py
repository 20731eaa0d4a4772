"""The quantisers against a slow version of exact rationals, one element at a time."""

from __future__ import annotations

import bisect
import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from prime_kernels import quantize as qz


def _all_e4m3() -> list[Fraction]:
    """Every finite magnitude of e4m3, from the format's definition (bias 7, 3 mantissa bits, no Inf)."""
    values = [Fraction(m, 8) * Fraction(2) ** -6 for m in range(8)]
    for exponent in range(1, 16):
        for m in range(8):
            if (exponent, m) != (15, 7):  # that code is NaN
                values.append((1 + Fraction(m, 8)) * Fraction(2) ** (exponent - 7))
    return values


_MAGNITUDES = _all_e4m3()
FP32_MAX = torch.finfo(torch.float32).max


def slow_scale(amax: float) -> float:
    """The least power of two p with p * 448 >= max(amax, 1e-10), found by trying."""
    target = max(Fraction(amax), Fraction(1e-10))
    power = Fraction(1)
    while power * 448 < target:
        power *= 2
    while power / 2 * 448 >= target:
        power /= 2
    return float(power)


def slow_e4m3(value: Fraction) -> float:
    """The nearest e4m3 number; of two equally near ones that with the even mantissa (an even index)."""
    magnitude = abs(value)
    above = bisect.bisect_left(_MAGNITUDES, magnitude)
    near = [i for i in (above - 1, above) if 0 <= i < len(_MAGNITUDES)]
    index = min(near, key=lambda i: (abs(_MAGNITUDES[i] - magnitude), i % 2))
    return math.copysign(float(_MAGNITUDES[index]), value)


def slow_quantize(x: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Values and scales of a 2-D matrix as fp32 tensors."""
    values, (height, width) = x.float().tolist(), x.shape
    q, scales = torch.zeros(height, width), torch.zeros(height // rows, width // columns)
    for i in range(height // rows):
        for j in range(width // columns):
            cells = [
                (r, c) for r in range(i * rows, (i + 1) * rows) for c in range(j * columns, (j + 1) * columns)
            ]
            scale = slow_scale(max(abs(values[r][c]) for r, c in cells))
            scales[i, j] = scale
            for r, c in cells:
                q[r, c] = slow_e4m3(Fraction(values[r][c]) / Fraction(scale))
    return q, scales


BLOCK_SHAPES = [(1, 4), (4, 4), (4, 1)]


def _matrix(seed: int, height: int, width: int, spread: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(height, width, generator=generator)
    return x * torch.exp2(spread * torch.randn(height, width, generator=generator))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32), spread=st.sampled_from([0.0, 3.0, 20.0]), shape=st.sampled_from(BLOCK_SHAPES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)  # fmt: skip
def test_bit_exact_on_random_matrices(
    seed: int, spread: float, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x = _matrix(seed, 8, 8, spread).to(dtype)
    x[x.isinf()] = 1.0  # fp16 overflow of the wide spread
    q, scale = qz.quantize_blocks(x, *shape)
    want_q, want_scale = slow_quantize(x, *shape)
    assert q.dtype == torch.float8_e4m3fn
    assert torch.equal(scale, want_scale)
    assert torch.equal(q.float(), want_q)


@settings(max_examples=200, deadline=None)
@given(amax=st.floats(0, FP32_MAX, width=32))
@example(amax=0.0)
@example(amax=448.0)
@example(amax=float(torch.nextafter(torch.tensor(448.0), torch.tensor(math.inf))))
@example(amax=float(torch.nextafter(torch.tensor(448.0), torch.tensor(0.0))))
@example(amax=1e-10)
@example(amax=1e-38)
@example(amax=2.0**-140)
@example(amax=FP32_MAX)
def test_scale_is_the_least_power_of_two(amax: float) -> None:
    assert qz.power_of_two_scale(torch.tensor(amax)).item() == slow_scale(amax)


def test_scale_at_every_power_boundary() -> None:
    exact = torch.ldexp(torch.full((140,), 448.0), torch.arange(-30, 110))
    above = torch.nextafter(exact, torch.tensor(math.inf))
    assert [slow_scale(v) for v in exact.tolist()] == qz.power_of_two_scale(exact).tolist()
    assert torch.equal(qz.power_of_two_scale(above), 2 * qz.power_of_two_scale(exact))


def test_cast_of_every_tie_and_neighbour() -> None:
    numbers = [float(m) for m in _MAGNITUDES]
    ties = [(a + b) / 2 for a, b in itertools.pairwise(numbers)]
    values = torch.tensor(numbers + ties)
    values = torch.cat(
        [values, torch.nextafter(values, torch.tensor(1e9)), torch.nextafter(values, torch.tensor(0.0))]
    )
    values = torch.cat([values, -values])
    assert qz.to_e4m3(values).float().tolist() == [slow_e4m3(Fraction(v)) for v in values.tolist()]


def test_cast_saturates_and_keeps_nan() -> None:
    values = torch.tensor([449.0, 1e9, math.inf, -464.1, -math.inf, math.nan])
    q = qz.to_e4m3(values).float()
    assert q[:5].tolist() == [448.0, 448.0, 448.0, -448.0, -448.0]
    assert q[5].isnan()


@pytest.mark.parametrize("quantize", [qz.quantize_rows, qz.quantize_columns, qz.quantize_tiles])
def test_block_of_zeros(quantize) -> None:
    x = torch.randn(256, 256)
    x[:128, :128] = 0
    q, scale = quantize(x)
    assert scale.isfinite().all()
    assert (scale > 0).all()
    assert (q[:128, :128].float() == 0).all()
    assert scale.flatten()[0] == 2.0**-42  # the floor 1e-10 over 448, rounded up


@pytest.mark.parametrize(
    ("quantize", "scale_shape"),
    [(qz.quantize_rows, (3, 256, 3)), (qz.quantize_columns, (3, 2, 384)), (qz.quantize_tiles, (3, 2, 3))],
)
def test_shapes_with_a_batch_dim_and_round_trip(quantize, scale_shape: tuple[int, ...]) -> None:
    x = torch.randn(3, 256, 384, generator=torch.Generator().manual_seed(1))
    x[1] *= 1e-3
    q, scale = quantize(x)
    assert q.shape == x.shape
    assert scale.shape == scale_shape
    for item in range(3):
        alone_q, alone_scale = quantize(x[item])
        assert torch.equal(q[item].float(), alone_q.float())
        assert torch.equal(scale[item], alone_scale)
    error = (qz.dequantize(q, scale) - x).abs()
    # Half a step of 3 mantissa bits, or half the least subnormal under the block's scale.
    step = scale.repeat_interleave(256 // scale_shape[1], 1).repeat_interleave(384 // scale_shape[2], 2)
    assert (error <= torch.maximum(x.abs() / 16, step * 2.0**-10)).all()


def test_large_outlier_does_not_touch_other_blocks() -> None:
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(2))
    q, scale = qz.quantize_rows(x)
    x[5, 3] = 1e30
    q_outlier, scale_outlier = qz.quantize_rows(x)
    scale_outlier[5, 0] = scale[5, 0]
    assert torch.equal(scale, scale_outlier)
    same = torch.ones(128, 256, dtype=torch.bool)
    same[5, :128] = False
    assert torch.equal(q.float()[same], q_outlier.float()[same])
    assert qz.dequantize(*qz.quantize_rows(x))[5, 3] == pytest.approx(1e30, rel=1 / 16)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_fault_stays_visible_and_stays_in_its_block(bad: float) -> None:
    x = torch.ones(2, 256)
    x[0, 7] = bad
    q, scale = qz.quantize_rows(x)
    assert scale.isnan().tolist() == [[True, False], [False, False]]
    back = qz.dequantize(q, scale)
    assert back[0, :128].isnan().all()
    assert (back[0, 128:] == 1).all()
    assert (back[1] == 1).all()


def test_transposed_weight_is_the_quantised_transpose() -> None:
    w = torch.randn(2, 256, 384, generator=torch.Generator().manual_seed(3)).bfloat16()
    q_t, scale_t = qz.transpose_weight(*qz.quantize_tiles(w))
    want_q, want_scale = qz.quantize_tiles(w.mT.contiguous())
    assert q_t.is_contiguous()
    assert scale_t.is_contiguous()
    assert torch.equal(q_t.float(), want_q.float())
    assert torch.equal(scale_t, want_scale)


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("counts", [[128], [1, 0, 127], [0, 129, 0, 17, 128]])
def test_column_quant(counts: list[int], tiles: bool) -> None:
    hidden, padded = 256, [-(-count // 128) * 128 for count in counts]
    capacity = sum(padded) + 128
    x, x_sf = qz.quantize_rows(torch.randn(capacity, hidden, generator=torch.Generator().manual_seed(4)))
    start = 0
    for count, height in zip(counts, padded, strict=True):
        x_sf[start + count : start + height] = math.nan  # padding holds anything
        start += height
    x_t = torch.full((capacity * hidden,), math.nan).to(torch.float8_e4m3fn)
    x_t_sf = torch.full((capacity // 128, hidden // 128 if tiles else hidden), math.nan)
    qz.column_quant(x, x_sf, torch.tensor(counts, dtype=torch.int32), x_t, x_t_sf)
    start = 0
    for count, height in zip(counts, padded, strict=True):
        values = torch.zeros(height, hidden)
        values[:count] = x[start : start + count].float() * x_sf[start : start + count].repeat_interleave(
            128, 1
        )
        matrix = x_t[start * hidden : (start + height) * hidden].view(hidden, height).float()
        q, scale = slow_quantize(values, 128, 128 if tiles else 1)
        assert torch.equal(matrix, q.T)
        assert torch.equal(x_t_sf[start // 128 : (start + height) // 128], scale)
        start += height
    assert x_t[start * hidden :].float().isnan().all()
    assert x_t_sf[start // 128 :].isnan().all()


def test_column_quant_refuses() -> None:
    x, x_sf = qz.quantize_rows(torch.ones(256, 128))
    flat, counts = torch.empty(256 * 128, dtype=torch.float8_e4m3fn), torch.tensor([100])
    with pytest.raises(
        ValueError, match=r"need 384 rows .* pool holds 256; allocate a capacity of at least 384"
    ):
        qz.column_quant(x, x_sf, torch.tensor([129, 1]), flat, torch.empty(2, 128))
    with pytest.raises(ValueError, match=r"x_t_sf has shape \[2, 3\], needs \[2, 128\] .* or \[2, 1\]"):
        qz.column_quant(x, x_sf, counts, flat, torch.empty(2, 3))
    with pytest.raises(ValueError, match=r"x_t has shape \[7\], needs \[32768\]"):
        qz.column_quant(x, x_sf, counts, flat[:7], torch.empty(2, 128))
    with pytest.raises(ValueError, match=r"x is 100 x 128, needs multiples of 128"):
        qz.column_quant(x[:100], x_sf[:100], counts, flat, torch.empty(2, 128))
    # Each of these would give wrong numbers without an error.
    out = torch.empty(2, 128)
    with pytest.raises(ValueError, match=r"x_sf has shape \[256, 2\], needs \[256, 1\]"):
        qz.column_quant(x, x_sf.expand(-1, 2), counts, flat, out)
    for bad in (torch.tensor([-1, 50]), torch.tensor([1.5]), torch.tensor([[1], [2]])):
        with pytest.raises(ValueError, match=r"counts is torch\.\w+ .*, needs \[El\] integers of at least 0"):
            qz.column_quant(x, x_sf, bad, flat, out)
    with pytest.raises(ValueError, match=r"x is torch\.float32, needs torch\.float8_e4m3fn"):
        qz.column_quant(x.float(), x_sf, counts, flat, out)
    with pytest.raises(ValueError, match=r"x_t is torch\.bfloat16, needs torch\.float8_e4m3fn"):
        qz.column_quant(x, x_sf, counts, flat.bfloat16(), out)


def test_matrix_that_does_not_divide() -> None:
    with pytest.raises(ValueError, match="4 x 100 does not divide into blocks of 1 x 128"):
        qz.quantize_rows(torch.ones(4, 100))
    with pytest.raises(ValueError, match=r"x has shape \[128\] and blocks are 1 x 128; needs"):
        qz.quantize_rows(torch.ones(128))
    with pytest.raises(ValueError, match=r"blocks are 0 x 1; needs .* blocks of at least 1 x 1"):
        qz.quantize_blocks(torch.ones(4, 4), 0, 1)


def test_fake_quantize_pads() -> None:
    x = torch.randn(130, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    for rows, columns in ((1, 128), (128, 1), (128, 128)):
        got = qz.through_blocks(rows, columns)(x)
        assert got.dtype == torch.float64
        padded = torch.zeros(256, 256)
        padded[:130, :200] = x
        assert torch.equal(
            got, qz.dequantize(*qz.quantize_blocks(padded, rows, columns))[:130, :200].double()
        )
    assert qz.through_blocks(128, 1)(x[:0]).shape == (0, 200)
