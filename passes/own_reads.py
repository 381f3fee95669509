"""Part of pass 5: what is read at each token's own index is what it is read from.

Before::  rows = slice(table, 0, 0, S); index(rows [S, D], [arange(S) [1, S]])
After::   rows = slice(table, 0, 0, S); unsqueeze(rows, 0)

As rotary tables are read in ``cos[:seq_len][position_ids]``.  Declines, for `flatten` to refuse the node, where more
than one dimension is indexed, or where requests are paired with one another.
"""

from __future__ import annotations

import torch
from torch import fx

from selective_compile.passes.axes import Axis
from selective_compile.passes.rules_lookup import indices_of, reads_own_index
from selective_compile.passes.traced_graph import TracedGraph

aten = torch.ops.aten
TOKENS = (Axis.TOKEN,)


def replace_own_reads(traced: TracedGraph) -> int:
    """Returns how many."""
    found = [node for node in traced.graph.nodes if node in traced.axes and is_source(traced, node)]
    for node in found:
        node.replace_all_uses_with(source_in_shape(traced, node))
        traced.graph.erase_node(node)
    return len(found)


def is_source(traced: TracedGraph, node: fx.Node) -> bool:
    """Whether the rows of ``node`` are those of what it reads, each at its place, beside dimensions of size 1."""
    if not reads_own_index(node, traced.axes):
        return False
    used = [index for index in indices_of(node) or () if index is not None]
    own = traced.axes.get(used[0])
    if len(used) > 1 or own is None or own.numbers != TOKENS or own.dims.count(TOKENS) != 1:
        return False
    others = [dim for dim in own.dims if dim != TOKENS]
    batches = [(Axis.BATCH,)] if traced.axes[node.args[0]].holding(Axis.BATCH) else []  # type: ignore[index]
    return all(dim in ((), (Axis.BATCH,)) for dim in others) and (others + batches).count((Axis.BATCH,)) <= 1


def source_in_shape(traced: TracedGraph, node: fx.Node) -> fx.Node:
    """With the dimensions that the index has beside the tokens'; there is one request in the flat batch."""
    indices, source = indices_of(node), node.args[0]
    assert isinstance(source, fx.Node) and indices is not None
    (first,) = [dim for dim, index in enumerate(indices) if index is not None]
    for place, dim in enumerate(traced.axes[indices[first]].dims):
        if dim != TOKENS:
            with traced.graph.inserting_before(node):
                source = traced.graph.call_function(aten.unsqueeze.default, (source, first + place))
    return source
