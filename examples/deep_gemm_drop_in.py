"""The functions as a program written for deep_gemm calls them, forward and backward, against plain torch.

python examples/deep_gemm_drop_in.py

One process, on an SM90 GPU when there is one, else on the CPU. In a process group the same calls are expert
parallel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import prime_kernels as deep_gemm

EXPERTS, MAX_TOKENS, TOP_K, HIDDEN, INTERMEDIATE = 8, 128, 2, 256, 128
LIMIT = 5e-3  # relative Frobenius norm, of BF16 arithmetic against float64


def plain(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, l1: Tensor, l2: Tensor) -> Tensor:
    """One expert after the other."""
    y = torch.zeros_like(x)
    for expert in range(l1.shape[0]):
        token, slot = (topk_idx == expert).nonzero(as_tuple=True)
        gate, up = (x[token] @ l1[expert].T).chunk(2, dim=-1)
        rows = (F.silu(gate) * up) @ l2[expert].T
        y = y.index_add(0, token, topk_weights[token, slot, None] * rows)
    return y


def main() -> dict[str, float]:
    """Both directions once; returns the error of each output."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # Sized for the most tokens a rank brings to one call; all layers of a model share it.
    buffer = deep_gemm.SymmBuffer(
        None, EXPERTS, MAX_TOKENS, TOP_K, HIDDEN, INTERMEDIATE, mma_type="bf16xbf16"
    )
    n = 100
    x, dy = torch.randn(2, n, HIDDEN, device=device, dtype=torch.bfloat16)
    topk_weights, topk_idx = torch.rand(n, EXPERTS, device=device).topk(TOP_K)
    topk_idx[0, 1] = -1  # a slot without an expert
    l1 = (torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, device=device) * HIDDEN**-0.5).bfloat16()
    l2 = (torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, device=device) * INTERMEDIATE**-0.5).bfloat16()
    l1, l2 = deep_gemm.transform_weights_for_mega_moe(l1, l2)

    def stage() -> None:
        """Right before each call: nothing in the buffer survives one."""
        buffer.x[:n].copy_(x)
        buffer.topk_idx[:n].copy_(topk_idx)
        buffer.topk_weights[:n].copy_(topk_weights)

    y = torch.empty_like(x)
    stage()
    deep_gemm.bf16_mega_moe(y, l1, l2, buffer)

    dx = torch.empty_like(x)
    dw1, dw2 = (torch.empty_like(weight, dtype=torch.float32) for weight in (l1, l2))
    dtopk = torch.empty_like(topk_weights)
    stage()
    deep_gemm.bf16_mega_moe_backward(dx, dw1, dw2, dtopk, dy, l1, l2, buffer)
    buffer.check()  # waits for the kernels, and raises what they found wrong

    leaves = [tensor.double().requires_grad_() for tensor in (x, topk_weights, l1, l2)]
    want_y = plain(leaves[0], topk_idx, *leaves[1:])
    want = [want_y.detach(), *torch.autograd.grad(want_y, leaves, dy.double())]
    got = {"y": y, "dx": dx, "dtopk": dtopk, "dw1": dw1, "dw2": dw2}
    errors = {
        name: float((tensor.double() - right).norm() / right.norm())
        for (name, tensor), right in zip(got.items(), want, strict=True)
    }
    print(", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    if not max(errors.values()) < LIMIT:
        raise SystemExit(f"relative errors {errors}, the limit is {LIMIT}")
    buffer.destroy()
    return errors


if __name__ == "__main__":
    main()
