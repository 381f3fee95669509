"""What attentions add to scores and look up by how far back the key is: a learned bias, or one of the query's own.

    gather(x @ profiles [B, H, S, R], -1, clamp(i - j, 0, R - 1))     of each query, R numbers for each head
    embedding(bucket(i - j), weight [R, H])                           the same numbers for all queries (T5)

Neither is a mask of positions alone: what is looked up is made of tokens or of a weight.  But where it is looked up is,
and that is what `mask_distances` proves to be told by the distance.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from selective_compile.passes.attention_calls import BiasLookup
from selective_compile.passes.axes import Axis
from selective_compile.passes.evaluate import ancestors, leaves
from selective_compile.passes.heads import CASTS, MOVES
from selective_compile.passes.rules_reduce import dim_along
from selective_compile.passes.traced_graph import TracedGraph

aten = torch.ops.aten
# What a number may go through on its way to a score: each leaves it as it is, or multiplies it with or adds to it what
# does not depend on it, whatever the number is.  Of each operator the arguments that it may be.
CARRIED: dict[Any, tuple[int, ...]] = dict.fromkeys((*MOVES, *CASTS), (0,))
CARRIED |= {aten.masked_fill: (0,), aten.where: (1, 2), aten.div: (0,)}
CARRIED |= dict.fromkeys((aten.add, aten.sub, aten.mul), (0, 1))


def lookups_behind(traced: TracedGraph, masks: Iterable[fx.Node]) -> tuple[BiasLookup, ...]:
    """All that these values read, each once, not looking behind them."""
    found: dict[fx.Node, BiasLookup | None] = {}
    for mask in masks:
        stack, seen = [mask], set()
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if node not in found:
                found[node] = bias_lookup(traced, node)
            known = found[node]
            stack += node.all_input_nodes if known is None else [known.index]
    return tuple(lookup for lookup in found.values() if lookup is not None)


def bias_lookup(traced: TracedGraph, node: fx.Node) -> BiasLookup | None:
    """What ``node`` looks up for each pair of a query and a key; None if it is no such lookup."""
    if node not in traced.axes or not traced.axes[node].is_pair:
        return None
    if node.target is aten.gather.default:
        return of_each_query(traced, node)
    if node.target is aten.embedding.default:
        return of_all_queries(traced, node, node.args[0], 0, node.args[1])
    if node.target is aten.index.Tensor:
        given = [(dim, index) for dim, index in enumerate(node.args[1]) if index is not None]  # type: ignore[arg-type]
        return of_all_queries(traced, node, node.args[0], *given[0]) if len(given) == 1 else None
    return None


def of_each_query(traced: TracedGraph, node: fx.Node) -> BiasLookup | None:
    """Of a gather along the keys out of rows that queries have: it cuts, and so reads each query's own."""
    source, _, index = node.args[:3]
    dim, pair = dim_along(node, 1), places_of_pair(traced, index)
    axes = traced.axes.get(source)  # type: ignore[arg-type]
    if axes is None or pair is None or not isinstance(source, fx.Node) or not isinstance(index, fx.Node):
        return None
    rank = len(axes.dims)
    token = rank + pair[0]
    if dim - rank != pair[1] or axes.holding(Axis.TOKEN) != (token,) or axes.dims[token] != (Axis.TOKEN,):
        return None
    rows = source.meta["val"].shape[dim]
    heads = [d for d in range(rank) if d not in (token, dim) and axes.dims[d] != (Axis.BATCH,)]
    plain = all(isinstance(f, int) for d in heads for f in axes.dims[d])
    if not plain or not isinstance(rows, int):
        return None
    batch = [d for d in range(rank) if d not in (token, dim, *heads)]
    order = (*batch, token, *heads, dim)
    return BiasLookup(node=node, source=source, index=index, pair=pair, order=order, rows=rows, per_query=True)


def of_all_queries(traced: TracedGraph, node: fx.Node, source: object, dim: int, index: object) -> BiasLookup | None:
    """Of a table that depends on no token, at an index of its own for each pair."""
    pair = places_of_pair(traced, index)
    if pair is None or not isinstance(source, fx.Node) or source not in traced.axes or not isinstance(index, fx.Node):
        return None
    shape = source.meta["val"].shape
    floats = source.meta["val"].dtype.is_floating_point and index.meta["val"].dtype is not torch.bool
    if not traced.axes[source].is_constant or not floats or not all(isinstance(size, int) for size in shape):
        return None
    order = (*(d for d in range(len(shape)) if d != dim), dim)
    return BiasLookup(node=node, source=source, index=index, pair=pair, order=order, rows=shape[dim], per_query=False)


def places_of_pair(traced: TracedGraph, index: object) -> tuple[int, int] | None:
    """The dimensions of queries and keys, from the last, of an index that is made of positions."""
    if not isinstance(index, fx.Node) or index not in traced.axes or not traced.axes[index].is_pair:
        return None
    axes = traced.axes[index]
    query, key = (dim - len(axes.dims) for dim in axes.key_dims)
    return query, key


def reads_otherwise(lookup: BiasLookup, mask: fx.Node) -> fx.Node | None:
    """A node behind ``mask`` that does more with what is looked up, or what it is looked up in, than to carry it on: as
    a condition on it does, an index that is made of it, or an absolute value.  None if there is none.

    A proof has other numbers in their place, and would hold for these alone.
    """
    carrying = {lookup.source}
    for node in ancestors(mask, frozenset(carrying)):
        if node is lookup.source or carrying.isdisjoint(node.all_input_nodes):
            continue
        read = [given for given in leaves((node.args, node.kwargs)) if isinstance(given, fx.Node) and given in carrying]
        places: tuple[int, ...] = CARRIED.get(getattr(node.target, "overloadpacket", None), ())
        if node is lookup.node:
            places = (0,)
        elif lookup.source in read:
            return node
        one = len(read) == 1 and read[0] in [given for place, given in enumerate(node.args) if place in places]
        if not one or not node.meta["val"].dtype.is_floating_point:  # a cast to others asks whether it is 0
            return node
        carrying.add(node)
    return None


def is_read_behind(lookups: Iterable[BiasLookup], mask: fx.Node) -> bool:
    """Whether a mask reads one of them."""
    nodes = {lookup.node for lookup in lookups}
    return not nodes.isdisjoint(ancestors(mask, frozenset(nodes)))
