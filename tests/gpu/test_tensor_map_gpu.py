"""Tensor maps encoded by the driver, read back through a TMA copy: ranks, strides, swizzles, fills."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch

from prime_kernels.jit import KernelSource, load_kernel, tensor_map

pytestmark = pytest.mark.gpu
if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs an SM90 GPU", allow_module_level=True)

CODE = r"""
struct alignas(64) Map { unsigned char bytes[128]; };
struct Coordinates { int at[5]; };

// Copies one box into shared memory and from there, byte by byte, to `out`.
template <int kRank>
__global__ void load_box(const __grid_constant__ Map map, unsigned char* out, unsigned bytes, Coordinates c) {
    extern __shared__ __align__(1024) unsigned char box[];
    __shared__ __align__(8) unsigned long long barrier;
    const unsigned to = (unsigned)__cvta_generic_to_shared(box);
    const unsigned full = (unsigned)__cvta_generic_to_shared(&barrier);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(full));
        asm volatile("fence.mbarrier_init.release.cluster;");
        asm volatile("fence.proxy.async.shared::cta;");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(full), "r"(bytes));
#define COPY(RANK, ...) asm volatile("cp.async.bulk.tensor." #RANK "d.shared::cluster.global.tile" \
        ".mbarrier::complete_tx::bytes [%0], [%1, {" __VA_ARGS__ "}], [%2];" \
        :: "r"(to), "l"(&map), "r"(full), "r"(c.at[0]), "r"(c.at[1]), "r"(c.at[2]), "r"(c.at[3]), \
           "r"(c.at[4]) : "memory")
        if constexpr (kRank == 1) COPY(1, "%3");
        if constexpr (kRank == 2) COPY(2, "%3, %4");
        if constexpr (kRank == 3) COPY(3, "%3, %4, %5");
        if constexpr (kRank == 4) COPY(4, "%3, %4, %5, %6");
        if constexpr (kRank == 5) COPY(5, "%3, %4, %5, %6, %7");
    }
    __syncthreads();
    for (unsigned done = 0; !done;)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;"
                     " selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(full) : "memory");
    for (unsigned i = threadIdx.x; i < bytes; i += blockDim.x) out[i] = box[i];
}
"""


def load_box(
    source: torch.Tensor, box: tuple[int, ...], at: tuple[int, ...], loaded: tuple[int, ...], **options
) -> torch.Tensor:
    """The bytes a TMA copy of ``box`` at ``at`` leaves in shared memory, where its shape is ``loaded``."""
    made = tensor_map(source, box, **options)
    count = torch.Size(loaded).numel() * source.element_size()
    out = torch.full((count,), 0xEE, dtype=torch.uint8, device="cuda")
    rank = source.dim()
    coordinates = (ctypes.c_int * 5)(*reversed(at))
    kernel = load_kernel(KernelSource("test_load_box", CODE, f"load_box<{rank}>", "sm_90a"))
    kernel.launch(1, 128, (made, out, ctypes.c_uint32(count), coordinates), smem=count)
    return out.cpu()


def expected_box(source: torch.Tensor, box: tuple[int, ...], at: tuple[int, ...], steps: tuple[int, ...],
                 fill: float = 0) -> torch.Tensor:  # fmt: skip
    """The same box by indexing, out-of-bounds elements filled."""
    ranges = [range(start, start + size, step) for start, size, step in zip(at, box, steps, strict=True)]
    result = torch.full([len(r) for r in ranges], fill, dtype=source.dtype)
    host = source.cpu()
    for place in itertools.product(*(range(len(r)) for r in ranges)):
        index = tuple(r[i] for r, i in zip(ranges, place, strict=True))
        if all(0 <= i < n for i, n in zip(index, host.shape, strict=True)):
            result[place] = host[index]
    return result


CASES = {
    "rank 1": ((100,), (64,), (40,)),
    "rank 2": ((50, 64), (16, 32), (40, 16)),
    "rank 2 before the start": ((50, 64), (16, 32), (-3, -8)),
    "rank 3": ((5, 20, 16), (2, 8, 16), (4, 16, 0)),
    "rank 4": ((3, 4, 10, 16), (2, 2, 4, 8), (2, 1, 7, 8)),
    "rank 5": ((2, 3, 4, 6, 16), (1, 2, 2, 4, 8), (1, 2, 3, 4, 8)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32, torch.uint8])
@pytest.mark.parametrize("name", list(CASES))
def test_every_rank_and_out_of_bounds_zeros(name: str, dtype: torch.dtype) -> None:
    shape, box, at = CASES[name]
    if dtype == torch.uint8:
        # 16-byte rows and boxes need four times as many one-byte elements.
        shape, box, at = (
            (*shape[:-1], shape[-1] * 4 // 16 * 16),
            (*box[:-1], box[-1] * 4),
            (*at[:-1], at[-1] * 4),
        )
    source = torch.randint(1, 100, shape, device="cuda").to(dtype)
    actual = load_box(source, box, at, box).view(dtype).view(box)
    assert torch.equal(actual, expected_box(source, box, at, (1,) * len(shape)))


def test_rows_further_apart_than_their_length() -> None:
    source = torch.randn(40, 96, device="cuda")[:, 8:72]
    actual = load_box(source, (8, 64), (4, 0), (8, 64)).view(torch.float32).view(8, 64)
    assert torch.equal(actual, source[4:12].cpu())


def test_element_strides() -> None:
    source = torch.randn(40, 64, device="cuda")
    actual = load_box(source, (16, 32), (3, 8), (8, 32), element_strides=(2, 1)).view(torch.float32)
    assert torch.equal(actual.view(8, 32), expected_box(source, (16, 32), (3, 8), (2, 1)))


def test_nan_fill() -> None:
    source = torch.ones(8, 16, device="cuda")
    actual = load_box(source, (8, 16), (4, 0), (8, 16), oob_fill="nan").view(torch.float32).view(8, 16)
    assert torch.equal(actual[:4], torch.ones(4, 16))
    assert actual[4:].isnan().all()


@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_swizzles(swizzle: int) -> None:
    """16-byte chunks of a row are exchanged by an exclusive or with the index of the 128-byte line."""
    rows, row_bytes = 32, swizzle
    source = torch.randint(0, 256, (rows, row_bytes), dtype=torch.uint8, device="cuda")
    actual = load_box(source, (rows, row_bytes), (0, 0), (rows, row_bytes), swizzle=swizzle)
    flat = source.cpu().flatten()
    mask = swizzle // 16 - 1
    offset = torch.arange(flat.numel())
    swizzled = offset ^ (((offset >> 7) & mask) << 4)
    assert torch.equal(actual[swizzled], flat)
