"""The SM90 kernels over the ranks of a process group, one GPU each, with memory from torch's rendezvous.

    torchrun --standalone --nproc-per-node 8 -m pytest -m gpu tests/gpu/test_several_gpus.py

runs every test on all ranks in step; ci/gpu_ep.sh does that. Without torchrun the group is this process
alone: the same path, without a peer. All ranks judge the outputs of all, so that they pass or fail together.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import sm90_cases
import torch
import torch.distributed as dist
from sm90_cases import BF16, Case, compile_all, make_case, poison_bytes, poisoned, same_bits
from torch import Tensor
from torch.distributed.rendezvous import rendezvous
from virtual_world import Outputs, judge

from prime_kernels import SymmBuffer, bf16_mega_moe, bf16_mega_moe_backward, mega_moe, runtime, sm90_memory
from prime_kernels.exchange import FLAGS_BYTES

pytestmark = pytest.mark.gpu

TOKENS = 300
HIDDEN, INTER = 512, 256
# Of the kernels, and of the group's collectives.
TIMEOUT_SECONDS, GROUP_TIMEOUT = 60.0, timedelta(seconds=180)
SHORT_TIMEOUT_SECONDS = 2.0
# Ranks with very different numbers of tokens.
UNEQUAL = (TOKENS, 45, 0, 129, 1, 128, 127, TOKENS)
STEPS = 200
# Left to NCCL, as the prime-rl integration does by default.
RESERVED_SMS = 16
JITTER_CYCLES = 200_000  # about 0.1 ms
LATE_CYCLES = 1_000_000_000  # about 0.5 s
LATE_SECONDS = 2.0


@dataclass
class Ranks:
    """This rank among its peers. ``store``: where groups meet; ``groups``: how many there were."""

    store: Any
    rank: int
    size: int
    groups: int = field(default=0)

    def join(self) -> None:
        self.groups += 1
        store = dist.PrefixStore(f"group{self.groups}", self.store)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", store=store, rank=self.rank, world_size=self.size, timeout=GROUP_TIMEOUT
        )

    def gather(self, value: Any) -> list[Any]:
        """Of all ranks. Tensors arrive on the CPU."""
        everyone = [None] * self.size
        dist.all_gather_object(everyone, value.cpu() if isinstance(value, Tensor) else value)
        return everyone

    def all_agree(self, right: bool, what: str) -> None:
        wrong = [rank for rank, theirs in enumerate(self.gather(right)) if not theirs]
        assert wrong == [], f"{what}: wrong on ranks {wrong}"

    def counts(self, pattern: Sequence[int] = UNEQUAL) -> list[int]:
        """Tokens of each rank: the pattern, again and again."""
        return [pattern[rank % len(pattern)] for rank in range(self.size)]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """The ranks torchrun started, or this one alone."""
    if "RANK" in os.environ:
        store, rank, size = next(rendezvous("env://"))
    else:
        store, rank, size = dist.HashStore(), 0, 1
    local = int(os.environ.get("LOCAL_RANK", "0"))
    world = Ranks(store, rank, size)
    with pytest.MonkeyPatch.context() as patch:
        device = torch.device("cuda", local)
        patch.setattr(sm90_cases, "DEVICE", device)
        # One rank would otherwise take plain memory.
        patch.setattr(sm90_memory, "symmetric_storage", sm90_memory._rendezvous)
        patch.setattr(runtime, "_timeout_seconds", TIMEOUT_SECONDS)
        with torch.cuda.device(device):
            world.join()
            if rank == 0:
                compile_all()  # once; the others take the kernels from the cache
            world.gather(None)
            yield world
            dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test sets is undone."""
    for name in ("_num_sms", "_timeout_seconds", "_pool_capacity_factor"):
        monkeypatch.setattr(runtime, name, getattr(runtime, name))


@pytest.fixture
def peers(ranks: Ranks) -> Ranks:
    """For tests that one rank alone says nothing about."""
    if ranks.size < 2:
        pytest.skip("needs a peer: several GPUs and torchrun")
    return ranks


