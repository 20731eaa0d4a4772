"""For compute-sanitizer: both directions of the SM90 BF16 kernels on 8 SMs. ci/sanitize.sh runs it.

    python tests/gpu/sanitizer_case.py [--rows odd|full]

One rank, which recomputes gate and up in the backward; then two ranks, which keep them, with a clamp and bf16
weight gradients. The tools run one kernel at a time, so two ranks can't wait for each other: all tokens go to
experts of rank 0, the host sets the flags that rank 1 would, rank 0 runs (it pulls from rank 1 and pushes to
it), and then rank 1 finds rank 0's flags and rows.

Every tensor is an allocation of its own: memcheck sees an access behind its end. What the kernels must
write before they read it is not initialised, and everything else is copied from the host, so that initcheck
needs no other kernel to be followed. `--rows full` fills all blocks of 128 rows. Otherwise the forward's
products read rows of padding that nobody wrote (they reach no output): initcheck may report those.
"""

from __future__ import annotations

import argparse
import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch
from sm90_cases import BF16, FP32, Case, check
from torch import Tensor

from prime_kernels.exchange import FLAGS_BYTES, MAX_RANKS, ExchangeShape, region
from prime_kernels.sm90 import Sm90Rank

HIDDEN, INTER = 512, 256
EXPERTS, TOPK, LOCAL_EXPERTS_OF_TWO = 4, 2, 2
SMS = 8
CLAMP = 1.0
BLOCK_M = 128
FULL_COUNTS = {1: (256,), 2: (128, 128)}
ODD_COUNTS = {1: (150,), 2: (45, 130)}
TIMEOUT_SECONDS = 300.0  # of kernels that are a thousand times slower


def upload(tensor: Tensor) -> Tensor:
    """On the GPU, without a kernel."""
    return torch.empty_like(tensor, device="cuda").copy_(tensor)


def make_case(counts: tuple[int, ...], full: bool, clamp: float | None) -> Case:
    """On the CPU. With several ranks, only experts of rank 0 are chosen."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(BF16)

    chosen = EXPERTS if len(counts) == 1 else LOCAL_EXPERTS_OF_TWO
    if full:
        of_rank = [(torch.arange(n) // BLOCK_M * TOPK)[:, None] + torch.arange(TOPK) for n in counts]
        topk_idx = torch.cat(of_rank) % chosen
        assert bool((torch.bincount(topk_idx.flatten(), minlength=chosen) % BLOCK_M == 0).all())
    else:
        topk_idx = torch.randint(-1, chosen, (sum(counts), TOPK), generator=generator)
    return Case(
        x=normal(sum(counts), HIDDEN),
        topk_idx=topk_idx,
        topk_weights=torch.rand(topk_idx.shape, generator=generator),
        gate_up=normal(EXPERTS, 2 * INTER, HIDDEN, scale=HIDDEN**-0.5),
        down=normal(EXPERTS, HIDDEN, INTER, scale=1.6 * INTER**-0.5),
        dy=normal(sum(counts), HIDDEN),
        clamp=clamp,
    )


class Ranks:
    """One or two ranks that run one after the other."""

    def __init__(self, case: Case, counts: tuple[int, ...], dw_dtype: torch.dtype, keep_z: bool) -> None:
        self.case, self.counts = case, counts
        shape = ExchangeShape(max(counts) + 3, TOPK, HIDDEN, INTER, EXPERTS, len(counts))
        _, size = shape.symmetric_layout()
        storages = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in counts]
        peers = [storage.data_ptr() for storage in storages]
        self.ranks = [
            Sm90Rank(shape, rank, storage, peers, SMS, timeout_seconds=TIMEOUT_SECONDS)
            for rank, storage in enumerate(storages)
        ]
        local = shape.local_experts
        self.weights = [
            (upload(case.gate_up[first : first + local]), upload(case.down[first : first + local]))
            for first in range(0, EXPERTS, local)
        ]
        self.y, self.dx = ([torch.empty(n, HIDDEN, dtype=BF16, device="cuda") for n in counts] for _ in "yx")
        self.dtopk = [torch.empty(n, TOPK, device="cuda") for n in counts]
        self.dw = [[torch.empty_like(w, dtype=dw_dtype) for w in weights] for weights in self.weights]
        self.z = [rank.empty_z() if keep_z else None for rank in self.ranks]
        for rank, n, first in zip(self.ranks, counts, (0, counts[0]), strict=False):
            rank.storage[:FLAGS_BYTES].copy_(torch.zeros(FLAGS_BYTES, dtype=torch.uint8))
            rows = slice(first, first + n)
            for name in ("x", "dy", "topk_idx", "topk_weights"):
                getattr(rank, name)[:n].copy_(getattr(case, name)[rows])

    def _set(self, rank: int, offset: int, value: int) -> None:
        """A flag or the epoch of a rank."""
        region(self.ranks[rank].storage, offset, (1,), torch.int64).copy_(torch.tensor([value]))

    def _in_turn(self, epoch: int, direction: str) -> None:
        at = self.ranks[0].comm.at
        flag_bytes = torch.int64.itemsize
        if len(self.ranks) > 1:
            # Rank 1 stages and tells rank 0, also that it has nothing to push.
            assert at.done_flags - at.ready_flags >= MAX_RANKS * flag_bytes
            self.ranks[1].route_plan(self.counts[1])
            torch.cuda.synchronize()
            for flags in (at.ready_flags, at.done_flags):
                self._set(0, flags + flag_bytes, epoch)
        for index, rank in enumerate(self.ranks):
            if index > 0:
                self._set(index, at.epoch, epoch - 1)  # its route plan counts the call once more
            weights, dw = self.weights[index], self.dw[index]
            if direction == "forward":
                rank.forward(self.y[index], *weights, self.case.clamp, z=self.z[index])
            else:
                rank.backward(
                    self.dx[index], *dw, self.dtopk[index], *weights, self.case.clamp, z=self.z[index]
                )
            torch.cuda.synchronize()
            rank.check()

    def run(self) -> None:
        """Both directions, judged."""
        self._in_turn(1, "forward")
        self._in_turn(2, "backward")
        y, dx, dtopk = (torch.cat([t.cpu() for t in part]) for part in (self.y, self.dx, self.dtopk))
        dw1, dw2 = (torch.cat([dw[part].cpu() for dw in self.dw]) for part in (0, 1))
        grads = self.case.grads
        check("y", y, self.case.y)
        check("dx", dx, grads.dx)
        check("dtopk", dtopk, grads.dtopk)
        check("dw1", dw1, grads.dgate_up, matrices=True)
        check("dw2", dw2, grads.ddown, matrices=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", choices=("odd", "full"), default="odd", help="rows of the experts")
    counts = FULL_COUNTS if parser.parse_args().rows == "full" else ODD_COUNTS
    full = counts is FULL_COUNTS
    for ranks, clamp, dw_dtype, keep_z in ((1, None, FP32, False), (2, CLAMP, BF16, True)):
        Ranks(make_case(counts[ranks], full, clamp), counts[ranks], dw_dtype, keep_z).run()
        print(f"{ranks} rank(s), {'keep z' if keep_z else 'recompute'}: right", flush=True)


if __name__ == "__main__":
    main()
