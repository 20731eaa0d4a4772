"""The SM90 BF16 kernels through the public functions, on one rank."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sm90_cases import (
    BF16,
    DEVICE,
    FP32,
    Case,
    check,
    make_case,
    poison_bytes,
    poisoned,
    relative_error,
    same_bits,
)
from torch import Tensor

from prime_kernels import (
    SymmBuffer,
    bf16_mega_moe,
    bf16_mega_moe_backward,
    runtime,
    status,
)
from prime_kernels.exchange import FLAGS_BYTES
from prime_kernels.reference import deinterleave_gate_up, interleave_gate_up

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("sm90_kernels", "settings_undone")]

TOKENS = 320
SLEEP_CYCLES = 200_000_000  # about 0.1 s


def make_buffer(case: Case, tokens: int = TOKENS, base: SymmBuffer | None = None) -> SymmBuffer:
    experts, hidden, inter = case.down.shape
    topk = case.topk_idx.shape[1]
    buffer = SymmBuffer(None, experts, tokens, topk, hidden, inter, mma_type="bf16xbf16", base=base)
    assert buffer.backend == "sm90"
    return buffer


def poison(buffer: SymmBuffer) -> None:
    """What earlier calls could have left anywhere, except for the flags."""
    assert buffer.buffer is not None
    assert buffer.sm90 is not None
    buffer.sm90.pools.add_backward()
    poison_bytes(buffer.buffer[FLAGS_BYTES:], buffer.sm90.pools)
    buffer.topk_idx.fill_(0)


def stage(buffer: SymmBuffer, case: Case) -> None:
    count = case.num_tokens
    buffer.x[:count].copy_(case.x)
    buffer.topk_idx[:count].copy_(case.topk_idx)
    buffer.topk_weights[:count].copy_(case.topk_weights)


def forward(buffer: SymmBuffer, case: Case, y: Tensor | None = None, **options: Any) -> Tensor:
    stage(buffer, case)
    y = poisoned(case.x.shape, BF16) if y is None else y
    options = {"activation_clamp": case.clamp, **options}
    weights = (options.pop("gate_up", case.gate_up), options.pop("down", case.down))
    bf16_mega_moe(y, *weights, buffer, *(case.shared or (None, None)), **options)
    return y


def backward(
    buffer: SymmBuffer, case: Case, *, dw_dtype: torch.dtype = FP32, skip: tuple[str, ...] = (),
    initial: dict[str, Tensor] | None = None, **options: Any,
) -> dict[str, Tensor | None]:  # fmt: skip
    """Outputs by name. ``skip``: passed as None; ``initial``: what the weight gradients are added to."""
    stage(buffer, case)
    shapes = {"dw1": case.gate_up.shape, "dw2": case.down.shape}
    if case.shared is not None:
        shapes |= {"shared_dw1": case.shared[0].shape, "shared_dw2": case.shared[1].shape}
    dw: dict[str, Tensor | None] = dict.fromkeys(("dw1", "dw2", "shared_dw1", "shared_dw2"))
    for name, shape in shapes.items():
        if name not in skip:
            dw[name] = poisoned(shape, dw_dtype) if initial is None else initial[name].clone()
    dx, dtopk = poisoned(case.x.shape, BF16), poisoned(case.topk_idx.shape, FP32)
    options = {"activation_clamp": case.clamp, "accumulate": initial is not None, **options}
    weights = (options.pop("gate_up", case.gate_up), options.pop("down", case.down))
    bf16_mega_moe_backward(
        dx, dw["dw1"], dw["dw2"], dtopk, case.dy, *weights, buffer,
        *(case.shared or (None, None)), dw["shared_dw1"], dw["shared_dw2"], **options,
    )  # fmt: skip
    return {"dx": dx, "dtopk": dtopk, **dw}


def judge_backward(
    case: Case, got: dict[str, Tensor | None], initial: dict[str, Tensor] | None = None
) -> None:
    grads = case.grads
    want = {
        "dx": grads.dx, "dtopk": grads.dtopk, "dw1": grads.dgate_up, "dw2": grads.ddown,
        "shared_dw1": grads.dshared_gate_up, "shared_dw2": grads.dshared_down,
    }  # fmt: skip
    for name, value in got.items():
        if value is not None:
            expected = want[name]
            assert expected is not None
            if initial is not None and name in initial:
                expected = expected + initial[name]
            check(name, value, expected, matrices=name in ("dw1", "dw2"))
    assert got["dtopk"] is not None
    assert bool((got["dtopk"][case.topk_idx < 0] == 0).all())


def run_both(buffer: SymmBuffer, case: Case, **options: Any) -> dict[str, Tensor | None]:
    poison(buffer)
    y = forward(buffer, case)
    check("y", y, case.y)
    poison(buffer)
    got = backward(buffer, case, **options)
    judge_backward(case, got, options.get("initial"))
    buffer.check()
    return {"y": y, **got}


def test_status_says_available() -> None:
    assert status()["mega_moe_bf16"] == "available"
    assert status()["mega_moe_bf16_backward"] == "available"


@pytest.mark.parametrize(
    ("tokens", "experts", "topk", "shape", "kind", "clamp", "dw_dtype"),
    [
        (320, 8, 4, (512, 256), "even", None, FP32),
        (300, 6, 3, (512, 256), "masked", 1.0, BF16),
        (257, 8, 8, (768, 384), "even", 0.7, FP32),  # K = E
        (320, 5, 4, (768, 384), "random", None, BF16),  # the same expert twice in a token
        (128, 16, 2, (512, 256), "one", None, BF16),  # 15 idle experts
        (129, 33, 12, (512, 256), "skewed", None, FP32),
        (300, 6, 3, (320, 192), "masked", 0.7, FP32),
        (257, 5, 4, (320, 192), "random", None, BF16),
        (1, 8, 2, (512, 256), "even", None, FP32),
        (0, 8, 2, (512, 256), "even", None, FP32),
    ],
)
def test_parity_with_float64(
    tokens: int, experts: int, topk: int, shape: tuple[int, int], kind: str, clamp: float | None,
    dw_dtype: torch.dtype,
) -> None:  # fmt: skip
    case = make_case(tokens, experts, topk, *shape, kind, clamp=clamp)
    run_both(make_buffer(case), case, dw_dtype=dw_dtype)


def test_every_slot_masked() -> None:
    case = make_case(64, 4, 2, 512, 256)
    case.topk_idx.fill_(-1)
    case.topk_weights.fill_(math.nan)
    buffer = make_buffer(case)
    poison(buffer)
    assert bool((forward(buffer, case) == 0).all())
    for name, value in backward(buffer, case).items():
        assert value is None or bool((value == 0).all()), name
    buffer.check()


def test_a_clamp_that_binds_nowhere_changes_nothing() -> None:
    case = make_case(64, 4, 2, 512, 256)
    buffer = make_buffer(case)
    check("y", forward(buffer, case, activation_clamp=1e9), case.y)
    assert relative_error(forward(buffer, case, activation_clamp=0.3), case.y) > 0.1


def test_accumulates_in_fp32() -> None:
    case = make_case(TOKENS, 8, 4, 512, 256, "masked")
    weights = {"dw1": case.gate_up, "dw2": case.down}
    initial = {name: torch.randn(weight.shape, device=DEVICE) for name, weight in weights.items()}
    run_both(make_buffer(case), case, initial=initial)


@pytest.mark.parametrize("skip", [("dw1",), ("dw2",), ("dw1", "dw2")])
def test_frozen_weights(skip: tuple[str, ...]) -> None:
    case = make_case(200, 8, 4, 512, 256)
    got = run_both(make_buffer(case), case, skip=skip)
    assert all(got[name] is None for name in skip)


def strided(weight: Tensor) -> Tensor:
    """The same values between NaN columns and NaN matrices."""
    experts, rows, columns = weight.shape
    wide = poisoned((experts, 2, rows, columns + 64), weight.dtype)
    view = wide[:, 1, :, :columns]
    view.copy_(weight)
    return view


@pytest.mark.parametrize("shape", [(512, 256), (320, 192)])
def test_strided_weights_and_gradients_are_used_where_they_are(shape: tuple[int, int]) -> None:
    case = make_case(200, 8, 4, *shape)
    buffer = make_buffer(case)
    weights = {"gate_up": strided(case.gate_up), "down": strided(case.down)}
    y = forward(buffer, case, **weights)
    assert same_bits(y, forward(buffer, case))
    plain = backward(buffer, case)
    stage(buffer, case)
    dw1, dw2 = strided(torch.zeros_like(plain["dw1"])), strided(torch.zeros_like(plain["dw2"]))
    around = dw1._base.isnan().sum() + dw2._base.isnan().sum()
    dx, dtopk = poisoned(case.x.shape, BF16), poisoned(case.topk_idx.shape, FP32)
    bf16_mega_moe_backward(dx, dw1, dw2, dtopk, case.dy, weights["gate_up"], weights["down"], buffer)
    for value, name in ((dx, "dx"), (dtopk, "dtopk"), (dw1.contiguous(), "dw1"), (dw2.contiguous(), "dw2")):
        assert same_bits(value, plain[name]), name
    assert dw1._base.isnan().sum() + dw2._base.isnan().sum() == around  # nothing beside the views is written
    hidden, inter = shape
    with pytest.raises(ValueError, match=rf"l1_weights has stride {hidden + 4} in dim 1.*multiples of 8"):
        forward(buffer, case, gate_up=poisoned((8, 2 * inter, hidden + 4), BF16)[..., :hidden])


def test_strided_activations() -> None:
    case = make_case(100, 4, 2, 512, 256)
    buffer = make_buffer(case)
    wide = poisoned((100, 2, 512), BF16)
    forward(buffer, case, wide[:, 0])
    assert same_bits(wide[:, 0].contiguous(), forward(buffer, case))
    assert bool(wide[:, 1].isnan().all())


@pytest.mark.parametrize("accumulate", [False, True])
def test_interleaved_layouts(accumulate: bool) -> None:
    case = make_case(200, 6, 3, 512, 256, "masked", shared_inter=128)
    buffer = make_buffer(case)
    assert case.shared is not None
    initial = None
    if accumulate:
        weights = {"dw1": case.gate_up, "dw2": case.down}
        weights |= {"shared_dw1": case.shared[0], "shared_dw2": case.shared[1]}
        initial = {name: torch.randn(weight.shape, device=DEVICE) for name, weight in weights.items()}
    plain_y, plain = forward(buffer, case), backward(buffer, case, initial=initial)
    interleaved = Case(
        case.x, case.topk_idx, case.topk_weights, interleave_gate_up(case.gate_up), case.down, case.dy,
        shared=(interleave_gate_up(case.shared[0]), case.shared[1]),
    )  # fmt: skip
    assert same_bits(plain_y, forward(buffer, interleaved, l1_natural_layout=False))
    if initial is not None:
        initial |= {name: interleave_gate_up(initial[name]) for name in ("dw1", "shared_dw1")}
    got = backward(buffer, interleaved, initial=initial, l1_natural_layout=False, dw_natural_layout=False)
    for name, value in got.items():
        assert value is not None
        natural = deinterleave_gate_up(value) if name in ("dw1", "shared_dw1") else value
        assert relative_error(natural, plain[name]) < 1e-6, name
    buffer.check()


@pytest.mark.parametrize("dw_dtype", [FP32, BF16])
def test_shared_expert(dw_dtype: torch.dtype) -> None:
    case = make_case(200, 6, 3, 512, 256, "masked", clamp=1.0, shared_inter=384)
    run_both(make_buffer(case), case, dw_dtype=dw_dtype)


def test_receive_counts_are_added() -> None:
    case = make_case(200, 6, 3, 512, 256, "masked")
    stats = torch.full((6,), 7, dtype=torch.int32, device=DEVICE)
    forward(make_buffer(case), case, cumulative_local_expert_recv_stats=stats)
    want = torch.bincount(case.topk_idx[case.topk_idx >= 0], minlength=6) + 7
    assert torch.equal(stats.long(), want)


def test_repeated_runs_give_the_same_bits() -> None:
    case = make_case(TOKENS, 8, 4, 768, 384, "random")
    buffer = make_buffer(case)
    first = run_both(buffer, case)
    for _ in range(3):
        for name, value in run_both(buffer, case).items():
            if value is not None:
                assert same_bits(value, first[name]), name


def test_fewer_sms() -> None:
    case = make_case(200, 8, 4, 512, 256)
    buffer = make_buffer(case)
    all_sms = forward(buffer, case)
    runtime.set_num_sms(33)
    assert same_bits(forward(buffer, case), all_sms)
    assert buffer.sm90.num_ctas == 32
    for limit in (1, 100_000):
        runtime.set_num_sms(limit)
        with pytest.raises(ValueError, match=f"set_num_sms was given {limit}"):
            forward(buffer, case)


def test_another_stream() -> None:
    case = make_case(200, 8, 4, 512, 256)
    buffer = make_buffer(case)
    want = forward(buffer, case)
    backward(buffer, case)  # loads its kernel
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        got = forward(buffer, case)
        grads = backward(buffer, case)
        event = stream.record_event()
    assert not event.query()  # neither call waited for the device
    stream.synchronize()
    assert same_bits(got, want)
    judge_backward(case, grads)


def test_graph_replay_with_other_routing_and_data() -> None:
    first = make_case(200, 8, 4, 512, 256, "even")
    buffer = make_buffer(first)
    y, dx, dtopk = poisoned(first.x.shape, BF16), poisoned(first.x.shape, BF16), poisoned((200, 4), FP32)
    dy = first.dy.clone()
    dw1, dw2 = torch.empty_like(first.gate_up), torch.empty_like(first.down)

    def step() -> None:
        bf16_mega_moe(y, first.gate_up, first.down, buffer)
        bf16_mega_moe_backward(dx, dw1, dw2, dtopk, dy, first.gate_up, first.down, buffer)

    stage(buffer, first)
    early = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="run the captured calls once before"), torch.cuda.graph(early):
        step()
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed, kind in enumerate(("masked", "one", "skewed", "even", "random"), 1):
        drawn = make_case(200, 8, 4, 512, 256, kind, seed=seed)
        case = Case(drawn.x, drawn.topk_idx, drawn.topk_weights, first.gate_up, first.down, drawn.dy)
        stage(buffer, case)
        dy.copy_(case.dy)
        for output in (y, dx, dtopk, dw1, dw2):
            output.fill_(math.nan)
        graph.replay()
        check("y", y, case.y)
        judge_backward(case, {"dx": dx, "dtopk": dtopk, "dw1": dw1, "dw2": dw2})
    buffer.check()


def test_layers_of_other_shapes_share_one_buffer() -> None:
    """F1 F2 B2 B1, over and over: flags and epochs are those of the base, whatever the shape."""
    large, small = make_case(TOKENS, 8, 4, 768, 384), make_case(200, 6, 3, 512, 256, "masked", seed=1)
    base = make_buffer(large)
    view = make_buffer(small, 250, base)
    assert view.buffer.data_ptr() == base.buffer.data_ptr()
    assert view.num_bytes < base.num_bytes
    for _ in range(3):
        y1, y2 = forward(base, large), forward(view, small)
        grads2, grads1 = backward(view, small), backward(base, large)
        check("y of layer 1", y1, large.y)
        check("y of layer 2", y2, small.y)
        judge_backward(small, grads2)
        judge_backward(large, grads1)
    base.check()
    with pytest.raises(ValueError, match=r"the view needs \d+ bytes of .* and its base holds \d+ bytes"):
        make_buffer(large, 2 * TOKENS, base)
    base.destroy()
    with pytest.raises(RuntimeError, match="destroyed"):
        forward(view, small)


def test_pool_overflow_raises_and_the_buffer_works_on() -> None:
    runtime.set_pool_capacity_factor(0.25)
    case = make_case(TOKENS, 4, 4, 512, 256)
    buffer = make_buffer(case)
    forward(buffer, case)
    with pytest.raises(RuntimeError, match=r"needs 1536 pool rows and 896 are allocated.*set_pool"):
        buffer.check()
    few = make_case(40, 4, 4, 512, 256)
    run_both(buffer, few)
    forward(buffer, case)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="pool rows"):  # the next call raises it, too
        forward(buffer, few)
    run_both(buffer, few)
    forward(buffer, case)
    with pytest.raises(RuntimeError, match="pool rows"):
        buffer.destroy()
    runtime.set_synchronous_checks(True)
    with pytest.raises(RuntimeError, match="pool rows"):
        forward(make_buffer(case), case)


def test_bad_expert_index_raises_and_the_buffer_works_on() -> None:
    case = make_case(64, 4, 2, 512, 256)
    buffer = make_buffer(case)
    for bad in (4, -2, 2**40):
        wrong = make_case(64, 4, 2, 512, 256)
        wrong.topk_idx[3, 1] = bad
        forward(buffer, wrong)
        with pytest.raises(ValueError, match=f"entry 7 holds expert {bad}, the limit is 0 <= expert < 4"):
            buffer.check()
        run_both(buffer, case)


def test_refusals_before_any_launch() -> None:
    case = make_case(64, 4, 2, 512, 256)
    buffer = make_buffer(case, 64)
    with pytest.raises(RuntimeError, match="buffer is sized for 64 tokens/rank, got 65"):
        bf16_mega_moe(poisoned((65, 512), BF16), case.gate_up, case.down, buffer)
    with pytest.raises(ValueError, match="l1_weights is on cpu, the buffer is on cuda:0"):
        forward(buffer, case, gate_up=case.gate_up.cpu())
    with pytest.raises(ValueError, match=r"y is torch\.float32"):
        forward(buffer, case, poisoned((64, 512), FP32))
    with pytest.raises(ValueError, match=r"hidden is 192.*multiple of 64 and at least 256; use 256, or pad"):
        SymmBuffer(None, 4, 64, 2, 192, 256, mma_type="bf16xbf16")
    with pytest.raises(ValueError, match=r"intermediate_hidden is 96.*multiple of 64; use 64 or 128, or pad"):
        SymmBuffer(None, 4, 64, 2, 512, 96, mma_type="bf16xbf16")
    with pytest.raises(ValueError, match="num_experts is 385, the SM90 kernels take at most 384"):
        SymmBuffer(None, 385, 64, 2, 512, 256, mma_type="bf16xbf16")
    with pytest.raises(RuntimeError, match="'f32xf32' has no GPU kernel"):
        SymmBuffer(None, 4, 64, 2, 512, 256, mma_type="f32xf32")


def test_over_a_process_group_of_one(tmp_path: Path) -> None:
    case = make_case(64, 4, 2, 512, 256)
    for attempt in range(2):  # a second group after the first was destroyed
        dist.init_process_group("nccl", init_method=f"file://{tmp_path}/{attempt}", rank=0, world_size=1)
        try:
            buffer = make_buffer(case)
            run_both(buffer, case)
            buffer.destroy()
        finally:
            dist.destroy_process_group()


def test_another_current_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    case = make_case(64, 4, 2, 512, 256)
    buffer = make_buffer(case)
    with torch.cuda.device(1):
        run_both(buffer, case)


def test_hundreds_of_steps() -> None:
    """Micro-batches of changing size back to back, gradients added up in fp32."""
    cases = [make_case(n, 8, 4, 512, 256, "random", seed=n) for n in (0, 1, 127, 128, TOKENS)]
    buffer = make_buffer(cases[0])
    weights = (cases[0].gate_up, cases[0].down)
    dw1, dw2 = (torch.zeros(weight.shape, device=DEVICE) for weight in weights)
    once1, once2 = torch.zeros_like(dw1), torch.zeros_like(dw2)
    rounds = 40

    def step(case: Case, into1: Tensor, into2: Tensor) -> None:
        stage(buffer, case)
        bf16_mega_moe(poisoned(case.x.shape, BF16), *weights, buffer)
        bf16_mega_moe_backward(
            poisoned(case.x.shape, BF16), into1, into2, poisoned(case.topk_idx.shape, FP32), case.dy,
            *weights, buffer, accumulate=True,
        )  # fmt: skip

    for case in cases:
        step(case, once1, once2)
    for _ in range(rounds):
        for case in cases:
            step(case, dw1, dw2)
    buffer.check()
    assert relative_error(dw1, rounds * once1.double()) < 1e-5
    assert relative_error(dw2, rounds * once2.double()) < 1e-5