class Share:
    """This rank's part of a global case: what it stages, its weights and its outputs."""

    def __init__(self, ranks: Ranks, case: Case, counts: Sequence[int]) -> None:
        self.ranks, self.case = ranks, case
        start = sum(counts[: ranks.rank])
        self.tokens = slice(start, start + counts[ranks.rank])
        self.count = counts[ranks.rank]
        local = case.gate_up.shape[0] // ranks.size
        experts = slice(ranks.rank * local, (ranks.rank + 1) * local)
        self.gate_up, self.down = case.gate_up[experts], case.down[experts]
        self.dy = case.dy[self.tokens]
        self.y, self.dx = (poisoned((self.count, case.x.shape[1]), BF16) for _ in "yx")
        self.dtopk = poisoned((self.count, case.topk_idx.shape[1]), torch.float32)
        self.dw1, self.dw2 = (poisoned(weight.shape, torch.float32) for weight in (self.gate_up, self.down))

    def outputs(self) -> list[Tensor]:
        return [self.y, self.dx, self.dtopk, self.dw1, self.dw2]

    def stage(self, buffer: SymmBuffer) -> None:
        """On the current stream, into memory that holds nothing valid."""
        assert buffer.buffer is not None
        assert buffer.sm90 is not None
        buffer.sm90.pools.add_backward()
        poison_bytes(buffer.buffer[FLAGS_BYTES:], buffer.sm90.pools)
        buffer.topk_idx.zero_()
        buffer.x[: self.count].copy_(self.case.x[self.tokens])
        buffer.topk_idx[: self.count].copy_(self.case.topk_idx[self.tokens])
        buffer.topk_weights[: self.count].copy_(self.case.topk_weights[self.tokens])

    def forward(self, buffer: SymmBuffer) -> None:
        bf16_mega_moe(self.y, self.gate_up, self.down, buffer, activation_clamp=self.case.clamp)

    def backward(self, buffer: SymmBuffer) -> None:
        bf16_mega_moe_backward(
            self.dx, self.dw1, self.dw2, self.dtopk, self.dy, self.gate_up, self.down, buffer,
            activation_clamp=self.case.clamp,
        )  # fmt: skip

    def step(self, buffer: SymmBuffer) -> None:
        """Both directions, each behind its staging; asynchronous."""
        self.stage(buffer)
        self.forward(buffer)
        self.stage(buffer)
        self.backward(buffer)

    def judged_step(self, buffer: SymmBuffer) -> None:
        """A step that is waited for, and its outputs against float64; collective."""
        self.step(buffer)
        buffer.check()
        self.judge()

    def judge(self) -> None:
        """The outputs of all ranks against float64; collective."""
        gathered = [[part.to(sm90_cases.DEVICE) for part in self.ranks.gather(out)] for out in self.outputs()]
        y, dx, dtopk, dw1, dw2 = gathered
        judge(Outputs(y, dx, dtopk, torch.cat(dw1), torch.cat(dw2)), self.case)


def buffer_for(share: Share, base: SymmBuffer | None = None) -> SymmBuffer:
    experts, hidden, inter = share.case.down.shape
    topk = share.case.topk_idx.shape[1]
    buffer = SymmBuffer(None, experts, TOKENS, topk, hidden, inter, mma_type="bf16xbf16", base=base)
    assert buffer.backend == "sm90"
    return buffer


def share_of(
    ranks: Ranks, pattern: Sequence[int] = UNEQUAL, local_experts: int = 3, topk: int = 3,
    kind: str = "masked", clamp: float | None = None, sizes: tuple[int, int] = (HIDDEN, INTER),
    seed: int = 0,
) -> Share:  # fmt: skip
    """Of a case of the given kind over all ranks."""
    counts, experts = ranks.counts(pattern), local_experts * ranks.size
    return Share(ranks, make_case(sum(counts), experts, topk, *sizes, kind, clamp=clamp, seed=seed), counts)


def test_every_rank_sees_the_memory_of_all(ranks: Ranks) -> None:
    share = share_of(ranks)
    buffer = buffer_for(share)
    memory = buffer.sm90_memory
    assert memory is not None
    assert memory._mapping is not None
    assert len(set(memory._peers)) == ranks.size
    assert memory._peers[ranks.rank] == memory.storage.data_ptr()
    share.judged_step(buffer)
    buffer.destroy()


