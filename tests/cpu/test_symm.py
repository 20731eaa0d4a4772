"""The staging buffer of one rank. Groups of several ranks are in test_ep.py."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import sys
import types
import weakref

import pytest
import torch

from prime_kernels import SymmBuffer, _dropin, get_symm_buffer_for_mega_moe, runtime
from prime_kernels.symm import REGION_ALIGNMENT, lookup_buffer

SHAPE = {
    "num_experts": 6,
    "num_max_tokens_per_rank": 10,
    "num_topk": 3,
    "hidden": 128,
    "intermediate_hidden": 256,
}


def make_buffer(**changes) -> SymmBuffer:
    return SymmBuffer(**{"group": None, "mma_type": "bf16xbf16", **SHAPE, **changes})


@pytest.mark.parametrize(
    ("mma_type", "data", "weights"),
    [
        ("bf16xbf16", torch.bfloat16, torch.float32),
        ("f32xf32", torch.float32, torch.float32),
        ("f64xf64", torch.float64, torch.float64),
    ],
)
def test_attributes(mma_type: str, data: torch.dtype, weights: torch.dtype) -> None:
    buffer = make_buffer(mma_type=mma_type, num_shared_experts=1)
    assert (buffer.x.dtype, buffer.x.shape) == (data, (10, 128))
    assert (buffer.topk_idx.dtype, buffer.topk_idx.shape) == (torch.int64, (10, 3))
    assert (buffer.topk_weights.dtype, buffer.topk_weights.shape) == (weights, (10, 3))
    for name, value in SHAPE.items():
        assert getattr(buffer, name) == value
    assert buffer.num_shared_experts == 1
    assert buffer.mma_type == mma_type
    assert buffer.activation == "swiglu"
    assert buffer.group is None
    assert (buffer.rank, buffer.num_ranks, buffer.num_local_experts) == (0, 1, 6)
    assert buffer.backend == "reference"
    assert buffer.buffer.numel() == buffer.num_bytes


def test_regions_are_aligned_and_apart() -> None:
    buffer = make_buffer(num_max_tokens_per_rank=7, num_topk=1)
    start = buffer.buffer.data_ptr()
    end = start
    for tensor in (buffer.x, buffer.topk_idx, buffer.topk_weights):
        assert tensor.is_contiguous()
        assert tensor.data_ptr() >= end
        assert (tensor.data_ptr() - start) % REGION_ALIGNMENT == 0
        end = tensor.data_ptr() + tensor.nbytes
    assert end == start + buffer.num_bytes


def test_bytes_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="prime_kernels.symm"):
        buffer = make_buffer()
    # x 10 * 128 * 2 bytes, then int64 and fp32 [10, 3], each from a multiple of 128 bytes on
    assert buffer.num_bytes == 2560 + 256 + 120
    assert "2936 bytes on each of 1 rank(s)" in caplog.text
    assert "backend reference" in caplog.text


def test_get_symm_buffer_builds_the_same() -> None:
    buffer = get_symm_buffer_for_mega_moe(None, *SHAPE.values(), mma_type="bf16xbf16")
    assert buffer.num_bytes == make_buffer().num_bytes


def test_use_fp8_dispatch_has_to_agree() -> None:
    with pytest.warns(DeprecationWarning, match="use_fp8_dispatch is deprecated, pass mma_type"):
        get_symm_buffer_for_mega_moe(None, *SHAPE.values(), use_fp8_dispatch=False, mma_type="bf16xbf16")
    with pytest.raises(
        ValueError, match="use_fp8_dispatch is True and mma_type is 'bf16xbf16'; drop use_fp8"
    ):
        get_symm_buffer_for_mega_moe(None, *SHAPE.values(), use_fp8_dispatch=True, mma_type="bf16xbf16")


def test_view_shares_memory() -> None:
    base = make_buffer()
    view = make_buffer(base=base, num_max_tokens_per_rank=5, hidden=64, num_topk=2, num_experts=3)
    view.x.fill_(3)
    assert view.buffer.data_ptr() == base.buffer.data_ptr()
    assert (base.x.view(-1)[: 5 * 64] == 3).all()
    assert view.num_bytes < base.num_bytes
    # A view of a view may again use all the memory.
    assert make_buffer(base=view).num_bytes == base.num_bytes


def test_view_larger_than_its_base_names_both_sizes() -> None:
    base = make_buffer()
    with pytest.raises(
        ValueError, match=r"the view needs 5\d{3} bytes and its base holds 2936 bytes; build the base"
    ):
        make_buffer(base=base, hidden=256)


def test_view_keeps_the_memory_and_ends_with_its_base() -> None:
    base = make_buffer()
    view = make_buffer(base=base)
    assert not view.destroyed
    base.destroy()
    assert view.destroyed
    with pytest.raises(RuntimeError, match="base was destroyed; build a new buffer"):
        make_buffer(base=base)
    with pytest.raises(RuntimeError, match="base was destroyed"):
        make_buffer(base=view)


def test_destroying_a_view_leaves_its_base() -> None:
    base = make_buffer()
    view = make_buffer(base=base)
    view.destroy()
    assert view.destroyed
    assert not base.destroyed
    base.x.fill_(1)


def test_destroy_twice_then_build_again() -> None:
    buffer = make_buffer()
    buffer.destroy()
    buffer.destroy()
    assert buffer.buffer is None
    assert "destroyed" in repr(buffer)
    assert make_buffer().x.shape == (10, 128)


def test_destroy_frees_the_memory() -> None:
    buffer = make_buffer()
    tensors = (buffer.buffer, buffer.x, buffer.topk_idx, buffer.topk_weights)
    alive = [weakref.ref(tensor) for tensor in tensors]
    del tensors
    buffer.destroy()
    gc.collect()
    assert [reference() for reference in alive] == [None] * 4


def test_handles() -> None:
    first, second = make_buffer(), make_buffer()
    assert first.handle != second.handle
    assert lookup_buffer(first.handle) is first
    assert lookup_buffer(second.handle) is second
    gone = second.handle
    del second
    gc.collect()
    with pytest.raises(RuntimeError, match=f"no buffer with handle {gone} is alive; keep a reference"):
        lookup_buffer(gone)
    first.destroy()
    with pytest.raises(RuntimeError, match="is alive"):
        lookup_buffer(first.handle)


def test_copies_of_a_model_share_the_buffer_and_pickling_says_why_not() -> None:
    buffer = make_buffer()
    assert copy.deepcopy({"layer": buffer})["layer"] is buffer
    with pytest.raises(TypeError, match="belongs to its process and group; build one after loading"):
        pickle.dumps(buffer)


class _UpstreamBuffer:
    def __init__(self, *args, **kwargs) -> None:
        self.args, self.kwargs = args, kwargs


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> type:
    """A stand-in for an installed upstream package."""
    root, mega = types.ModuleType("deep_gemm"), types.ModuleType("deep_gemm.mega")
    mega.SymmBuffer = _UpstreamBuffer
    mega.transform_weights_for_mega_moe = lambda l1, l2, activation, mma_type: ("theirs", l1, l2, mma_type)
    root.mega, root.__path__ = mega, []
    monkeypatch.setitem(sys.modules, "deep_gemm", root)
    monkeypatch.setitem(sys.modules, "deep_gemm.mega", mega)
    # The drop-in remembers the package it found; the stand-in must not outlive this test.
    monkeypatch.setattr(_dropin, "_adopted", None)
    return _UpstreamBuffer


def test_types_of_upstream_go_to_upstream(upstream: type) -> None:
    arguments = (None, *SHAPE.values())
    assert isinstance(SymmBuffer(*arguments), upstream)  # the default type is upstream's
    built = get_symm_buffer_for_mega_moe(*arguments, mma_type="nvfp4xnvfp4", activation="swigluoai")
    assert isinstance(built, upstream)
    assert built.args == (*arguments, 0, "nvfp4xnvfp4", "swigluoai")
    assert isinstance(SymmBuffer(*arguments, mma_type="bf16xbf16"), SymmBuffer)


def test_quantised_weights_of_upstream_go_to_upstream(upstream: type) -> None:
    from prime_kernels import transform_weights_for_mega_moe

    pairs = (torch.ones(1), torch.ones(2)), (torch.ones(3), torch.ones(4))
    assert transform_weights_for_mega_moe(*pairs) == ("theirs", *pairs, "fp8xfp4")


def test_types_of_upstream_without_upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    with pytest.raises(
        (RuntimeError, ImportError), match=r"(?s)'fp8xfp4' has no kernel in this package.*deep-gemm"
    ):
        SymmBuffer(None, *SHAPE.values())


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv(runtime.DEVICE_ENV, "cuda:99")
    with pytest.raises(RuntimeError, match=r"device cuda:99 was chosen .* and torch finds 0 CUDA GPUs"):
        SymmBuffer(None, 4, 8, 2, 64, 128, mma_type="bf16xbf16")


def test_a_buffer_made_in_inference_mode_can_be_staged_outside_of_it() -> None:
    with torch.inference_mode():
        buffer = SymmBuffer(None, 4, 8, 2, 64, 128, mma_type="bf16xbf16")
    buffer.x[:3].copy_(torch.ones(3, 64))
    assert not buffer.x.is_inference()
    assert not buffer.topk_idx.is_inference()


def test_device_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(runtime.DEVICE_ENV, "cpu")
    assert make_buffer().x.device == torch.device("cpu")
    runtime.set_device("meta")
    try:
        with pytest.raises(RuntimeError, match=r"needs an SM90 GPU .*got device meta; set_backend"):
            make_buffer()
    finally:
        runtime.set_device(None)
    assert make_buffer().x.device == torch.device("cpu")
