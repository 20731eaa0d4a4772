"""The reference backend and the quantisers on CUDA tensors: what a GPU without a kernel can run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from prime_kernels import SymmBuffer, bf16_mega_moe, bf16_mega_moe_backward, quantize, reference, runtime

pytestmark = pytest.mark.gpu

TOKENS, EXPERTS, TOPK, HIDDEN, INTER = 48, 6, 3, 256, 128
FLOAT64_TOLERANCE = 1e-12
BF16_TOLERANCE = 5e-3


@pytest.fixture(autouse=True)
def _reference_backend() -> Iterator[None]:
    before = runtime.get_backend()
    runtime.set_backend("reference")
    yield
    runtime.set_backend(before)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.cpu().double(), want.cpu().double()
    return float((got - want).norm() / want.norm())


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x, topk_idx, topk_weights, gate_up, down, dy on the CPU."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    topk_idx = torch.randint(-1, EXPERTS - 1, (TOKENS, TOPK), generator=generator)  # the last expert is idle
    weights = torch.rand(TOKENS, TOPK, generator=generator, dtype=torch.float64)
    return (
        normal(TOKENS, HIDDEN).to(dtype), topk_idx,
        weights.to(torch.float64 if dtype == torch.float64 else torch.float32),
        (normal(EXPERTS, 2 * INTER, HIDDEN) * HIDDEN**-0.5).to(dtype),
        (normal(EXPERTS, HIDDEN, INTER) * 2 * INTER**-0.5).to(dtype), normal(TOKENS, HIDDEN).to(dtype),
    )  # fmt: skip


def check_both_directions(buffer: SymmBuffer, dtype: torch.dtype, tolerance: float) -> None:
    """Forward and backward of poisoned CUDA outputs against the float64 reference on the CPU."""
    host = inputs(dtype)
    x, topk_idx, topk_weights, gate_up, down, dy = (tensor.cuda() for tensor in host)
    buffer.x[:TOKENS], buffer.topk_idx[:TOKENS], buffer.topk_weights[:TOKENS] = x, topk_idx, topk_weights
    y, dx, dw1, dw2, dtopk = (torch.full_like(t, math.nan) for t in (x, x, gate_up, down, topk_weights))
    stats = torch.zeros(EXPERTS, dtype=torch.int32, device="cuda")
    bf16_mega_moe(y, gate_up, down, buffer, cumulative_local_expert_recv_stats=stats)
    bf16_mega_moe_backward(dx, dw1, dw2, dtopk, dy, gate_up, down, buffer)
    wide = [tensor if tensor.dtype == torch.int64 else tensor.double() for tensor in host]
    want = reference.moe_backward(wide[5], *wide[:5])
    assert relative_error(y, reference.moe_forward(*wide[:5])) <= tolerance
    for got, expected in ((dx, want.dx), (dw1, want.dgate_up), (dw2, want.ddown), (dtopk, want.dtopk)):
        assert relative_error(got, expected) <= tolerance
    assert (dw1[-1] == 0).all()
    assert (dw2[-1] == 0).all()
    assert (dtopk[topk_idx < 0] == 0).all()
    assert stats.tolist() == torch.bincount(host[1][host[1] >= 0], minlength=EXPERTS).tolist()


@pytest.mark.parametrize(
    ("dtype", "mma_type", "tolerance"),
    [(torch.float64, "f64xf64", FLOAT64_TOLERANCE), (torch.bfloat16, "bf16xbf16", BF16_TOLERANCE)],
)
def test_reference_on_cuda(dtype: torch.dtype, mma_type: str, tolerance: float) -> None:
    buffer = SymmBuffer(None, EXPERTS, 64, TOPK, HIDDEN, INTER, mma_type=mma_type)
    assert buffer.x.is_cuda
    assert buffer.backend == "reference"
    check_both_directions(buffer, dtype, tolerance)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_reference_over_a_process_group(backend: str, tmp_path: Path) -> None:
    """gloo sends no CUDA tensors, so the messages go through the CPU; NCCL takes them as they are."""
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    runtime.set_device("cuda" if backend == "gloo" else None)
    try:
        buffer = SymmBuffer(None, EXPERTS, 64, TOPK, HIDDEN, INTER, mma_type="f64xf64")
        assert buffer.x.is_cuda
        check_both_directions(buffer, torch.float64, FLOAT64_TOLERANCE)
    finally:
        runtime.set_device(None)
        dist.destroy_process_group()


def test_gloo_group_stays_on_the_cpu_by_default(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert not SymmBuffer(None, EXPERTS, 64, TOPK, HIDDEN, INTER, mma_type="bf16xbf16").x.is_cuda
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "quantise", [quantize.quantize_rows, quantize.quantize_columns, quantize.quantize_tiles]
)
def test_quantisers_give_the_same_bits_as_on_the_cpu(quantise) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(256, 512, generator=generator)
    x *= torch.exp2(10 * torch.randn(256, 512, generator=generator))
    x[:128, :128] = 0
    q, scale = quantise(x)
    q_cuda, scale_cuda = quantise(x.cuda())
    assert torch.equal(scale_cuda.cpu(), scale)
    assert torch.equal(q_cuda.cpu().view(torch.uint8), q.view(torch.uint8))


def test_scales_at_every_power_boundary() -> None:
    exact = torch.ldexp(torch.full((140,), quantize.E4M3_MAX), torch.arange(-30, 110))
    for values in (exact, torch.nextafter(exact, torch.tensor(math.inf))):
        assert torch.equal(
            quantize.power_of_two_scale(values.cuda()).cpu(), quantize.power_of_two_scale(values)
        )
