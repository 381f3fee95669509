"""Before pass 2, for the engine: a buffer that each forward writes anew before it reads it is none.

Before::  copy_ = aten.copy_(inv_freq, frequencies); mul(positions, copy_)
After::   mul(positions, frequencies)

What is in the buffer decides nothing, so that the engine need not write it.  Declines where the buffer is read in
another way, or shares memory with anything else that the graph is given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from selective_compile.passes.traced_graph import Input, TracedGraph, is_mutable

aten = torch.ops.aten


def forget_overwritten(traced: TracedGraph) -> int:
    """Replaces reads of such buffers by what was written; returns how many."""
    given = {item.node: item for item in traced.inputs if item.place == "weight"}
    found = 0
    for node in list(traced.graph.nodes):
        if node.target is not aten.copy_.default or node.args[0] not in given:
            continue
        buffer, source = node.args[0], node.args[1]
        if list(buffer.users) != [node] or not is_own(traced, given[buffer]) or not isinstance(source, fx.Node):
            continue
        if any(is_mutable(user) for user in (*node.users, *source.users) if user is not node):
            continue
        node.replace_all_uses_with(as_written(node, source))
        traced.graph.erase_node(node)
        found += 1
    if found:
        traced.module.recompile()
    return found


def is_own(traced: TracedGraph, item: Input) -> bool:
    """Whether nothing else that the graph is given lies where the buffer does."""
    if not isinstance(item.example, torch.Tensor) or isinstance(item.example, nn.Parameter):
        return False
    own = item.example.untyped_storage().data_ptr()
    others: list[Any] = [other.example for other in traced.inputs if other is not item]
    return all(one.untyped_storage().data_ptr() != own for one in others if isinstance(one, torch.Tensor))


def as_written(node: fx.Node, source: fx.Node) -> fx.Node:
    """``source`` in the buffer's type and shape."""
    buffer = node.meta["val"]
    made = source
    for wanted, target, argument in (
        (source.meta["val"].dtype != buffer.dtype, aten.to.dtype, buffer.dtype),
        (source.meta["val"].shape != buffer.shape, aten.expand.default, list(buffer.shape)),
    ):
        if wanted:
            with node.graph.inserting_before(node):
                value = made.meta["val"]
                made = node.graph.call_function(target, (made, argument))
            with buffer.fake_mode:
                made.meta = {**node.meta, "val": target(value, argument)}
    return made
