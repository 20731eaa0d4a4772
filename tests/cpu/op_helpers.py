"""What the tests of the op and the module share: inputs, an independent autograd reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from prime_kernels import SymmBuffer, custom_ops, get_symm_buffer_for_mega_moe, mega_moe

# Relative Frobenius norm against float64 that BF16 results keep.
BF16_TOLERANCE = 5e-3


@dataclass(frozen=True)
class Shape:
    experts: int = 4
    topk: int = 2
    hidden: int = 64
    inter: int = 128
    tokens: int = 16  # per rank, of the buffer
    shared_inter: int = 128


SMALL = Shape(hidden=6, inter=5, tokens=8, shared_inter=3)  # for float64, which has no shape limits
BF16 = Shape()


def make_buffer(shape: Shape, dtype: torch.dtype = torch.float64, group: Any = None) -> SymmBuffer:
    mma_type = {torch.float64: "f64xf64", torch.float32: "f32xf32", torch.bfloat16: "bf16xbf16"}[dtype]
    return get_symm_buffer_for_mega_moe(
        group, shape.experts, shape.tokens, shape.topk, shape.hidden, shape.inter, mma_type=mma_type
    )


@dataclass
class Inputs:
    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    gate_up: Tensor
    down: Tensor
    shared: tuple[Tensor, Tensor] | None = None

    def leaves(self) -> list[Tensor]:
        return [self.x, self.topk_weights, self.gate_up, self.down, *(self.shared or ())]

    def map(self, function: Callable[[Tensor], Tensor]) -> Inputs:
        """Apply ``function`` to every leaf and make the results leaves."""
        x, topk_weights, gate_up, down, *rest = (
            function(leaf.detach()).requires_grad_(leaf.requires_grad) for leaf in self.leaves()
        )
        shared = (rest[0], rest[1]) if rest else None
        return Inputs(x, self.topk_idx, topk_weights, gate_up, down, shared)

    def double(self) -> Inputs:
        return self.map(lambda leaf: leaf.double())

    def copy(self) -> Inputs:
        return self.map(lambda leaf: leaf.clone())

    def tokens(self, rows: slice) -> Inputs:
        """The same weights (the same tensors) with some of the tokens."""
        return replace(
            self,
            x=self.x.detach()[rows].clone().requires_grad_(),
            topk_idx=self.topk_idx[rows],
            topk_weights=self.topk_weights.detach()[rows].clone().requires_grad_(),
        )

    def grads(self) -> list[Tensor | None]:
        return [leaf.grad for leaf in self.leaves()]


def make_inputs(
    shape: Shape, num_tokens: int, dtype: torch.dtype = torch.float64, *, shared: bool = False, seed: int = 0
) -> Inputs:
    """O(1) values. Slots are independent, so -1 and the same expert twice in a token both occur."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(sizes, generator=generator, dtype=torch.float64) * scale
        return values.to(dtype).requires_grad_()

    hidden_scale, inter_scale = shape.hidden**-0.5, shape.inter**-0.5
    x = normal(num_tokens, shape.hidden)
    topk_idx = torch.randint(-1, shape.experts, (num_tokens, shape.topk), generator=generator)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    topk_weights = torch.rand(num_tokens, shape.topk, generator=generator, dtype=wide).requires_grad_()
    gate_up = normal(shape.experts, 2 * shape.inter, shape.hidden, scale=2 * hidden_scale)
    down = normal(shape.experts, shape.hidden, shape.inter, scale=2 * inter_scale)
    pair = None
    if shared:
        pair = (
            normal(2 * shape.shared_inter, shape.hidden, scale=2 * hidden_scale),
            normal(shape.hidden, shape.shared_inter, scale=2 * inter_scale),
        )
    return Inputs(x, topk_idx, topk_weights, gate_up, down, pair)


def call(inputs: Inputs, buffer: SymmBuffer, **kwargs: Any) -> Tensor:
    return mega_moe(
        inputs.x, inputs.topk_idx, inputs.topk_weights, inputs.gate_up, inputs.down,
        buffer=buffer, shared=inputs.shared, **kwargs,
    )  # fmt: skip


def backward(inputs: Inputs, buffer: SymmBuffer, dy: Tensor, **kwargs: Any) -> Tensor:
    y = call(inputs, buffer, **kwargs)
    y.backward(dy)
    return y.detach()


@dataclass
class Calls:
    """Calls of the BF16 functions.

    forward: n of each; backward: (dw1, dw2, shared dw1, shared dw2) of each; kept: z of each forward that
    kept it; used: z of each backward that took it.
    """

    forward: list[int] = field(default_factory=list)
    backward: list[tuple[Tensor | None, ...]] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    used: list[Tensor] = field(default_factory=list)


