"""Before pass 2, for the engine: a token input that is never anything but 1 becomes ones made in the graph.

Before::  attention_mask -> cumsum(attention_mask, -1)
After::   sym_size(ids, 1) -> ones([1, S]) -> cumsum(ones, -1)

What is computed from it is then made of sizes alone.  Declines (0) where the graph has no such input, does not read
it, or has no other to read sizes from.
"""

from __future__ import annotations

import torch
from torch import fx

from selective_compile.passes.traced_graph import TracedGraph

aten = torch.ops.aten


def all_ones(traced: TracedGraph, source: str) -> int:
    """Replaces the token input named ``source``; returns how many it replaced."""
    given = next((given for given in traced.tokens() if given.source == source), None)
    others = [other.node for other in traced.tokens() if other is not given]
    if given is None or not others or not given.node.users:
        return 0
    value = given.node.meta["val"]
    after = [node for node in traced.graph.nodes if node.op == "placeholder"][-1]
    with traced.graph.inserting_after(after):
        sizes = [
            size if isinstance(size, int) else traced.graph.call_function(aten.sym_size.int, (others[0], dim))
            for dim, size in enumerate(value.shape)
        ]
        for node, size in zip(sizes, value.shape, strict=True):
            if isinstance(node, fx.Node):
                node.meta["val"] = size
    last = next((node for node in reversed(sizes) if isinstance(node, fx.Node)), after)
    with traced.graph.inserting_after(last):
        ones = traced.graph.call_function(
            aten.ones.default, (sizes,), {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        )
    with value.fake_mode:
        ones.meta["val"] = torch.ones(value.shape, dtype=value.dtype, device=value.device)
    given.node.replace_all_uses_with(ones)
    traced.module.recompile()
    return 1
