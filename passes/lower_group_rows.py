"""The order of rows by the groups that their tokens chose, as tokens choose experts, in one call.

Before::  values, order = aten.sort(choices [S]); ends = aten.cumsum(aten.histc(values, E, 0, E - 1), 0)
          places = aten.index_put(empty [S], [order], aten.arange(S))
After::   order, places, ends = selective.group_rows(choices [T, k], E, cu_seqlens_q)

Libraries take five calls for it, of a few values in a step that decodes.  And rows of a step that are nobody's, as one
request alone has one beside its own, choose as somebody's do: else they would have groups of their own, whose weights
are read for nothing, which for one request is as many again.

Declines where groups are ordered or counted in another way.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from selective_compile.grouped_ops import group_rows
from selective_compile.passes.axes import size_expression
from selective_compile.passes.flat_graph import FlatGraph
from selective_compile.passes.lower_grouped import CASTS

aten = torch.ops.aten
FLATTENED = (aten.reshape.default, aten.view.default)
SORTS = (aten.sort.default, aten.sort.stable)


def lower_group_rows(flat: FlatGraph, ends: fx.Node) -> bool:
    """Whether ``ends [E]`` of rows in groups, and their order, come of one call now; what made them is left unused."""
    found = sorted_choices(ends)
    if found is None:
        return False
    sort, groups = found
    choices = sort.args[0]
    assert isinstance(choices, fx.Node)
    each = choices_per_token(flat, choices)
    graph = flat.module.graph
    with flat.symbols.mode, graph.inserting_before(sort):
        rows = made(graph, aten.reshape.default, choices, [-1, each or 1])
        call = made(graph, group_rows, rows, groups, cu_seqlens_q(flat) if each else None)
        order, places, own_ends = (made(graph, operator.getitem, call, i) for i in range(3))
        values = made(graph, aten.index.Tensor, choices, [order])
    replaced = [(ends, own_ends), *((node, places) for old in items(sort, 1) for node in inverses(old))]
    replaced += [(old, by) for i, by in ((0, values), (1, order)) for old in items(sort, i)]
    for node, by in replaced:
        node.replace_all_uses_with(by)
    return True


def sorted_choices(ends: fx.Node) -> tuple[fx.Node, int] | None:
    """The sort ``[S]`` of int64 that ``ends`` counts the groups in, and how many groups there are."""
    if ends.target is not aten.cumsum.default or ends.meta["val"].dtype is not torch.int32:
        return None
    counts: Any = ends.args[0]
    if counts.target is not aten.histc.default or len(counts.args) != 4:
        return None
    values, groups, least, most = counts.args
    while values.target in CASTS:
        values = values.args[0]
    if groups < 2 or (least, most) != (0, groups - 1) or values.target is not operator.getitem or values.args[1] != 0:
        return None
    sort = values.args[0]
    ascending = sort.target in SORTS and not (sort.args[2:] or {"descending", "dim"} & sort.kwargs.keys())
    value = values.meta["val"]
    return (sort, groups) if ascending and value.dim() == 1 and value.dtype is torch.int64 else None


def choices_per_token(flat: FlatGraph, choices: fx.Node) -> int | None:
    """k, where the choices are those ``[T, k]`` of each token in turn."""
    total = flat.symbols.size("token", 0).node.expr
    if choices.target not in FLATTENED:
        return None
    source: Any = choices.args[0]
    sizes = [size_expression(size) for size in source.meta["val"].shape]
    while len(sizes) > 2 and sizes[0] == 1:
        sizes.pop(0)
    return int(sizes[1]) if len(sizes) == 2 and sizes[0] == total and sizes[1].is_Integer and sizes[1] > 0 else None


def cu_seqlens_q(flat: FlatGraph) -> fx.Node:
    place = len(flat.weights) + len(flat.tokens) + flat.uses_positions + flat.metadata.index("cu_seqlens_q")
    return [node for node in flat.module.graph.nodes if node.op == "placeholder"][place]


def made(graph: fx.Graph, target: Any, *arguments: Any) -> fx.Node:
    """A node, and what it gives, by the fakes of what it is given."""
    node = graph.call_function(target, arguments)
    given = fx.node.map_arg(arguments, lambda each: each.meta["val"])
    node.meta["val"] = target(*given)
    return node


def items(node: fx.Node, place: int) -> list[fx.Node]:
    return [user for user in node.users if user.target is operator.getitem and user.args[1] == place]


def inverses(order: fx.Node) -> list[fx.Node]:
    """What says of each row where it has come in this order."""
    return [user for user in order.users if user.target is aten.index_put.default and is_inverse(user, order)]


def is_inverse(node: fx.Node, order: fx.Node) -> bool:
    into, indices, values, *accumulate = node.args
    alike = all(isinstance(each, fx.Node) and same_rows(each, order) for each in (into, values))
    counts = isinstance(values, fx.Node) and values.target is aten.arange.default and len(values.args) == 1
    return alike and counts and indices == [order] and not any(accumulate) and not node.kwargs


def same_rows(node: fx.Node, order: fx.Node) -> bool:
    value, other = node.meta["val"], order.meta["val"]
    return (
        value.dim() == 1
        and value.dtype is torch.int64
        and size_expression(value.shape[0]) == size_expression(other.shape[0])
    )