def record_calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Record the calls the op makes from now on; they still run."""
    calls = Calls()
    forward, backward = custom_ops.bf16_mega_moe, custom_ops.bf16_mega_moe_backward
    forward_z, backward_z = custom_ops.forward_keeping_z, custom_ops.backward_from_z

    def record_forward(y: Tensor, *args: Any, **kwargs: Any) -> None:
        calls.forward.append(y.shape[0])
        forward(y, *args, **kwargs)

    def record_backward(dx: Tensor, dw1: Any, dw2: Any, *args: Any, **kwargs: Any) -> None:
        calls.backward.append((dw1, dw2, kwargs["shared_dw1_weights"], kwargs["shared_dw2_weights"]))
        backward(dx, dw1, dw2, *args, **kwargs)

    def record_forward_z(y: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.forward.append(y.shape[0])
        calls.kept.append(forward_z(y, *args, **kwargs))
        return calls.kept[-1]

    def record_backward_z(dx: Tensor, dw1: Any, dw2: Any, *args: Any, **kwargs: Any) -> None:
        calls.backward.append((dw1, dw2, kwargs["shared_dw1_weights"], kwargs["shared_dw2_weights"]))
        calls.used.append(kwargs["z"])
        backward_z(dx, dw1, dw2, *args, **kwargs)

    monkeypatch.setattr(custom_ops, "bf16_mega_moe", record_forward)
    monkeypatch.setattr(custom_ops, "bf16_mega_moe_backward", record_backward)
    monkeypatch.setattr(custom_ops, "forward_keeping_z", record_forward_z)
    monkeypatch.setattr(custom_ops, "backward_from_z", record_backward_z)
    return calls


def _clamp(z: Tensor, clamp: float | None) -> tuple[Tensor, Tensor]:
    gate, up = z.chunk(2, dim=-1)
    return (gate, up) if clamp is None else (gate.clamp(max=clamp), up.clamp(min=-clamp, max=clamp))


def _swiglu_mlp(x: Tensor, gate_up: Tensor, down: Tensor, clamp: float | None, bf16: bool) -> Tensor:
    z = torch.nn.functional.linear(x, gate_up)
    gate, up = _clamp(z, clamp)
    if bf16:  # g and u are rounded before the clamp; where it binds is decided before the rounding
        rounded_gate, rounded_up = _clamp(z.bfloat16().to(z.dtype), clamp)
        gate, up = gate + (rounded_gate - gate).detach(), up + (rounded_up - up).detach()
    return torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, down)


def expected_forward(inputs: Inputs, clamp: float | None = None, bf16: bool = False) -> Tensor:
    """The contract's formula slot by slot in plain autograd ops; shares no code with the package."""
    y = torch.zeros_like(inputs.x)
    for slot in range(inputs.topk_idx.shape[1]):
        for expert in range(inputs.gate_up.shape[0]):
            rows = (inputs.topk_idx[:, slot] == expert).nonzero().squeeze(1)
            out = _swiglu_mlp(inputs.x[rows], inputs.gate_up[expert], inputs.down[expert], clamp, bf16)
            y = y.index_add(0, rows, out * inputs.topk_weights[rows, slot, None])
    if inputs.shared is not None:
        y = y + _swiglu_mlp(inputs.x, *inputs.shared, clamp, bf16)
    return y


def expected(inputs: Inputs, dy: Tensor, clamp: float | None = None) -> tuple[Tensor, list[Tensor]]:
    """y and the gradients of all leaves, in float64 (bf16 inputs: with g and u rounded to bf16)."""
    bf16 = inputs.x.dtype == torch.bfloat16
    inputs = inputs.double()
    for leaf in inputs.leaves():
        leaf.requires_grad_()
    y = expected_forward(inputs, clamp, bf16)
    grads = torch.autograd.grad(y, inputs.leaves(), dy.double(), allow_unused=True)
    zeros = [torch.zeros_like(leaf) for leaf in inputs.leaves()]
    return y.detach(), [zero if grad is None else grad for grad, zero in zip(grads, zeros, strict=True)]


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Relative Frobenius norm; the absolute one where the reference is zero."""
    value, reference = value.double(), reference.double()
    norm = reference.norm().item()
    return (value - reference).norm().item() / (norm if norm else 1.0)


def assert_close(value: Tensor | None, reference: Tensor, tolerance: float, what: str = "") -> None:
    assert value is not None, f"{what}: no value"
    assert value.shape == reference.shape, what
    error = relative_error(value, reference)
    assert error <= tolerance, f"{what}: relative error {error:.2e} > {tolerance:.0e}"


def assert_all_close(values: Any, references: list[Tensor], tolerance: float) -> None:
    """Each gradient on its own, and those of 3-D weights expert by expert."""
    for index, (value, reference) in enumerate(zip(values, references, strict=True)):
        assert_close(value, reference, tolerance, f"gradient {index}")
        if reference.dim() == 3:
            for expert in range(reference.shape[0]):
                assert_close(value[expert], reference[expert], tolerance, f"gradient {index} expert {expert}")
