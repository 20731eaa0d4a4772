"""Running parity cases on the ranks of a group.

:func:`run_rank` is what one rank does for one case; a launcher decides what a rank is (this process, or one
process each) and brings the ranks' outputs together. Another kind of rank is another entry of
:data:`LAUNCHERS`.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import ProcessContext, start_processes

from .. import bf16, reference, runtime, symm
from .cases import Case, Shape, expert_weights, rank_inputs, shared_weights
from .judge import RankOutputs, count_poison, poison_

__all__ = ["LAUNCHERS", "CaseRun", "Launcher", "RankSettings", "run_rank"]

# Poison before and after an output, to see writes outside it: more than a row of any shape here, and a
# multiple of the alignment that outputs may need.
GUARD_ELEMENTS = 8192
# The buffer holds some tokens more than any rank has, so that there is padding that must not be read.
PADDING_TOKENS = 5
# Elements between the rows of a strided weight.
WEIGHT_ROW_PADDING = 64
STEPS = 2


@dataclass(frozen=True)
class RankSettings:
    """What every rank must know beside the cases. ``timeout`` is the most seconds one case may take."""

    backend: str
    device_type: str
    timeout: float


@dataclass(frozen=True)
class CaseRun:
    """A case that was run: the outputs of all ranks, or the error that ended it."""

    case: Case
    outputs: list[RankOutputs]
    error: str = ""


class Launcher(Protocol):
    """Runs cases that all have the same number of ranks, yielding each as soon as it is done."""

    def __call__(self, cases: Sequence[Case], settings: RankSettings) -> Iterator[CaseRun]:
        """Run ``cases`` in order."""


class _GuardedOutput:
    """An output [rows, ...] inside a larger poisoned allocation."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.name = name
        end = GUARD_ELEMENTS + math.prod(shape)
        self.whole = torch.empty(end + GUARD_ELEMENTS, dtype=dtype, device=device)
        self.inner = self.whole[GUARD_ELEMENTS:end].view(shape)
        self.reset()

    def reset(self, base: Tensor | None = None) -> None:
        """Poison everything, then put ``base`` (what accumulation starts from) inside."""
        poison_(self.whole)
        if base is not None:
            self.inner.copy_(base)

    def faults(self) -> list[str]:
        """Whether anything was written outside the output."""
        guards = torch.cat([self.whole[:GUARD_ELEMENTS], self.whole[-GUARD_ELEMENTS:]])
        overwritten = guards.numel() - count_poison(guards)
        return [f"{self.name}: {overwritten} elements outside the output were written"] if overwritten else []


def _strided(weight: Tensor) -> Tensor:
    padded = poison_(weight.new_empty((*weight.shape[:-1], weight.shape[-1] + WEIGHT_ROW_PADDING)))
    padded[..., : weight.shape[-1]] = weight
    return padded[..., : weight.shape[-1]]


