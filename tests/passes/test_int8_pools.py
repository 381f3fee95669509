"""Pools of int8 rows in place of the model's dtype: which, how many, and that nothing else in the graph changes."""

from __future__ import annotations

import torch

from selective_compile.passes.flat_graph import FlatGraph
from selective_compile.passes.int8_pools import keep_as_int8, placeholders
from selective_compile.rewriting import captured_and_rewritten
from tests.models import tiny


def inputs_of(flat: FlatGraph) -> list[tuple[torch.dtype, list[str]]]:
    return [(example.dtype, list(map(str, example.shape))) for example in flat.example_inputs]


def test_every_attention_gets_pools_of_rows_with_a_scale() -> None:
    flat = captured_and_rewritten(tiny("gemma3_text"), {})[1].flat
    assert flat is not None
    before, code = inputs_of(flat), flat.module.code
    assert keep_as_int8(flat) == 2
    changed = [pair for pair in zip(before, inputs_of(flat), strict=True) if pair[0] != pair[1]]
    assert len(changed) == 4
    for (dtype, shape), (kept, rows) in changed:
        assert (dtype, kept) == (torch.float32, torch.int8)
        assert rows[:3] == shape[:3] and (shape[3], rows[3]) == ("16", "20")
    kept_nodes = [node for node in placeholders(flat) if "pool" in node.name or "val" in node.meta]
    examples = dict(zip(placeholders(flat), flat.example_inputs, strict=True))
    assert sum(node.meta["val"].dtype == torch.int8 for node in kept_nodes) == 4
    assert all(node.meta["val"].dtype == examples[node].dtype for node in kept_nodes)
    assert flat.module.code == code
    assert keep_as_int8(flat) == 0