@pytest.mark.parametrize(
    ("pattern", "local_experts", "topk", "kind", "clamp"),
    [
        ((256,), 2, 2, "even", None),
        (UNEQUAL, 3, 3, "masked", 1.0),
        (UNEQUAL[::-1], 5, 4, "random", None),
        ((0,), 2, 2, "even", None),
        ((0, TOKENS), 2, 2, "random", 0.7),
        ((1,), 3, 2, "random", None),
        ((128, 127, 129, 0), 12, 12, "even", None),
        ((64,), 2, 1, "skewed", None),
        ((45,), 16, 2, "skewed", None),
        ((100, 101), 2, 2, "one", None),
        ((100,), 2, 2, "none", None),
    ],
    ids=[
        "equal", "unequal-masked", "unequal-duplicates", "no-tokens-anywhere", "every-second-rank-empty",
        "one-token-each", "every-local-expert", "top-1", "empty-experts", "all-to-one-expert", "all-masked",
    ],
)  # fmt: skip
def test_edges(
    ranks: Ranks, pattern: Sequence[int], local_experts: int, topk: int, kind: str, clamp: float | None
) -> None:
    share = share_of(ranks, pattern, local_experts, topk, kind, clamp)
    buffer = buffer_for(share)
    share.judged_step(buffer)
    buffer.destroy()


@pytest.mark.parametrize("keep", [None, "z"])
def test_autograd(ranks: Ranks, keep: str | None) -> None:
    share = share_of(ranks)
    buffer, case, tokens = buffer_for(share), share.case, share.tokens
    parts = (case.x[tokens], case.topk_weights[tokens], share.gate_up, share.down)
    x, weights, gate_up, down = (part.clone().requires_grad_() for part in parts)
    y = mega_moe(x, case.topk_idx[tokens], weights, gate_up, down, buffer=buffer, keep=keep)
    y.backward(share.dy)
    buffer.check()
    share.y, share.dx, share.dtopk = y.detach(), x.grad, weights.grad
    share.dw1, share.dw2 = gate_up.grad, down.grad
    share.judge()
    buffer.destroy()


def test_two_layers_over_one_buffer_and_another_beside_it(ranks: Ranks) -> None:
    """Forward 1, forward 2, backward 2, backward 1; sizes differ between the layers."""
    first, second = share_of(ranks, sizes=(768, 384), seed=1), share_of(ranks, topk=2, kind="random", seed=2)
    base = buffer_for(first)
    other, view = buffer_for(second), buffer_for(second, base)
    steps: list[tuple[Share, SymmBuffer, Callable[[Share, SymmBuffer], None]]] = [
        (first, base, Share.forward),
        (second, view, Share.forward),
        (second, view, Share.backward),
        (first, base, Share.backward),
    ]
    for share, buffer, run in steps:
        share.stage(buffer)
        run(share, buffer)
    base.check()
    first.judge()
    second.judge()
    second.judged_step(other)
    other.destroy()
    base.destroy()


def test_destroy_and_build_again_over_a_new_group(ranks: Ranks) -> None:
    for seed in range(2):
        share = share_of(ranks, seed=seed)
        buffer = buffer_for(share)
        share.judged_step(buffer)
        buffer.destroy()
        dist.destroy_process_group()
        ranks.join()


def test_a_graph_replayed_with_other_data(ranks: Ranks) -> None:
    shares = [share_of(ranks, seed=seed) for seed in range(3)]
    static, buffer = shares[0], buffer_for(shares[0])
    stream = torch.cuda.Stream(sm90_cases.DEVICE)
    with torch.cuda.stream(stream):
        static.step(buffer)  # compiles and allocates
        buffer.check()
        static.stage(buffer)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # NCCL's threads may ask for their events meanwhile.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            static.forward(buffer)
            static.backward(buffer)
        for share in (*shares[1:], shares[1]):
            share.stage(buffer)
            for mine, theirs in ((static.gate_up, share.gate_up), (static.down, share.down)):
                mine.copy_(theirs)
            static.dy.copy_(share.dy)
            for output in static.outputs():
                output.fill_(torch.nan)
            graph.replay()
            buffer.check()
            for mine, theirs in zip(static.outputs(), share.outputs(), strict=True):
                theirs.copy_(mine)
            share.judge()
    torch.cuda.synchronize()
    buffer.destroy()


