"""What sorts rows by their groups becomes one call, which rows of nobody's tokens go along with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  (registers the grouped product that its models call on a CPU)
from torch import Tensor

from selective_compile.grouped_ops import group_rows, grouped_linear
from selective_compile.passes.flatten import flatten
from selective_compile.passes.lower import lower
from tests.passes.graphs import analysed

aten = torch.ops.aten
EXPERTS, WIDTH = 4, 8
WEIGHTS = (torch.randn(EXPERTS, WIDTH), torch.randn(EXPERTS, WIDTH, WIDTH))


def mixture(
    top: int = 2,
    dtype: torch.dtype = torch.int32,
    first: Callable[[Tensor], Tensor] = lambda experts: experts.reshape(-1),
) -> Any:
    def run(x: Tensor, router: Tensor, weight: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        scores, experts = F.linear(rows, router).topk(top, dim=-1)
        values, order = torch.sort(first(experts))
        ends = torch.histc(values.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=dtype)
        found = torch.ops.transformers.grouped_mm_fallback(rows[order // top], weight.mT, ends)
        found = (found + values[:, None]) * scores.reshape(-1)[order][:, None]
        places = torch.empty_like(order)
        places[order] = torch.arange(order.shape[0])
        return found[places].view(-1, top, WIDTH).sum(1).reshape(x.shape)

    return run


def lowered(run: Any) -> Any:
    flat = flatten(analysed(run, *WEIGHTS), paged=False)
    changed = lower(flat)
    calls = [node for node in flat.module.graph.nodes if node.target is group_rows]
    assert changed >= 2 + len(calls)
    assert any(node.target is grouped_linear for node in flat.module.graph.nodes)
    return flat, calls


def placeholders(flat: Any) -> list[Any]:
    """Weights, the hidden states, and then cu_seqlens_q."""
    return [node for node in flat.module.graph.nodes if node.op == "placeholder"]


@pytest.mark.parametrize("top", [1, 2, 3])
def test_one_call_orders_counts_and_says_where_rows_came(top: int) -> None:
    flat, (call,) = lowered(mixture(top))
    assert call.args[1] == EXPERTS and call.args[2] is placeholders(flat)[3]
    assert call.args[0].meta["val"].shape[1] == top
    targets = {node.target for node in flat.module.graph.nodes}
    assert not targets & {aten.sort.default, aten.histc.default, aten.cumsum.default, aten.index_put.default}
    x = torch.randn(1, 7, WIDTH)
    with torch.no_grad():
        (found,) = flat.module(*WEIGHTS, x, torch.tensor([0, 3, 7], dtype=torch.int32))
        torch.testing.assert_close(found, mixture(top)(x, *WEIGHTS))
        (nobodys,) = flat.module(*WEIGHTS, x, torch.tensor([0, 3, 5], dtype=torch.int32))
    assert torch.equal(found[:, :5], nobodys[:, :5])


def test_ends_of_64_bits_stay() -> None:
    flat = flatten(analysed(mixture(dtype=torch.int64), *WEIGHTS), paged=False)
    assert lower(flat) == 3 and not any(node.target is group_rows for node in flat.module.graph.nodes)
