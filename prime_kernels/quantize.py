"""FP8 quantisers: e4m3 values with one power-of-two fp32 scale for each block of a matrix.

A block's scale is the least power of two that brings its largest magnitude to at most 448, e4m3's largest::

    scale = 2^ceil(log2(max(amax, 1e-10) / 448))        q = e4m3(x / scale)        x ~ q * scale

The exponent is computed from the fp32 representation, so it is exact; dividing by a power of two is exact
too, so the cast to e4m3 (to nearest, ties to even) is the only rounding. A block of zeros gets the scale of
the floor and zeros. A block with an Inf or NaN becomes NaN as a whole, scale included: a fault upstream stays
visible instead of turning into finite numbers.

Block shapes, as (rows, columns): activations (1, 128), weights and tile scales (128, 128), and (128, 1) for
the weight gradients' operands, whose reduction runs over rows ("per column per 128 rows").
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .rounding import Round

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
AMAX_FLOOR = 1e-10
BLOCK = 128

# 448 = 0.875 * 2^9, in the mantissa and exponent of frexp.
_MAX_MANTISSA, _MAX_EXPONENT = 0.875, 9
_FP32_BIAS, _FP32_MANTISSA_BITS = 127, 23


def power_of_two_scale(amax: Tensor) -> Tensor:
    """2^ceil(log2(max(amax, 1e-10) / 448)), exactly. NaN where ``amax`` is Inf or NaN.

    Args:
        amax: largest magnitudes, any shape and float dtype (read as fp32).

    Returns:
        fp32, the shape of ``amax``.
    """
    amax = amax.float()
    mantissa, exponent = torch.frexp(amax.clamp(min=AMAX_FLOOR))
    exponent = exponent - _MAX_EXPONENT + (mantissa > _MAX_MANTISSA)
    # Between 2^-42 and 2^120, so the bits of an fp32: a pow on a GPU may be off by one.
    scale = ((exponent + _FP32_BIAS) << _FP32_MANTISSA_BITS).to(torch.int32).view(torch.float32)
    return scale.masked_fill(~amax.isfinite(), float("nan"))


def to_e4m3(value: Tensor) -> Tensor:
    """Cast to e4m3 to nearest, ties to even; beyond +-448 saturate. NaN stays NaN."""
    # Beyond the range, the cast itself saturates in some PyTorch versions and gives NaN in others.
    return value.float().clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def quantize_blocks(x: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Quantise with one scale for each block of ``rows`` x ``columns``.

    Args:
        x: [..., M, N], 16-bit or fp32 (other dtypes are first rounded to fp32).
        rows, columns: block shape; M and N must be multiples.

    Returns:
        q e4m3 [..., M, N] and scales fp32 [..., M / rows, N / columns].

    Raises:
        ValueError: M or N is not a multiple of the block.
    """
    if x.dim() < 2 or min(rows, columns) < 1:
        raise ValueError(
            f"x has shape {list(x.shape)} and blocks are {rows} x {columns}; needs [..., M, N] and blocks of "
            "at least 1 x 1"
        )
    height, width = x.shape[-2:]
    if height % rows or width % columns:
        raise ValueError(
            f"a matrix of {height} x {width} does not divide into blocks of {rows} x {columns}; pad it"
        )
    blocks = x.float().unflatten(-1, (width // columns, columns)).unflatten(-3, (height // rows, rows))
    scale = power_of_two_scale(blocks.abs().amax(dim=(-3, -1)))
    q = to_e4m3(blocks / scale[..., :, None, :, None])
    return q.reshape(x.shape), scale


def quantize_rows(x: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """1 x 128 scales (activations). x [..., M, N] -> q [..., M, N], scales [..., M, N / block]."""
    return quantize_blocks(x, 1, block)


def quantize_columns(x: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """128 x 1 scales, per column per 128 rows. x [..., M, N] -> q [..., M, N], scales [..., M / block, N]."""
    return quantize_blocks(x, block, 1)


def quantize_tiles(x: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """128 x 128 scales (weights, tiles). x [..., M, N] -> q alike, scales [..., M / block, N / block]."""
    return quantize_blocks(x, block, block)


def dequantize(q: Tensor, scale: Tensor) -> Tensor:
    """q * scale in fp32; the block shape follows from the two shapes."""
    rows, columns = q.shape[-2] // max(scale.shape[-2], 1), q.shape[-1] // max(scale.shape[-1], 1)
    return q.float() * scale.repeat_interleave(rows, -2).repeat_interleave(columns, -1)


def fake_quantize(value: Tensor, rows: int, columns: int) -> Tensor:
    """Quantise and return to the dtype of ``value``; a matrix that does not divide into blocks is padded.

    For the reference's rounding points. fp64 values are rounded to fp32 first, as a kernel holds them.
    """
    height, width = value.shape[-2:]
    padded = torch.nn.functional.pad(value, (0, -width % columns, 0, -height % rows))
    return dequantize(*quantize_blocks(padded, rows, columns))[..., :height, :width].to(value.dtype)


def through_blocks(rows: int, columns: int) -> Round:
    """:func:`fake_quantize` with this block shape, for a point of ``Rounding``."""
    return partial(fake_quantize, rows=rows, columns=columns)


def transpose_weight(q: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The transposed copy of a quantised weight, for dgrad: [..., M, N] -> [..., N, M], contiguous.

    128 x 128 blocks stay blocks when transposed, so values and scales are the same.
    """
    return q.mT.contiguous(), scale.mT.contiguous()


def padded_counts(counts: Tensor) -> Tensor:
    """Rows each expert takes in a pool: ``counts`` rounded up to whole blocks of 128. int64 [El]."""
    return (counts.to(torch.int64) + BLOCK - 1) // BLOCK * BLOCK


def column_quant(x: Tensor, x_sf: Tensor, counts: Tensor, x_t: Tensor, x_t_sf: Tensor) -> None:
    """Requantise a pool for the weight gradient, whose reduction runs over rows, and store it transposed.

    Expert e owns rows [o_e, o_e + counts[e]) of the pool, where o_e sums the padded counts before it; the
    rows up to the next multiple of 128 are padding, which counts as zero whatever it holds. Of the outputs,
    what lies behind the last expert's rows is left alone.

    Args:
        x: e4m3 [C, H] with scales ``x_sf`` fp32 [C, H / 128].
        counts: integer [El], rows of each expert.
        x_t: e4m3 [C * H], written: for each expert a matrix [H, padded rows], one after the other.
        x_t_sf: fp32, written: [C / 128, H] for a scale per column and 128 rows, or [C / 128, H / 128] for one
            per 128 x 128 tile; its shape selects.

    Raises:
        ValueError: a shape that does not fit, or counts that need more rows than the pool has.
    """
    for name, tensor, dtype in (("x", x, E4M3), ("x_sf", x_sf, torch.float32), ("x_t", x_t, E4M3),
                                ("x_t_sf", x_t_sf, torch.float32)):  # fmt: skip
        if tensor.dtype != dtype:
            raise ValueError(f"{name} is {tensor.dtype}, needs {dtype}")
    if x.dim() != 2:
        raise ValueError(f"x has shape {list(x.shape)}, needs [C, H]")
    capacity, hidden = x.shape
    tile_scales = (capacity // BLOCK, hidden // BLOCK)
    column_scales = (capacity // BLOCK, hidden)
    if capacity % BLOCK or hidden % BLOCK:
        raise ValueError(f"x is {capacity} x {hidden}, needs multiples of {BLOCK} in both dims; pad the pool")
    if tuple(x_t_sf.shape) not in (tile_scales, column_scales):
        raise ValueError(
            f"x_t_sf has shape {list(x_t_sf.shape)}, needs {list(column_scales)} (per column) or "
            f"{list(tile_scales)} (per tile)"
        )
    if x_t.shape != (capacity * hidden,):
        raise ValueError(f"x_t has shape {list(x_t.shape)}, needs [{capacity * hidden}] (C * H)")
    if x_sf.shape != (capacity, hidden // BLOCK):
        wanted = [capacity, hidden // BLOCK]
        raise ValueError(f"x_sf has shape {list(x_sf.shape)}, needs {wanted} (C, H / {BLOCK})")
    if counts.dim() != 1 or counts.is_floating_point() or (counts < 0).any():
        raise ValueError(f"counts is {counts.dtype} {counts.tolist()}, needs [El] integers of at least 0")
    padded = padded_counts(counts)
    total = int(padded.sum())
    if total > capacity:
        raise ValueError(
            f"the experts need {total} rows (each count rounded up to {BLOCK}), the pool holds {capacity}; "
            f"allocate a capacity of at least {total}"
        )
    quantize = quantize_tiles if tuple(x_t_sf.shape) == tile_scales else quantize_columns
    start = 0
    for count, height in zip(counts.tolist(), padded.tolist(), strict=True):
        rows = slice(start, start + height)
        values = dequantize(x[rows], x_sf[rows])
        values[count:] = 0
        q, scale = quantize(values)
        x_t[start * hidden : (start + height) * hidden].view(hidden, height).copy_(q.T)
        x_t_sf[start // BLOCK : (start + height) // BLOCK] = scale
        start += height
