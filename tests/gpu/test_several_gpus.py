"""The SM90 kernels over the GPUs of one machine: symmetric memory over a process group."""

from __future__ import annotations

from pathlib import Path

import pytest
import sm90_cases
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sm90_cases import BF16, check, compile_all, make_case, poisoned

from prime_kernels import SymmBuffer, bf16_mega_moe, bf16_mega_moe_backward, runtime

pytestmark = pytest.mark.gpu

TOKENS = 300
MAX_GPUS = 8
SHORT_TIMEOUT_SECONDS = 2.0


def _run_both(buffer: SymmBuffer, rank: int, size: int, seed: int) -> None:
    """One step of a global problem, of which every rank judges its share."""
    counts = [TOKENS, 45, 0, 129, 1, 128, 127, 300][:size]
    experts, topk = buffer.num_experts, buffer.num_topk
    case = make_case(
        sum(counts), experts, topk, buffer.hidden, buffer.intermediate_hidden, "masked", clamp=1.0, seed=seed
    )
    tokens = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    local = slice(rank * buffer.num_local_experts, (rank + 1) * buffer.num_local_experts)
    weights, n = (case.gate_up[local], case.down[local]), counts[rank]
    buffer.x.fill_(torch.nan)
    buffer.x[:n], buffer.topk_idx[:n] = case.x[tokens], case.topk_idx[tokens]
    buffer.topk_weights[:n] = case.topk_weights[tokens]
    y, dx = poisoned(case.x[tokens].shape, BF16), poisoned(case.x[tokens].shape, BF16)
    dtopk = poisoned((n, topk), torch.float32)
    dw1, dw2 = (poisoned(weight.shape, torch.float32) for weight in weights)
    bf16_mega_moe(y, *weights, buffer, activation_clamp=1.0)
    bf16_mega_moe_backward(
        dx, dw1, dw2, dtopk, case.dy[tokens], *weights, buffer, activation_clamp=1.0
    )
    buffer.check()
    grads = case.grads
    check("y", y, case.y[tokens])
    check("dx", dx, grads.dx[tokens])
    check("dtopk", dtopk, grads.dtopk[tokens])
    check("dw1", dw1, grads.dgate_up[local], matrices=True)
    check("dw2", dw2, grads.ddown[local], matrices=True)


def _failed_call(buffer: SymmBuffer, rank: int, size: int) -> None:
    """The last rank stays away from one call: the others name it, and work on after a reset."""
    runtime.set_timeout_seconds(SHORT_TIMEOUT_SECONDS)
    shape = (buffer.num_local_experts, 2 * buffer.intermediate_hidden, buffer.hidden)
    gate_up = torch.zeros(shape, dtype=BF16, device=buffer.x.device)
    down = torch.zeros(shape[0], buffer.hidden, shape[1] // 2, dtype=BF16, device=buffer.x.device)
    if rank != size - 1:
        bf16_mega_moe(poisoned((0, buffer.hidden), BF16), gate_up, down, buffer)
        with pytest.raises(RuntimeError, match=f"peer {size - 1} did not come within 2 s"):
            buffer.check()
        with pytest.raises(RuntimeError, match=r"buffer.reset\(\) on all ranks"):
            bf16_mega_moe(poisoned((0, buffer.hidden), BF16), gate_up, down, buffer)
    buffer.reset()
    runtime.set_timeout_seconds(runtime.DEFAULT_TIMEOUT_SECONDS)


def _worker(rank: int, size: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    sm90_cases.DEVICE = torch.device("cuda", rank)
    for attempt in range(2):  # a second process group after the first was destroyed
        dist.init_process_group("nccl", init_method=f"file://{folder}/{attempt}", rank=rank, world_size=size)
        base = SymmBuffer(None, 4 * size, TOKENS, 3, 768, 384, mma_type="bf16xbf16")
        assert base.backend == "sm90"
        view = SymmBuffer(None, 2 * size, TOKENS, 2, 512, 256, mma_type="bf16xbf16", base=base)
        other = SymmBuffer(None, 2 * size, TOKENS, 2, 512, 256, mma_type="bf16xbf16")
        for seed, buffer in enumerate((base, view, other, view, base)):
            _run_both(buffer, rank, size, seed)
        _failed_call(base, rank, size)
        _run_both(view, rank, size, 5)
        other.destroy()
        base.destroy()
        dist.destroy_process_group()


def test_symmetric_memory_over_a_process_group(tmp_path: Path) -> None:
    size = min(torch.cuda.device_count(), MAX_GPUS)
    if size < 2:
        pytest.skip("needs several GPUs with peer access")
    compile_all()
    mp.spawn(_worker, args=(size, str(tmp_path)), nprocs=size)
