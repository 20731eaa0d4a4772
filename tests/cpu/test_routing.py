"""The route plan against lists built in loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_kernels.routing import make_route_plan, pool_order


@settings(max_examples=100, deadline=None)
@given(data=st.data(), experts=st.integers(1, 9), tokens=st.integers(0, 12), topk=st.integers(1, 5))
def test_rows_are_ordered_by_expert_token_slot(
    data: st.DataObject, experts: int, tokens: int, topk: int
) -> None:
    ids = data.draw(st.lists(st.integers(-1, experts - 1), min_size=tokens * topk, max_size=tokens * topk))
    topk_idx = torch.tensor(ids, dtype=torch.int64).reshape(tokens, topk)
    plan = make_route_plan(topk_idx, experts)
    want = sorted(
        (int(topk_idx[t, k]), t, k) for t in range(tokens) for k in range(topk) if topk_idx[t, k] >= 0
    )
    assert list(zip(plan.expert.tolist(), plan.token.tolist(), plan.slot.tolist(), strict=True)) == want
    assert plan.num_rows == len(want)
    assert plan.counts.tolist() == [sum(row[0] == e for row in want) for e in range(experts)]
    assert plan.offsets.tolist() == [sum(row[0] < e for row in want) for e in range(experts + 1)]


@settings(max_examples=100, deadline=None)
@given(counts=st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=4))
def test_pool_is_ordered_by_expert_rank_row(counts: list[list[int]]) -> None:
    received = [
        (e, rank, row)
        for rank, per_expert in enumerate(counts)
        for e, n in enumerate(per_expert)
        for row in range(n)
    ]
    order = pool_order(torch.tensor(counts))
    assert [received[i] for i in order.tolist()] == sorted(received)


@pytest.mark.parametrize(("value", "experts"), [(4, 4), (-2, 4), (2**40, 8)])
def test_expert_out_of_range(value: int, experts: int) -> None:
    topk_idx = torch.tensor([[0, -1], [value, 1]])
    with pytest.raises(ValueError, match=rf"topk_idx holds {value}, needs values in \[0, {experts}\) or -1"):
        make_route_plan(topk_idx, experts)
