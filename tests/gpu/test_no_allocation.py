"""After the first step, a step of the routed experts allocates nothing, neither from torch nor the driver."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sm90_cases import BF16, DEVICE, FP32, Case, check, make_case
from test_sm90_bf16 import make_buffer, stage
from torch import Tensor

from prime_kernels import SymmBuffer, bf16_mega_moe, bf16_mega_moe_backward
from prime_kernels.bf16 import backward_from_z, forward_keeping_z
from prime_kernels.reference import deinterleave_gate_up, interleave_gate_up

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("sm90_kernels")]

TOKENS, EXPERTS, TOPK, HIDDEN, INTER = 320, 8, 4, 512, 256
STEPS = 3
MIB = 2**20


class Counters:
    """What was asked of torch's allocator, and the memory the driver has left."""

    def __init__(self) -> None:
        torch.cuda.synchronize(DEVICE)
        stats = torch.cuda.memory_stats(DEVICE)
        self.tensors = stats["allocation.all.allocated"]
        self.tensor_bytes = stats["requested_bytes.all.allocated"]
        self.segments = stats["segment.all.allocated"]
        self.free = torch.cuda.mem_get_info(DEVICE)[0]


def growth(step: Callable[[int], None]) -> tuple[int, int]:
    """Tensors that ``STEPS`` steps after the first one allocate, and their bytes."""
    step(0)
    before = Counters()
    for number in range(1, STEPS + 1):
        step(number)
    after = Counters()
    assert after.segments == before.segments
    # Other processes may use the same GPU, and give back meanwhile.
    assert after.free >= before.free - MIB
    return after.tensors - before.tensors, after.tensor_bytes - before.tensor_bytes


class Outputs:
    """Made once, for a case with the most tokens; NaN until a step writes them."""

    def __init__(self, case: Case, dw_dtype: torch.dtype) -> None:
        nan = float("nan")
        self.y, self.dx = torch.full_like(case.x, nan), torch.full_like(case.x, nan)
        self.dtopk = torch.full_like(case.topk_weights, nan)
        self.dw1 = torch.full_like(case.gate_up, nan, dtype=dw_dtype)
        self.dw2 = torch.full_like(case.down, nan, dtype=dw_dtype)

    def judge(self, case: Case, dw1: Tensor | None = None) -> None:
        """The last step, which was of ``case``; ``dw1``: the gradient with rows [gate | up]."""
        n = case.num_tokens
        check("y", self.y[:n], case.y)
        check("dx", self.dx[:n], case.grads.dx)
        check("dtopk", self.dtopk[:n], case.grads.dtopk)
        check("dw1", self.dw1 if dw1 is None else dw1, case.grads.dgate_up, matrices=True)
        check("dw2", self.dw2, case.grads.ddown, matrices=True)


def make_cases() -> list[Case]:
    """Steps of other numbers of tokens and other loads, over the weights of the first."""
    first = make_case(TOKENS, EXPERTS, TOPK, HIDDEN, INTER, "masked")
    others = [
        make_case(tokens, EXPERTS, TOPK, HIDDEN, INTER, kind, seed=seed)
        for seed, (tokens, kind) in enumerate([(17, "one"), (TOKENS, "skewed"), (129, "random")], 1)
    ]
    return [
        first,
        *(
            Case(case.x, case.topk_idx, case.topk_weights, first.gate_up, first.down, case.dy)
            for case in others
        ),
    ]


def run(case: Case, buffer: SymmBuffer, out: Outputs, **options: bool) -> None:
    stage(buffer, case)
    n = case.num_tokens
    forward_options = {name: value for name, value in options.items() if name == "l1_natural_layout"}
    bf16_mega_moe(out.y[:n], case.gate_up, case.down, buffer, **forward_options)
    bf16_mega_moe_backward(
        out.dx[:n], out.dw1, out.dw2, out.dtopk[:n], case.dy, case.gate_up, case.down, buffer, **options
    )


@pytest.mark.parametrize("dw_dtype", [FP32, BF16])
def test_steps_of_any_routing_and_number_of_tokens(dw_dtype: torch.dtype) -> None:
    cases = make_cases()
    buffer, out = make_buffer(cases[0]), Outputs(cases[0], dw_dtype)
    assert growth(lambda number: run(cases[number], buffer, out)) == (0, 0)
    out.judge(cases[-1])


def test_interleaved_weights_and_gradients() -> None:
    """They go through memory that the buffer keeps."""
    natural = make_case(TOKENS, EXPERTS, TOPK, HIDDEN, INTER)
    alternating = interleave_gate_up(natural.gate_up)
    case = Case(natural.x, natural.topk_idx, natural.topk_weights, alternating, natural.down, natural.dy)
    buffer, out = make_buffer(case), Outputs(case, FP32)
    layouts = {"l1_natural_layout": False, "dw_natural_layout": False}
    assert growth(lambda _: run(case, buffer, out, **layouts)) == (0, 0)
    out.judge(natural, dw1=deinterleave_gate_up(out.dw1))


def test_two_layers_over_views_of_one_buffer() -> None:
    large, small = make_case(TOKENS, EXPERTS, TOPK, 768, 384), make_case(200, EXPERTS, TOPK, HIDDEN, INTER)
    base = make_buffer(large)
    view = make_buffer(small, 250, base)
    outs = [Outputs(large, FP32), Outputs(small, FP32)]

    def step(_: int) -> None:
        run(large, base, outs[0])
        run(small, view, outs[1])

    assert growth(step) == (0, 0)
    outs[0].judge(large)
    outs[1].judge(small)


def test_what_keeping_z_allocates_is_z() -> None:
    case = make_case(TOKENS, EXPERTS, TOPK, HIDDEN, INTER)
    buffer, out = make_buffer(case), Outputs(case, FP32)

    def step(_: int) -> None:
        stage(buffer, case)
        weights = (case.gate_up, case.down, buffer)
        z = forward_keeping_z(out.y, *weights, None, None, None, buffer.pool_rows)
        outputs = (out.dx, out.dw1, out.dw2, out.dtopk)
        backward_from_z(*outputs, case.dy, *weights, None, None, None, None, None, accumulate=False, z=z)

    z_bytes = buffer.pool_rows * 2 * INTER * BF16.itemsize
    assert growth(step) == (STEPS, STEPS * z_bytes)
    out.judge(case)
