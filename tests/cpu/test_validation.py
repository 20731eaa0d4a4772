"""Each error names the value, the limit and the fix, and comes before anything is written."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from prime_kernels import SymmBuffer, bf16_mega_moe, bf16_mega_moe_backward, transform_weights_for_mega_moe
from prime_kernels.sizes import SIZE_LIMITS
from prime_kernels.validation import MAX_TOPK, check_sizes

EXPERTS, TOPK, HIDDEN, INTER, TOKENS = 4, 2, 64, 128, 8
BF16 = torch.bfloat16


def make_buffer(**changes: Any) -> SymmBuffer:
    arguments = {
        "group": None, "num_experts": EXPERTS, "num_max_tokens_per_rank": TOKENS, "num_topk": TOPK,
        "hidden": HIDDEN, "intermediate_hidden": INTER, "mma_type": "bf16xbf16",
    }  # fmt: skip
    return SymmBuffer(**{**arguments, **changes})


@pytest.fixture
def buffer() -> SymmBuffer:
    result = make_buffer()
    result.topk_idx.fill_(-1)
    return result


def call(buffer: SymmBuffer, **changes: Any) -> None:
    """Forward with all arguments right except ``changes``; outputs hold 7 and must still do so afterwards."""
    arguments = {
        "y": torch.full((3, HIDDEN), 7, dtype=BF16),
        "l1_weights": torch.zeros(EXPERTS, 2 * INTER, HIDDEN, dtype=BF16),
        "l2_weights": torch.zeros(EXPERTS, HIDDEN, INTER, dtype=BF16), "sym_buffer": buffer,
    }  # fmt: skip
    arguments |= changes
    try:
        bf16_mega_moe(**arguments)
    except (ValueError, RuntimeError):
        if isinstance(arguments["y"], torch.Tensor):
            assert (arguments["y"] == 7).all(), "an output was written before the error"
        raise


def call_backward(buffer: SymmBuffer, **changes: Any) -> None:
    """Backward with all arguments right except ``changes``; outputs hold 7 and must do so afterwards."""
    gate_up = torch.zeros(EXPERTS, 2 * INTER, HIDDEN, dtype=BF16)
    down = torch.zeros(EXPERTS, HIDDEN, INTER, dtype=BF16)
    arguments = {
        "dx": torch.full((3, HIDDEN), 7, dtype=BF16), "dw1": torch.full_like(gate_up, 7),
        "dw2": torch.full_like(down, 7), "dtopk": torch.full((3, TOPK), 7.0),
        "dy": torch.zeros(3, HIDDEN, dtype=BF16), "l1_weights": gate_up, "l2_weights": down,
        "sym_buffer": buffer,
    }  # fmt: skip
    arguments |= changes
    try:
        bf16_mega_moe_backward(**arguments)
    except (ValueError, RuntimeError):
        for name in ("dx", "dw1", "dw2", "dtopk"):
            assert arguments[name] is None or (arguments[name] == 7).all(), (
                f"{name} was written before the error"
            )
        raise


def test_unchanged_arguments_are_accepted(buffer: SymmBuffer) -> None:
    call(buffer)
    call_backward(buffer)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden": 100},
            "hidden is 100, bf16xbf16 needs a multiple of 64; use 64 or 128, or pad the weights with zeros",
        ),
        ({"hidden": 1}, "hidden is 1, .* use 64, or pad"),
        (
            {"intermediate_hidden": 96},
            "intermediate_hidden is 96, bf16xbf16 needs a multiple of 64; use 64 or 128, or pad",
        ),
        ({"num_topk": 5}, r"num_topk is 5, at most 4 is possible \(num_experts is 4"),
        (
            {"num_topk": 33, "num_experts": 64},
            f"num_topk is 33, at most {MAX_TOPK} is possible .*route to fewer",
        ),
        ({"num_topk": 0}, "num_topk is 0, needs an integer of at least 1"),
        ({"num_experts": 0}, "num_experts is 0, needs an integer of at least 1"),
        ({"num_max_tokens_per_rank": 0}, "num_max_tokens_per_rank is 0, needs an integer of at least 1"),
        ({"num_max_tokens_per_rank": 8.0}, r"num_max_tokens_per_rank is 8\.0, needs an integer"),
        ({"num_shared_experts": -1}, "num_shared_experts is -1, needs an integer of at least 0"),
        ({"activation": "gelu"}, "unknown activation 'gelu'; this package has swiglu"),
    ],
)
def test_buffer_arguments(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_buffer(**changes)


def test_sizes_the_sm90_kernels_take() -> None:
    buffer = make_buffer()
    buffer.backend = "sm90"
    needs = "bf16xbf16 needs a multiple of 64 and at least 256"
    for hidden, fix in ((1, "256"), (192, "256"), (255, "256"), (300, "256 or 320")):
        buffer.hidden = hidden
        with pytest.raises(ValueError, match=f"hidden is {hidden}, {needs}; use {fix}, or pad"):
            check_sizes(buffer)
    for hidden, inter in ((256, 64), (320, 192), (2880, 2880), (2048, 704)):
        buffer.hidden, buffer.intermediate_hidden = hidden, inter
        check_sizes(buffer)
    buffer.intermediate_hidden = 720
    with pytest.raises(ValueError, match=r"intermediate_hidden is 720, .* multiple of 64; use 704 or 768,"):
        check_sizes(buffer)


def test_the_reference_takes_every_size_that_the_kernels_take() -> None:
    reference, kernels = SIZE_LIMITS["reference"], SIZE_LIMITS["sm90"]
    for size in range(1, 1025):
        assert reference.hidden.takes(size) or not kernels.hidden.takes(size)
        assert reference.intermediate.takes(size) == kernels.intermediate.takes(size)


def test_reference_only_types_take_any_size() -> None:
    assert make_buffer(hidden=3, intermediate_hidden=1, mma_type="f64xf64").x.shape == (TOKENS, 3)


def test_topk_at_its_limits() -> None:
    assert make_buffer(num_topk=EXPERTS).topk_idx.shape == (TOKENS, EXPERTS)
    assert make_buffer(num_topk=MAX_TOPK, num_experts=64).topk_idx.shape == (TOKENS, MAX_TOPK)


def test_planned_type_says_which_gpu_it_needs() -> None:
    with pytest.raises(
        RuntimeError, match=r"'fp8xfp8' has no kernel .* needs an SM100 GPU; use mma_type='bf16xbf16'"
    ):
        make_buffer(mma_type="fp8xfp8")


L1 = torch.zeros(EXPERTS, 2 * INTER, HIDDEN, dtype=BF16)
L2 = torch.zeros(EXPERTS, HIDDEN, INTER, dtype=BF16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": [1.0]}, r"y is a list, needs a tensor of shape \[n, 64\]"),
        ({"y": torch.full((64,), 7, dtype=BF16)}, r"y is of shape \[64\], needs a tensor of shape \[n, 64\]"),
        ({"y": torch.full((3, 65), 7, dtype=BF16)}, r"y has shape \[3, 65\], needs \[3, 64\]"),
        ({"y": torch.full((3, 64), 7.0)}, r"y is torch\.float32, needs torch\.bfloat16; convert it"),
        (
            {"y": torch.full((64, 3), 7, dtype=BF16).T},
            r"y has stride 3 in its last dim, needs 1 .*\.contiguous\(\)",
        ),
        ({"l1_weights": L1.float()}, r"l1_weights is torch\.float32, needs torch\.bfloat16"),
        ({"l1_weights": L1[:3]}, r"l1_weights has shape \[3, 256, 64\], needs \[4, 256, 64\]"),
        ({"l1_weights": L1.mT.contiguous().mT}, "l1_weights has stride 256 in its last dim, needs 1"),
        ({"l1_weights": L1.to("meta")}, "l1_weights is on meta, the buffer is on cpu; move it there"),
        ({"l2_weights": L2.mT}, r"l2_weights has shape \[4, 128, 64\], needs \[4, 64, 128\]"),
        ({"l2_weights": None}, r"l2_weights is a NoneType, needs a tensor of shape \[4, 64, 128\]"),
        ({"activation": "gelu"}, "unknown activation 'gelu'; this package has swiglu"),
        ({"activation_clamp": 0.0}, r"activation_clamp is 0\.0, needs a value above 0, or None"),
        ({"activation_clamp": math.nan}, "activation_clamp is nan, needs a value above 0"),
        (
            {"shared_l1_weights": L1[0]},
            "shared_l2_weights is None and the other shared weight is not; pass both",
        ),
        (
            {"shared_l2_weights": L2[0]},
            "shared_l1_weights is None and the other shared weight is not; pass both",
        ),
        (
            {"shared_l1_weights": L1[0], "shared_l2_weights": L2},
            r"shared_l2_weights is of shape \[4, 64, 128\], needs a tensor of shape \[64, Is\]",
        ),
        (
            {"shared_l1_weights": L1[0, :128], "shared_l2_weights": L2[0]},
            r"shared_l1_weights has shape \[128, 64\], needs \[256, 64\]",
        ),
        (
            {"shared_l1_weights": L1[0, :64], "shared_l2_weights": L2[0, :, :32].contiguous()},
            "the shared expert's intermediate size is 32, bf16xbf16 needs a multiple of 64; use 64, or pad",
        ),
        (
            {"cumulative_local_expert_recv_stats": torch.zeros(EXPERTS, dtype=torch.int64)},
            r"cumulative_local_expert_recv_stats is torch\.int64, needs torch\.int32",
        ),
        (
            {"cumulative_local_expert_recv_stats": torch.zeros(EXPERTS + 1, dtype=torch.int32)},
            r"cumulative_local_expert_recv_stats has shape \[5\], needs \[4\]",
        ),
        ({"sym_buffer": None}, "sym_buffer is None, needs a SymmBuffer of mma_type bf16xbf16"),
    ],
)
def test_forward_arguments(buffer: SymmBuffer, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(buffer, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dy": torch.zeros(3, HIDDEN)}, r"dy is torch\.float32, needs torch\.bfloat16"),
        ({"dy": torch.zeros((), dtype=BF16).expand(3, HIDDEN)}, "dy has stride 0 in its last dim, needs 1"),
        ({"dx": torch.full((4, HIDDEN), 7, dtype=BF16)}, r"dx has shape \[4, 64\], needs \[3, 64\]"),
        ({"dx": torch.full((3, HIDDEN), 7.0)}, r"dx is torch\.float32, needs torch\.bfloat16"),
        ({"dtopk": torch.full((3, TOPK), 7, dtype=BF16)}, r"dtopk is torch\.bfloat16, needs torch\.float32"),
        ({"dtopk": torch.full((3, 3), 7.0)}, r"dtopk has shape \[3, 3\], needs \[3, 2\]"),
        (
            {"dw1": torch.full_like(L1, 7).half()},
            r"dw1 is torch\.float16, needs torch\.bfloat16 or torch\.float32",
        ),
        ({"dw1": torch.full_like(L2, 7)}, r"dw1 has shape \[4, 64, 128\], needs \[4, 256, 64\]"),
        ({"dw2": torch.full_like(L2, 7)[:2]}, r"dw2 has shape \[2, 64, 128\], needs \[4, 64, 128\]"),
        ({"dw2": torch.full_like(L2, 7).mT.contiguous().mT}, "dw2 has stride 64 in its last dim, needs 1"),
        (
            {"accumulate": True},
            r"accumulate is True and dw1 is torch\.bfloat16, needs torch\.float32 .* or accumulate=False",
        ),
        (
            {"accumulate": True, "dw1": torch.full(L1.shape, 7.0)},
            r"accumulate is True and dw2 is torch\.bfloat16, needs torch\.float32",
        ),
        (
            {"shared_dw1_weights": torch.zeros_like(L1[0])},
            "shared_dw1_weights is given without shared weights; pass shared_l1_weights and shared_l2",
        ),
        (
            {
                "shared_l1_weights": L1[0],
                "shared_l2_weights": L2[0],
                "shared_dw2_weights": torch.zeros_like(L1[0]),
            },
            r"shared_dw2_weights has shape \[256, 64\], needs \[64, 128\]",
        ),
        ({"activation": "relu"}, "unknown activation 'relu'"),
        ({"activation_clamp": -1.0}, r"activation_clamp is -1\.0, needs a value above 0"),
        ({"l1_weights": L1[:, :100]}, r"l1_weights has shape \[4, 100, 64\], needs \[4, 256, 64\]"),
    ],
)
def test_backward_arguments(buffer: SymmBuffer, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call_backward(buffer, **changes)


def test_outputs_whose_elements_share_memory(buffer: SymmBuffer) -> None:
    shared = r"elements share memory and would overwrite each other; pass memory of its own"
    row = torch.full((1, HIDDEN), 7, dtype=BF16)
    with pytest.raises(ValueError, match=r"y has strides \[0, 1\] for shape \[3, 64\]: " + shared):
        call(buffer, y=row.expand(3, -1))
    outputs = {
        "dx": row.expand(3, -1),
        "dtopk": torch.full((1, TOPK), 7.0).expand(3, -1),
        "dw1": torch.full((1, 2 * INTER, HIDDEN), 7.0).expand(EXPERTS, -1, -1),
        # Rows that overlap: each starts one element after the last.
        "dw2": torch.full((EXPERTS * HIDDEN * INTER,), 7.0).as_strided(
            (EXPERTS, HIDDEN, INTER), (HIDDEN * INTER, 1, 1)
        ),
    }
    for name, output in outputs.items():
        with pytest.raises(ValueError, match=f"{name} has strides .*{shared}"):
            call_backward(buffer, **{name: output})


def test_outputs_with_gaps_or_in_another_order_are_accepted(buffer: SymmBuffer) -> None:
    experts_last = torch.full((2 * INTER, EXPERTS, HIDDEN), 7.0).transpose(0, 1)
    call_backward(buffer, dw1=experts_last, dw2=torch.full((EXPERTS, HIDDEN + 1, INTER + 1), 7.0)[:, 1:, 1:])


def test_outputs_in_the_buffer(buffer: SymmBuffer) -> None:
    buffer.x.fill_(7)
    buffer.topk_weights.fill_(7)
    with pytest.raises(ValueError, match="y lies in the buffer"):
        call(buffer, y=buffer.x[:3])
    with pytest.raises(ValueError, match="dx lies in the buffer"):
        call_backward(buffer, dx=buffer.x[:3])
    with pytest.raises(ValueError, match="dtopk lies in the buffer"):
        call_backward(buffer, dtopk=buffer.topk_weights[:3])


@pytest.mark.parametrize("clamp", ["1", [1], 1j, True, torch.tensor([1.0, 2.0])])
def test_clamp_that_is_no_number(buffer: SymmBuffer, clamp: Any) -> None:
    with pytest.raises(ValueError, match=r"activation_clamp is .*, needs a value above 0"):
        call(buffer, activation_clamp=clamp)


def test_buffers_of_wrong_types_and_sizes() -> None:
    with pytest.raises(ValueError, match=r"mma_type is \[\], needs one of bf16xbf16"):
        make_buffer(mma_type=[])
    with pytest.raises(ValueError, match="base is a str, needs a SymmBuffer"):
        make_buffer(base="x")
    with pytest.raises(ValueError, match=r"group is 'x', needs a torch\.distributed process group"):
        make_buffer(group="x")
    with pytest.raises(ValueError, match="group is one this process is not a member of"):
        make_buffer(group=torch.distributed.GroupMember.NON_GROUP_MEMBER)
    most = 2**31 - 1
    for name in ("num_experts", "num_max_tokens_per_rank", "hidden", "intermediate_hidden"):
        with pytest.raises(ValueError, match=rf"{name} is {2**31}, needs an integer of .* at most {most}"):
            make_buffer(**{name: 2**31})
    with pytest.raises(RuntimeError, match=r"takes \d+ bytes on cpu, more than can be addressed; lower"):
        make_buffer(num_max_tokens_per_rank=most, hidden=most, mma_type="f64xf64")
    with pytest.raises(RuntimeError, match=r"takes \d+ bytes on cpu, which it has not free: .*; lower"):
        make_buffer(num_max_tokens_per_rank=most, hidden=2**28, mma_type="bf16xbf16")


def test_accumulate_without_weight_gradients_is_accepted(buffer: SymmBuffer) -> None:
    call_backward(buffer, accumulate=True, dw1=None, dw2=None)


def test_more_tokens_than_the_buffer_holds(buffer: SymmBuffer) -> None:
    rows = torch.full((TOKENS + 1, HIDDEN), 7, dtype=BF16)
    message = "buffer is sized for 8 tokens/rank, got 9; build it with num_max_tokens_per_rank of at least 9"
    with pytest.raises(RuntimeError, match=message):
        call(buffer, y=rows)
    with pytest.raises(RuntimeError, match=message):
        call_backward(buffer, dy=rows, dx=rows, dtopk=torch.full((TOKENS + 1, TOPK), 7.0))


def test_expert_that_does_not_exist(buffer: SymmBuffer) -> None:
    buffer.topk_idx[2, 1] = EXPERTS
    with pytest.raises(ValueError, match=r"topk_idx holds 4, needs values in \[0, 4\) or -1 for no expert"):
        call(buffer)
    with pytest.raises(ValueError, match="topk_idx holds 4"):
        call_backward(buffer)


def test_rows_behind_n_are_not_read(buffer: SymmBuffer) -> None:
    buffer.topk_idx[3:] = 10**6
    call(buffer)
    call_backward(buffer)


def test_destroyed_buffer(buffer: SymmBuffer) -> None:
    buffer.destroy()
    with pytest.raises(RuntimeError, match="sym_buffer was destroyed; build a new one"):
        call(buffer)
    with pytest.raises(RuntimeError, match="sym_buffer was destroyed; build a new one"):
        call_backward(buffer)


@pytest.mark.parametrize("argument", ["l1_natural_layout", "dw_natural_layout"])
def test_interleaving_needs_whole_groups(argument: str) -> None:
    odd = make_buffer(mma_type="f64xf64", intermediate_hidden=12)
    weights = (
        torch.zeros(EXPERTS, 24, HIDDEN, dtype=torch.float64),
        torch.zeros(EXPERTS, HIDDEN, 12, dtype=torch.float64),
    )
    rows = torch.zeros(0, HIDDEN, dtype=torch.float64)
    grads = (
        torch.zeros_like(weights[0]),
        torch.zeros_like(weights[1]),
        torch.zeros(0, TOPK, dtype=torch.float64),
    )
    with pytest.raises(
        ValueError, match=f"{argument}=False interleaves .* the intermediate size 12 is no multiple"
    ):
        bf16_mega_moe_backward(rows, *grads, rows, *weights, odd, **{argument: False})
    if argument == "l1_natural_layout":
        with pytest.raises(ValueError, match=f"{argument}=False interleaves"):
            bf16_mega_moe(rows, *weights, odd, l1_natural_layout=False)


@pytest.mark.parametrize(
    ("l1", "l2", "message"),
    [
        (L1, L2.mT, r"do not belong together; needs \[\.\.\., 2I, H\] and \[\.\.\., H, I\]"),
        (L1, L2[0], "do not belong together"),
        (L1, L2.float(), r"torch\.float32 \[4, 64, 128\] do not belong together"),
        (L1[:, :255], L2[:, :, :127], "do not belong together"),
        (L1[0, 0], L2, r"l1_weights is of shape \[64\], needs a 2-D or 3-D tensor"),
        (None, L2, "l1_weights is a NoneType, needs a 2-D or 3-D tensor"),
    ],
)
def test_transform_weights(l1: Any, l2: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        transform_weights_for_mega_moe(l1, l2)


def test_transform_weights_activation() -> None:
    with pytest.raises(ValueError, match="unknown activation 'situ'"):
        transform_weights_for_mega_moe(L1, L2, activation="situ")
