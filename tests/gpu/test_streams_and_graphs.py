"""The SM90 kernels beside other kernels, and in CUDA graphs over several virtual ranks."""

from __future__ import annotations

import math
import time

import pytest
import torch
from beside import Collective
from sm90_cases import BF16, DEVICE, FP32, Case, check, make_case, poisoned, same_bits
from test_sm90_bf16 import judge_backward, make_buffer, stage
from virtual_world import World, judge, world_of

from prime_kernels import bf16_mega_moe, bf16_mega_moe_backward, runtime
from prime_kernels.exchange import ExchangeShape

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("sm90_kernels", "settings_undone")]

HELD_SECONDS = 0.03
WAIT_SECONDS = 5.0


@pytest.fixture
def all_sms() -> int:
    return torch.cuda.get_device_properties(DEVICE).multi_processor_count


def wait_for(event: torch.cuda.Event, seconds: float = WAIT_SECONDS) -> bool:
    """Whether it comes in time."""
    end = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > end:
            return False
    return True


class Layer:
    """One rank through the public functions; after the first run nothing is allocated any more."""

    def __init__(self, case: Case) -> None:
        self.case, self.buffer = case, make_buffer(case)
        self.stream = torch.cuda.Stream(DEVICE)
        self.out = {
            "y": poisoned(case.x.shape, BF16), "dx": poisoned(case.x.shape, BF16),
            "dtopk": poisoned(case.topk_idx.shape, FP32), "dw1": poisoned(case.gate_up.shape, FP32),
            "dw2": poisoned(case.down.shape, FP32),
        }  # fmt: skip
        torch.cuda.synchronize()
        assert wait_for(self.launch())
        check("y", self.out["y"], case.y)
        judge_backward(case, {name: value for name, value in self.out.items() if name != "y"})
        self.want = {name: value.clone() for name, value in self.out.items()}
        torch.cuda.synchronize()

    def launch(self) -> torch.cuda.Event:
        """Both directions on the layer's stream; the event comes when they are through."""
        case, out = self.case, self.out
        weights = (case.gate_up, case.down, self.buffer)
        with torch.cuda.stream(self.stream):
            for value in out.values():
                value.fill_(math.nan)
            stage(self.buffer, case)
            bf16_mega_moe(out["y"], *weights)
            bf16_mega_moe_backward(out["dx"], out["dw1"], out["dw2"], out["dtopk"], case.dy, *weights)
            return self.stream.record_event()

    def check(self) -> None:
        """The results are those of the first run."""
        torch.cuda.synchronize()
        self.buffer.check()
        for name, value in self.want.items():
            assert same_bits(self.out[name], value), name


def test_a_side_stream_that_holds_one_sm() -> None:
    """The kernels are launched on all SMs, one is taken: they go on when it is free, and lose nothing."""
    layer = Layer(make_case(300, 8, 4, 512, 256, "random"))
    holder = Collective(1)
    holder.launch()
    holder.wait_for_rounds(1)
    done = layer.launch()
    time.sleep(HELD_SECONDS)
    holder.stop()
    assert wait_for(done)
    layer.check()


# CTAs in pairs take whole pairs of SMs. Single ones may each break another pair, and our clusters need both.
@pytest.mark.parametrize(("ctas", "cluster", "left"), [(8, 2, 8), (8, None, 16)])
def test_a_collective_that_runs_all_the_time(ctas: int, cluster: int | None, left: int, all_sms: int) -> None:
    """With SMs left for it: neither waits for the other."""
    runtime.set_num_sms(all_sms - left)
    layer = Layer(make_case(300, 8, 4, 512, 256, "random"))
    collective = Collective(ctas, cluster)
    collective.launch()
    collective.wait_for_rounds(1)
    try:
        for _ in range(3):
            assert wait_for(layer.launch()), "the kernels wait for SMs that the collective holds"
            collective.wait_for_rounds(2)  # it is running yet, on all its SMs
    finally:
        collective.stop()
    layer.check()


def test_a_collective_that_starts_while_the_kernels_run(all_sms: int) -> None:
    """Rank 0 waits in its kernel for rank 1, which is not launched before the collective has ended."""
    counts = (200, 129)
    case = make_case(sum(counts), 8, 4, 512, 256, "masked")
    world = world_of(counts, 8, 4, 512, 256, sms=all_sms - 8)
    out = world.poisoned_outputs(case, counts)
    world.stage(case, counts)
    collective = Collective(8, 2, rounds=100)
    torch.cuda.synchronize()
    world.launch(lambda index, rank: world.forward(index, case, out), absent=[1])
    time.sleep(HELD_SECONDS)  # rank 0 has taken its SMs
    collective.launch()
    finished = wait_for(collective.stream.record_event())
    waiting = not world.streams[0].query()
    world.launch(lambda index, rank: world.forward(index, case, out), absent=[0])
    world.launch(lambda index, rank: world.backward(index, case, out))
    world.check()
    assert finished
    assert waiting
    collective.finish()
    judge(out, case)


@pytest.mark.parametrize("keep_z", [False, True])
def test_graph_of_two_ranks_with_other_routing_and_data(keep_z: bool) -> None:
    """Captured once over two streams, replayed: the epochs are counted on the device."""
    counts = (150, 97)
    first = make_case(sum(counts), 8, 4, 512, 256)
    world = World(ExchangeShape(160, 4, 512, 256, 8, 2))
    world.step(first, counts, keep_z=keep_z)
    out, z = world.poisoned_outputs(first, counts), world.kept_z(keep_z)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    main, side = world.streams
    with torch.cuda.graph(graph, stream=main):
        side.wait_stream(main)
        world.launch(lambda index, rank: world.forward(index, first, out, z[index]))
        world.launch(lambda index, rank: world.backward(index, first, out, z[index]))
        main.wait_stream(side)
    for seed, kind in enumerate(("masked", "one", "skewed", "none", "even", "random"), 1):
        drawn = make_case(sum(counts), 8, 4, 512, 256, kind, seed=seed)
        case = Case(drawn.x, drawn.topk_idx, drawn.topk_weights, first.gate_up, first.down, drawn.dy)
        results = []
        for _ in range(2):
            world.stage(case, counts)
            for tensor in (*out.all(), *(kept for kept in z if kept is not None)):
                tensor.fill_(math.nan)
            torch.cuda.synchronize()
            graph.replay()
            world.check()
            results.append([tensor.clone() for tensor in out.all()])
        judge(out, case)
        assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    # Calls outside of the graph go on from the epoch that the replays have reached.
    judge(world.step(first, counts, keep_z=keep_z), first)


def test_ranks_on_streams_of_unlike_priority() -> None:
    counts = (100, 60, 0, 33)
    case = make_case(sum(counts), 8, 2, 512, 256, "random")
    world = world_of(counts, 8, 2, 512, 256)
    want = world.step(case, counts)
    judge(want, case)
    world.streams = [torch.cuda.Stream(DEVICE, priority=-(index % 2)) for index in range(len(counts))]
    got = world.poisoned_outputs(case, counts)
    torch.cuda.synchronize()
    for _ in range(20):
        world.launch(lambda index, rank: world.forward(index, case, got))
        world.launch(lambda index, rank: world.backward(index, case, got))
    world.check()
    assert all(same_bits(a, b) for a, b in zip(got.all(), want.all(), strict=True))
