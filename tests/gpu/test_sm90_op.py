"""The op over the SM90 BF16 kernels, on one rank: autograd, with gate and up recomputed and kept."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from sm90_cases import BF16, Case, check, make_case
from test_sm90_bf16 import TOKENS, make_buffer, poison
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from prime_kernels import SymmBuffer, bf16, mega_moe, op, runtime

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("sm90_kernels", "settings_undone")]


def run_op(case: Case, buffer: SymmBuffer, frozen: tuple[str, ...] = (), **options: Any) -> dict[str, Tensor]:
    """y of the op, under that name, and the leaves it was given."""
    tensors = {"x": case.x, "topk_weights": case.topk_weights, "gate_up": case.gate_up, "down": case.down}
    if case.shared is not None:
        tensors |= {"shared_gate_up": case.shared[0], "shared_down": case.shared[1]}
    leaves = {name: value.clone().requires_grad_(name not in frozen) for name, value in tensors.items()}
    shared = (leaves["shared_gate_up"], leaves["shared_down"]) if case.shared is not None else None
    y = mega_moe(
        leaves["x"], case.topk_idx, leaves["topk_weights"], leaves["gate_up"], leaves["down"],
        buffer=buffer, activation_clamp=case.clamp, shared=shared, **options,
    )  # fmt: skip
    return {"y": y, **leaves}


def judge_op(case: Case, got: dict[str, Tensor]) -> None:
    """After the backward of ``case.dy``."""
    check("y", got["y"].detach(), case.y)
    grads = case.grads
    want = {
        "x": grads.dx, "topk_weights": grads.dtopk, "gate_up": grads.dgate_up, "down": grads.ddown,
        "shared_gate_up": grads.dshared_gate_up, "shared_down": grads.dshared_down,
    }  # fmt: skip
    for name, leaf in got.items():
        if name != "y" and leaf.requires_grad:
            expected = want[name]
            assert leaf.grad is not None
            assert expected is not None
            check(f"gradient of {name}", leaf.grad, expected, matrices=leaf.dim() == 3)


@pytest.fixture
def nan_in_z(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that the forward doesn't write must not reach any result."""
    empty = bf16._empty_z
    monkeypatch.setattr(bf16, "_empty_z", lambda buffer, rows: empty(buffer, rows).fill_(math.nan))


@pytest.mark.parametrize("keep", [None, "z"])
@pytest.mark.parametrize("clamp", [None, 1.0])
def test_autograd(keep: str | None, clamp: float | None, nan_in_z: None) -> None:
    case = make_case(200, 8, 4, 512, 256, "masked", clamp=clamp, shared_inter=256)
    buffer = make_buffer(case)
    got = run_op(case, buffer, keep=keep)
    poison(buffer)
    got["y"].backward(case.dy)
    judge_op(case, got)
    buffer.check()


@pytest.mark.parametrize("frozen", [("gate_up",), ("down",), ("gate_up", "down")])
def test_autograd_with_kept_z_and_frozen_weights(frozen: tuple[str, ...], nan_in_z: None) -> None:
    case = make_case(200, 8, 4, 512, 256, "skewed")
    got = run_op(case, make_buffer(case), frozen, keep="z")
    got["y"].backward(case.dy)
    assert all(got[name].grad is None for name in frozen)
    judge_op(case, got)


@pytest.mark.parametrize(("tokens", "kind"), [(0, "even"), (1, "even"), (128, "one"), (257, "random")])
def test_autograd_with_kept_z_of_few_or_unequal_rows(tokens: int, kind: str, nan_in_z: None) -> None:
    case = make_case(tokens, 8, 4, 768, 384, kind, clamp=0.7)
    got = run_op(case, make_buffer(case), keep="z")
    got["y"].backward(case.dy)
    judge_op(case, got)


def test_kept_z_of_layers_of_other_shapes_over_one_buffer(nan_in_z: None) -> None:
    """F1 F2 B2 B1, with NaN in buffer and pools between the calls: z is all that lasts. Pools of factor 2."""
    runtime.set_pool_capacity_factor(2.0)
    large, small = make_case(TOKENS, 8, 4, 768, 384), make_case(200, 6, 3, 512, 256, "masked", seed=1)
    base = make_buffer(large)
    view = make_buffer(small, 250, base)
    for _ in range(2):
        poison(base)
        first = run_op(large, base, keep="z")
        poison(base)
        second = run_op(small, view, keep="z")
        for case, buffer, got in ((small, view, second), (large, base, first)):
            z = got["y"].grad_fn.saved_tensors[-1]
            assert z.shape == (buffer.pool_rows, 2 * case.down.shape[2])
            assert z.dtype == BF16
            poison(base)
            got["y"].backward(case.dy)
            judge_op(case, got)
    base.check()


@pytest.mark.parametrize("keep", [None, "z"])
@pytest.mark.parametrize("save", [False, True])
def test_checkpointing(save: bool, keep: str | None, nan_in_z: None) -> None:
    """Full: the forward runs again. Selective: y, and z if it is kept, are saved."""
    case = make_case(200, 8, 4, 512, 256)
    buffer = make_buffer(case)
    saved_op = op.forward_op if keep is None else op.forward_keep_z_op

    def policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = save and operator is saved_op
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    got: dict[str, Tensor] = {}

    def layer(x: Tensor, topk_weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return mega_moe(x, case.topk_idx, topk_weights, gate_up, down, buffer=buffer, keep=keep)

    for name, value in (
        ("x", case.x), ("topk_weights", case.topk_weights), ("gate_up", case.gate_up), ("down", case.down),
    ):  # fmt: skip
        got[name] = value.clone().requires_grad_()
    context_fn = functools.partial(create_selective_checkpoint_contexts, policy)
    y = checkpoint(layer, *got.values(), use_reentrant=False, context_fn=context_fn)
    poison(buffer)
    y.backward(case.dy)
    judge_op(case, {"y": y, **got})


def test_two_layers_of_autograd_with_main_grad() -> None:
    case = make_case(200, 8, 4, 512, 256)
    buffer = make_buffer(case)
    gate_up, down = case.gate_up.clone().requires_grad_(), case.down.clone().requires_grad_()
    gate_up.main_grad = torch.zeros_like(gate_up, dtype=torch.float32)
    down.main_grad = torch.zeros_like(down, dtype=torch.float32)
    x = case.x.clone().requires_grad_()
    for _ in range(2):
        mega_moe(x, case.topk_idx, case.topk_weights, gate_up, down, buffer=buffer).backward(case.dy)
    assert gate_up.grad is None
    check("main_grad", gate_up.main_grad, 2 * case.grads.dgate_up, matrices=True)
    check("main_grad", down.main_grad, 2 * case.grads.ddown, matrices=True)