def test_many_steps_beside_all_reduces(ranks: Ranks) -> None:
    """Back to back, with jitter, while NCCL works on another stream: every step has the first one's bits."""
    device = sm90_cases.DEVICE
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    runtime.set_num_sms(sms - RESERVED_SMS)
    share = share_of(ranks)
    buffer = buffer_for(share)
    share.judged_step(buffer)
    first = [output.clone() for output in share.outputs()]
    wrong = torch.zeros(len(first), dtype=torch.int64, device=device)
    side = torch.cuda.Stream(device)
    reduced = torch.full((1 << 22,), float(ranks.rank), device=device)
    jitter = random.Random(ranks.rank)
    torch.cuda.synchronize()
    for _ in range(STEPS):
        with torch.cuda.stream(side):
            dist.all_reduce(reduced, op=dist.ReduceOp.AVG)
        torch.cuda._sleep(jitter.randrange(JITTER_CYCLES))
        share.step(buffer)
        for index, (got, want) in enumerate(zip(share.outputs(), first, strict=True)):
            wrong[index] += (got.view(torch.uint8) != want.view(torch.uint8)).sum()
    buffer.check()
    ranks.all_agree(wrong.tolist() == [0] * len(first), f"bytes of y, dx, dtopk, dw1, dw2: {wrong.tolist()}")
    mean = (ranks.size - 1) / 2
    ranks.all_agree(bool((reduced - mean).abs().max() < 1e-3), "all-reduces")
    buffer.destroy()


def test_a_late_rank_changes_no_bit(peers: Ranks) -> None:
    share = share_of(peers)
    buffer = buffer_for(share)
    share.judged_step(buffer)
    first = [output.clone() for output in share.outputs()]
    last = peers.size - 1
    for late, on_the_host in ((last, False), (0, False), (last, True)):
        for output in share.outputs():
            output.fill_(torch.nan)
        torch.cuda.synchronize()
        if peers.rank == late and on_the_host:
            time.sleep(LATE_SECONDS)
        elif peers.rank == late:
            torch.cuda._sleep(LATE_CYCLES)
        share.step(buffer)
        buffer.check()
        same = all(same_bits(a, b) for a, b in zip(share.outputs(), first, strict=True))
        peers.all_agree(same, f"rank {late} late, on the host: {on_the_host}")
    buffer.destroy()


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_rank_that_stays_away_is_named(peers: Ranks, direction: str) -> None:
    """The others raise within the limit, refuse to go on, and work after a reset on all ranks."""
    runtime.set_timeout_seconds(SHORT_TIMEOUT_SECONDS)
    share = share_of(peers)
    buffer, last = buffer_for(share), peers.size - 1
    message = "nothing"
    started = time.monotonic()
    if peers.rank != last:
        share.stage(buffer)
        getattr(share, direction)(buffer)
        with pytest.raises(RuntimeError) as error:
            buffer.check()
        message = str(error.value)
        with pytest.raises(RuntimeError, match=r"buffer.reset\(\) on all ranks"):
            share.forward(buffer)
    in_time = time.monotonic() - started < 10 * SHORT_TIMEOUT_SECONDS
    messages = peers.gather(message)
    for rank, theirs in enumerate(messages[:last]):
        # A rank that gave up tells the others, so one of them may hear that first.
        assert f"rank {rank}, step 1: " in theirs
        assert f"peer {last} did not come within 2 s" in theirs or "gave up" in theirs, messages
    assert any(f"peer {last} did not come within 2 s" in theirs for theirs in messages)
    peers.all_agree(in_time, "time to raise")
    buffer.reset()
    runtime.set_timeout_seconds(TIMEOUT_SECONDS)
    share.judged_step(buffer)
    buffer.destroy()
