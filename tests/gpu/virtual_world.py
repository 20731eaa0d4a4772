"""Several ranks on one GPU, each with a stream and its share of the SMs: flags, pulls and pushes are real."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from sm90_cases import BF16, DEVICE, FP32, Case, check, poison_bytes, poisoned
from torch import Tensor

from prime_kernels.exchange import FLAGS_BYTES, ExchangeShape
from prime_kernels.sm90 import Sm90Rank, make_virtual_ranks

TIMEOUT_SECONDS = 10.0
SHORT_TIMEOUT_SECONDS = 1.0


@dataclass
class Outputs:
    """Of all ranks: y, dx and dtopk one for each rank, the weight gradients those of all experts."""

    y: list[Tensor]
    dx: list[Tensor]
    dtopk: list[Tensor]
    dw1: Tensor | None
    dw2: Tensor | None

    def all(self) -> list[Tensor]:
        dw = [tensor for tensor in (self.dw1, self.dw2) if tensor is not None]
        return [*self.y, *self.dx, *self.dtopk, *dw]


class World:
    """R virtual ranks that together run one case, of which rank r brings ``counts[r]`` tokens.

    Args:
        shape: sizes, equal on all ranks.
        timeout_seconds: how long a kernel waits for a peer.
        sms: SMs of all ranks together; None: all of the GPU's.
        base: another world, whose memory this one is a view of.
        options: of :class:`Sm90Rank`.
    """

    def __init__(
        self, shape: ExchangeShape, timeout_seconds: float = TIMEOUT_SECONDS, sms: int | None = None,
        base: World | None = None, **options: object,
    ) -> None:  # fmt: skip
        sms = sms or torch.cuda.get_device_properties(DEVICE).multi_processor_count
        self.shape = shape
        if base is None:
            self.ranks = make_virtual_ranks(shape, DEVICE, sms, timeout_seconds=timeout_seconds, **options)
            self.streams = [torch.cuda.Stream(DEVICE) for _ in self.ranks]
        else:
            self.streams = base.streams
            peers = [rank.storage.data_ptr() for rank in base.ranks]
            self.ranks = [
                Sm90Rank(
                    shape, rank.rank, rank.storage, peers, sms // shape.ranks,
                    timeout_seconds=timeout_seconds, pool_memory=rank._pool_memory, fault=rank.fault,
                )
                for rank in base.ranks
            ]  # fmt: skip
        # Everything is loaded before a kernel waits for another.
        for clamped in (False, True):
            for keep_z in (False, True):
                self.ranks[0].forward_kernel(clamped, keep_z)
                self.ranks[0].backward_kernel(clamped, keep_z)
        for rank in self.ranks:
            rank.pools.add_backward()

    def experts(self, rank: int) -> slice:
        local = self.shape.local_experts
        return slice(rank * local, (rank + 1) * local)

    def poison(self) -> None:
        """What earlier calls could have left anywhere, except for the flags."""
        for rank in self.ranks:
            poison_bytes(rank.storage[FLAGS_BYTES:], rank.pools)
            rank.topk_idx.fill_(0)

    def stage_rank(self, index: int, case: Case, counts: Sequence[int]) -> None:
        """On the current stream: what rank ``index`` brings."""
        rank, start, count = self.ranks[index], sum(counts[:index]), counts[index]
        rows = slice(start, start + count)
        rank.x[:count].copy_(case.x[rows])
        rank.dy[:count].copy_(case.dy[rows])
        rank.topk_idx[:count].copy_(case.topk_idx[rows])
        rank.topk_weights[:count].copy_(case.topk_weights[rows])

    def stage(self, case: Case, counts: Sequence[int]) -> None:
        self.poison()
        for index in range(len(self.ranks)):
            self.stage_rank(index, case, counts)

    def launch(self, run: Callable[[int, Sm90Rank], None], absent: Collection[int] = ()) -> None:
        """``run`` for every rank on its stream, one after the other."""
        for index, (rank, stream) in enumerate(zip(self.ranks, self.streams, strict=True)):
            if index not in absent:
                with torch.cuda.stream(stream):
                    run(index, rank)

    def check(self) -> None:
        """Wait for all ranks and raise what they recorded."""
        torch.cuda.synchronize()
        for rank in self.ranks:
            rank.check()

    def poisoned_outputs(
        self, case: Case, counts: Sequence[int], dw_dtype: torch.dtype = FP32,
        initial: tuple[Tensor, Tensor] | None = None, frozen: Collection[str] = (),
    ) -> Outputs:  # fmt: skip
        """NaN everywhere, but for weight gradients that are added to ``initial``."""
        dw: dict[str, Tensor | None] = {}
        for index, (name, weight) in enumerate((("dw1", case.gate_up), ("dw2", case.down))):
            fresh = poisoned(weight.shape, dw_dtype) if initial is None else initial[index].clone()
            dw[name] = None if name in frozen else fresh
        hidden, topk = self.shape.hidden, self.shape.topk
        return Outputs(
            y=[poisoned((count, hidden), BF16) for count in counts],
            dx=[poisoned((count, hidden), BF16) for count in counts],
            dtopk=[poisoned((count, topk), FP32) for count in counts],
            **dw,
        )

    def forward(self, index: int, case: Case, out: Outputs, z: Tensor | None = None) -> None:
        """Rank ``index`` on the current stream."""
        own = self.experts(index)
        self.ranks[index].forward(out.y[index], case.gate_up[own], case.down[own], case.clamp, z=z)

    def backward(
        self, index: int, case: Case, out: Outputs, z: Tensor | None = None, accumulate: bool = False
    ) -> None:
        """Rank ``index`` on the current stream."""
        own = self.experts(index)
        self.ranks[index].backward(
            out.dx[index], None if out.dw1 is None else out.dw1[own],
            None if out.dw2 is None else out.dw2[own], out.dtopk[index], case.gate_up[own], case.down[own],
            case.clamp, accumulate, z,
        )  # fmt: skip

    def kept_z(self, keep_z: bool) -> list[Tensor | None]:
        """For each rank memory for z that holds NaN, or None."""
        return [rank.empty_z().fill_(math.nan) if keep_z else None for rank in self.ranks]

    def step(
        self, case: Case, counts: Sequence[int], *, dw_dtype: torch.dtype = FP32,
        initial: tuple[Tensor, Tensor] | None = None, frozen: Collection[str] = (),
        delays: dict[int, int] | None = None, keep_z: bool = False,
    ) -> Outputs:  # fmt: skip
        """Forward, then backward on every rank, with nothing between them. ``delays``: cycles of ranks."""
        out = self.poisoned_outputs(case, counts, dw_dtype, initial, frozen)
        self.stage(case, counts)
        z = self.kept_z(keep_z)
        torch.cuda.synchronize()

        def forward(index: int, rank: Sm90Rank) -> None:
            if delays and index in delays:
                torch.cuda._sleep(delays[index])
            self.forward(index, case, out, z[index])

        self.launch(forward)
        self.launch(lambda index, rank: self.backward(index, case, out, z[index], initial is not None))
        self.check()
        return out


def world_of(
    counts: Sequence[int], experts: int, topk: int, hidden: int, inter: int, **options: object
) -> World:
    """A world whose buffers hold just the largest of ``counts``."""
    return World(ExchangeShape(max(1, *counts), topk, hidden, inter, experts, len(counts)), **options)


def judge(out: Outputs, case: Case, initial: tuple[Tensor, Tensor] | None = None) -> None:
    """Every output by itself against float64; ``initial``: what the weight gradients were added to."""
    grads = case.grads
    check("y", torch.cat(out.y), case.y)
    check("dx", torch.cat(out.dx), grads.dx)
    dtopk = torch.cat(out.dtopk)
    check("dtopk", dtopk, grads.dtopk, size=case.dtopk_size)
    assert bool((dtopk[case.topk_idx < 0] == 0).all())
    for index, (name, want) in enumerate((("dw1", grads.dgate_up), ("dw2", grads.ddown))):
        got = (out.dw1, out.dw2)[index]
        if got is not None:
            # Without rows nothing may be added: exactly zero is left.
            check(name, got if initial is None else got.double() - initial[index], want, matrices=True)
