"""The SM90 kernels at the sizes of real layers, and where offsets leave 32 bits."""

from __future__ import annotations

import pytest
import torch
from sm90_cases import BF16, DEVICE, FP32, check, compile_together, make_case, poisoned
from test_sm90_bf16 import make_buffer, run_both
from test_values import with_rows
from torch import Tensor

from prime_kernels import SymmBuffer, bf16_mega_moe, bf16_mega_moe_backward, sm90
from prime_kernels.backward import sm90_bf16 as backward_kernel
from prime_kernels.forward import sm90_bf16 as forward_kernel
from prime_kernels.reference import moe_backward, moe_forward

pytestmark = pytest.mark.gpu

# (H, I). No tile divides 2880, the last half of one is cut off 1408.
SHAPES = ((2048, 768), (4096, 1536), (7168, 2048), (8192, 1408), (2880, 2880))
SPLITS = (162, 0, 2577, 446, 0, 83)
LARGE = (7168, 2048)
LIMIT = 2**31
NUM_EXPERTS, TOPK = 80, 8
NUM_TOKENS = LIMIT // (LARGE[0] * TOPK) + 100
SAMPLE = 6  # tokens; their experts in float64 take 0.7 GB each


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    sources = [sm90.plan_source(entry) for entry in sm90.PLAN_ENTRIES]
    for shape in SHAPES:
        sources += [forward_kernel.source(*shape), backward_kernel.source(*shape)]
    compile_together(sources)


@pytest.mark.parametrize("shape", SHAPES)
def test_splits_of_real_layers(shape: tuple[int, int]) -> None:
    case = with_rows(SPLITS, shape)
    run_both(make_buffer(case, case.num_tokens), case, dw_dtype=BF16)


@pytest.mark.parametrize("shape", SHAPES)
def test_several_slots(shape: tuple[int, int]) -> None:
    case = make_case(257, 6, 4, *shape, "masked")
    run_both(make_buffer(case), case)


def test_pools_and_weights_of_more_than_2_to_the_31_elements() -> None:
    """The first and the last tokens and experts against float64: rows at both ends of everything."""
    hidden, inter = LARGE
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=BF16, device=DEVICE).normal_(std=scale, generator=generator)

    buffer = SymmBuffer(None, NUM_EXPERTS, NUM_TOKENS, TOPK, hidden, inter, mma_type="bf16xbf16")
    gate_up = normal(NUM_EXPERTS, 2 * inter, hidden, scale=hidden**-0.5)
    down = normal(NUM_EXPERTS, hidden, inter, scale=1.6 * inter**-0.5)
    dy = normal(NUM_TOKENS, hidden)
    buffer.x.normal_(generator=generator)
    buffer.topk_idx.random_(NUM_EXPERTS, generator=generator)
    buffer.topk_weights.uniform_(generator=generator)
    y, dx = poisoned(dy.shape, BF16), poisoned(dy.shape, BF16)
    dtopk = poisoned((NUM_TOKENS, TOPK), FP32)
    dw1, dw2 = poisoned(gate_up.shape, FP32), poisoned(down.shape, FP32)
    assert buffer.sm90.pools.x.numel() > LIMIT
    assert NUM_TOKENS * TOPK * hidden > LIMIT  # slots
    assert gate_up.numel() > LIMIT
    bf16_mega_moe(y, gate_up, down, buffer)
    bf16_mega_moe_backward(dx, dw1, dw2, dtopk, dy, gate_up, down, buffer)
    buffer.check()
    for name, value in {"y": y, "dx": dx, "dtopk": dtopk, "dw1": dw1, "dw2": dw2}.items():
        assert not bool(value.isnan().any()), name

    for tokens in (slice(0, SAMPLE), slice(NUM_TOKENS - SAMPLE, NUM_TOKENS)):
        # A token's own results need the experts it went to, and no other token.
        chosen, idx = buffer.topk_idx[tokens].unique(return_inverse=True)
        inputs = (
            buffer.x[tokens].double(), idx, buffer.topk_weights[tokens].double(),
            gate_up[chosen].double(), down[chosen].double(),
        )  # fmt: skip
        check("y", y[tokens], moe_forward(*inputs))
        grads = moe_backward(dy[tokens].double(), *inputs)
        check("dx", dx[tokens], grads.dx)
        check("dtopk", dtopk[tokens], grads.dtopk)
    for expert in (0, NUM_EXPERTS - 1):
        # An expert's gradients need the slots that went to it, and no other expert.
        tokens = (buffer.topk_idx == expert).any(1)
        idx = (buffer.topk_idx[tokens] != expert).long().neg()
        own = slice(expert, expert + 1)
        grads = moe_backward(
            dy[tokens].double(), buffer.x[tokens].double(), idx, buffer.topk_weights[tokens].double(),
            gate_up[own].double(), down[own].double(),
        )  # fmt: skip
        check(f"dw1 of expert {expert}", dw1[own], grads.dgate_up)
        check(f"dw2 of expert {expert}", dw2[own], grads.ddown)