@functools.lru_cache(maxsize=1)
def _natural_weights(
    shape: Shape, dtype: torch.dtype, experts: range, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Weights of some experts, [El, 2I, H] and [El, H, I]. Kept: many cases in a row have the same."""
    weights = [expert_weights(shape, dtype, expert, device) for expert in experts]
    return torch.stack([w[0] for w in weights]), torch.stack([w[1] for w in weights])


def _local_weights(case: Case, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    experts = case.local_experts(rank)
    gate_up, down = _natural_weights(case.shape, case.precision.dtype, experts, device)
    if not case.variant.natural_layout:
        gate_up = reference.interleave_gate_up(gate_up)
    return (_strided(gate_up), _strided(down)) if case.variant.strided_weights else (gate_up, down)


def run_rank(case: Case, rank: int, group: dist.ProcessGroup | None, device: torch.device) -> RankOutputs:
    """One rank's part of a case: two steps of forward and backward through the public functions.

    Outputs are poisoned before each step, staging memory past this rank's tokens always. The faults of the
    result name writes outside an output and outputs that differ between the steps in any bit.
    """
    variant, shape, inputs = case.variant, case.shape, rank_inputs(case, rank, device)
    gate_up, down = _local_weights(case, rank, device)
    shared = shared_weights(case, device)
    if shared is not None and not variant.natural_layout:
        shared = (reference.interleave_gate_up(shared[0]), shared[1])
    buffer = symm.get_symm_buffer_for_mega_moe(
        group, shape.num_experts, max(case.tokens_per_rank) + PADDING_TOKENS, shape.top_k, shape.hidden,
        shape.intermediate, num_shared_experts=int(variant.shared), mma_type=case.precision.mma_type,
    )  # fmt: skip
    tokens = inputs.x.shape[0]
    dtype, dw_dtype = case.precision.dtype, variant.dw_dtype or case.precision.dtype

    def output(name: str, like: tuple[int, ...], dtype: torch.dtype) -> _GuardedOutput:
        return _GuardedOutput(name, like, dtype, device)

    outputs = {
        "y": output("y", (tokens, shape.hidden), dtype),
        "dx": output("dx", (tokens, shape.hidden), dtype),
        "dtopk": output("dtopk", (tokens, shape.top_k), inputs.topk_weights.dtype),
    }
    if not variant.skip_dw1:
        outputs["dw1"] = output("dw1", tuple(gate_up.shape), dw_dtype)
    if not variant.skip_dw2:
        outputs["dw2"] = output("dw2", tuple(down.shape), dw_dtype)
    if shared is not None:
        outputs["shared_dw1"] = output("shared_dw1", (1, *shared[0].shape), dw_dtype)
        outputs["shared_dw2"] = output("shared_dw2", (1, *shared[1].shape), dw_dtype)
    bases = {}
    if variant.accumulate:
        bases = {name: torch.ones_like(outputs[name].inner) for name in outputs if "dw" in name}

    def stage() -> None:
        poison_(buffer.x)
        poison_(buffer.topk_weights)
        buffer.topk_idx.zero_()
        buffer.x[:tokens].copy_(inputs.x)
        buffer.topk_idx[:tokens].copy_(inputs.topk_idx)
        buffer.topk_weights[:tokens].copy_(inputs.topk_weights)

    def inner(name: str) -> Tensor | None:
        return outputs[name].inner if name in outputs else None

    def step() -> None:
        shared_l1, shared_l2 = shared or (None, None)
        stage()
        bf16.bf16_mega_moe(
            outputs["y"].inner, gate_up, down, buffer, shared_l1, shared_l2,
            activation_clamp=variant.clamp, l1_natural_layout=variant.natural_layout,
        )  # fmt: skip
        stage()
        shared_dw1, shared_dw2 = inner("shared_dw1"), inner("shared_dw2")
        bf16.bf16_mega_moe_backward(
            outputs["dx"].inner, inner("dw1"), inner("dw2"), outputs["dtopk"].inner,
            inputs.dy, gate_up, down, buffer, shared_l1, shared_l2,
            None if shared_dw1 is None else shared_dw1[0], None if shared_dw2 is None else shared_dw2[0],
            activation_clamp=variant.clamp, dw_natural_layout=variant.natural_layout,
            l1_natural_layout=variant.natural_layout, accumulate=variant.accumulate,
        )  # fmt: skip
        # Kernels run on; this waits for them and raises what they recorded.
        buffer.check()

    faults: list[str] = []
    first: dict[str, Tensor] = {}
    seconds = 0.0
    for number in range(STEPS):
        for name, out in outputs.items():
            out.reset(bases.get(name))
        start = time.perf_counter()
        step()
        seconds = time.perf_counter() - start
        for name, out in outputs.items():
            if number == 0:
                first[name] = out.inner.clone()
            elif not torch.equal(first[name].view(torch.uint8), out.inner.contiguous().view(torch.uint8)):
                faults.append(f"{name}: step {number + 1} differs from step 1 over the same inputs")
    for out in outputs.values():
        faults += out.faults()
    buffer.destroy()
    return RankOutputs(rank, _natural(case, outputs, bases), faults, seconds)


def _natural(
    case: Case, outputs: dict[str, _GuardedOutput], bases: dict[str, Tensor]
) -> dict[str, Tensor | None]:
    """Outputs as the judge reads them: natural layout, and only what the call added."""
    tensors: dict[str, Tensor | None] = dict.fromkeys(("dw1", "dw2"))
    for name, out in outputs.items():
        tensor = out.inner.contiguous()
        if name in bases:
            tensor = tensor - bases[name]
        if name in ("dw1", "shared_dw1") and not case.variant.natural_layout:
            tensor = reference.deinterleave_gate_up(tensor)
        tensors[name] = tensor
    return tensors


def _device(settings: RankSettings, rank: int) -> torch.device:
    if settings.device_type == "cuda":
        torch.cuda.set_device(rank)
        return torch.device("cuda", rank)
    return torch.device(settings.device_type)


def run_in_process(cases: Sequence[Case], settings: RankSettings) -> Iterator[CaseRun]:
    """The only rank is this process, with no process group."""
    device = _device(settings, 0)
    for case in cases:
        previous = runtime.get_backend(), runtime.get_device()
        runtime.set_backend(settings.backend)
        runtime.set_device(device)
        try:
            run = CaseRun(case, [run_rank(case, 0, None, device)])
        except Exception:  # noqa: BLE001 - whatever it is, it is the case's failure and reported as such
            run = CaseRun(case, [], traceback.format_exc())
        finally:
            runtime.set_backend(previous[0])
            runtime.set_device(previous[1])
        yield run


def _outputs_file(directory: Path, index: int, rank: int) -> Path:
    return directory / f"case{index}-rank{rank}.pt"


def _rank_process(
    rank: int, cases: Sequence[Case], first: int, settings: RankSettings, directory: str
) -> None:
    """A process of :func:`run_in_processes`: all cases from index ``first`` on, in one group."""
    folder, ranks = Path(directory), cases[0].ranks
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    device = _device(settings, rank)
    runtime.set_backend(settings.backend)
    runtime.set_device(device)
    runtime.set_timeout_seconds(settings.timeout)
    rendezvous = (folder / f"store{first}").resolve().as_uri()
    collectives = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(collectives, init_method=rendezvous, rank=rank, world_size=ranks)
    for index in range(first, len(cases)):
        try:
            outputs = run_rank(cases[index], rank, dist.group.WORLD, device)
        except Exception:
            (folder / f"case{index}-rank{rank}.error").write_text(traceback.format_exc())
            raise
        target = _outputs_file(folder, index, rank)
        partial = target.with_suffix(".partial")
        torch.save(outputs, partial)
        partial.rename(target)
    dist.destroy_process_group()


def run_in_processes(cases: Sequence[Case], settings: RankSettings) -> Iterator[CaseRun]:
    """One process a rank, on one GPU each or all on the CPU (gloo).

    A case that fails on some rank, or does not end in ``settings.timeout`` seconds, ends the group; the
    cases after it run in a new one.
    """
    if not cases:
        return
    ranks = cases[0].ranks
    with tempfile.TemporaryDirectory(prefix="parity-") as directory:
        folder = Path(directory)
        index = 0
        # A server that has imported torch once forks the ranks: seconds less for each of them.
        multiprocessing.get_context("forkserver").set_forkserver_preload(["torch.distributed"])
        while index < len(cases):
            context = start_processes(
                _rank_process,
                (cases, index, settings, directory),
                nprocs=ranks,
                join=False,
                start_method="forkserver",
            )
            limit, error = START_SECONDS + settings.timeout, ""
            try:
                while index < len(cases) and not error:
                    error = _wait_for(context, folder, index, ranks, limit)
                    limit = settings.timeout
                    if error:
                        yield CaseRun(cases[index], [], error)
                        index += 1
                        continue
                    files = [_outputs_file(folder, index, rank) for rank in range(ranks)]
                    outputs = [torch.load(f, map_location="cpu", weights_only=False) for f in files]
                    for file in files:
                        file.unlink()
                    yield CaseRun(cases[index], outputs)
                    index += 1
            finally:
                _end(context, 0.0 if error else LEAVE_SECONDS)


# Between two looks for the files of a case; a case takes longer than this on any machine.
POLL_SECONDS = 0.02
PEERS_FAIL_SECONDS = 0.5
# Importing torch in every process and building the group, on a loaded machine.
START_SECONDS = 120.0
# Leaving the process group after the last case.
LEAVE_SECONDS = 30.0


def _wait_for(context: ProcessContext, folder: Path, index: int, ranks: int, limit: float) -> str:
    """Wait until every rank has written the case's outputs. Returns what went wrong, or an empty string."""
    deadline = time.monotonic() + limit
    while not all(_outputs_file(folder, index, rank).exists() for rank in range(ranks)):
        if any(process.exitcode not in (None, 0) for process in context.processes):
            return _error_of(context, folder, index)
        if time.monotonic() > deadline:
            return f"the ranks did not finish within {limit:.0f} s (raise the limit with --timeout)"
        time.sleep(POLL_SECONDS)
    return ""


def _error_of(context: ProcessContext, folder: Path, index: int) -> str:
    """For each rank that ended: its traceback, or else how its process ended."""
    # One rank's end makes its peers fail a moment later; the report should have all of them.
    time.sleep(PEERS_FAIL_SECONDS)
    errors = []
    for rank, process in enumerate(context.processes):
        traceback_file = folder / f"case{index}-rank{rank}.error"
        if traceback_file.exists():
            errors.append(f"rank {rank}: {traceback_file.read_text()}")
        elif process.exitcode not in (None, 0):
            errors.append(f"rank {rank} ended with exit code {process.exitcode}")
    return "\n".join(errors)


def _end(context: ProcessContext, grace: float) -> None:
    """Give the processes ``grace`` seconds in all to leave by themselves, then end those that are left."""
    deadline = time.monotonic() + grace
    for process in context.processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


LAUNCHERS: dict[str, Launcher] = {"inline": run_in_process, "processes": run_in_processes}
