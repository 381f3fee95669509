"""Within `group_loops`: rows that are added by an index for each element, which is that of its row.

Before::  index = repeat(reshape(rows, [-1, 1]), [1, 64]); scatter_reduce(out [T, 64], 0, index, values, "sum")
After::   index_add(out, 0, rows, values)

Declines for another reduction, and where the index is not that of whole rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from selective_compile.passes.axes import size_expression

aten = torch.ops.aten
REPEATS = (aten.repeat.default, aten.expand.default)
VIEWS = (aten.reshape.default, aten.view.default, aten.unsqueeze.default)


def add_rows(module: fx.GraphModule) -> int:
    """Rewrites what it can; returns how many."""
    added = 0
    for node in list(module.graph.nodes):
        rows = rows_of(node)
        if rows is not None:
            node.target, node.args, node.kwargs = aten.index_add.default, (node.args[0], 0, rows, node.args[3]), {}
            added += 1
    if added:
        module.graph.eliminate_dead_code()
        module.recompile()
    return added


def rows_of(node: fx.Node) -> fx.Node | None:
    """The numbers of the rows that a node adds to, one for each row of what it adds."""
    if node.target is aten.scatter_reduce.two:
        adds = node.args[4:] == ("sum",) and node.kwargs in ({}, {"include_self": True})
    else:
        adds = node.target is aten.scatter_add.default
    if not adds or node.args[1] != 0:
        return None
    out, index, values = (shape_of(node.args[i]) for i in (0, 2, 3))
    column: Any = node.args[2]
    if column.target not in REPEATS or index != values or out[1:] != values[1:]:
        return None
    column = column.args[0]
    if shape_of(column) != [index[0], *[1] * (len(index) - 1)]:
        return None
    while column.target in VIEWS and len(shape_of(column)) > 1:
        column = column.args[0]
    return column if shape_of(column) == index[:1] else None


def shape_of(node: Any) -> list[Any]:
    return [size_expression(size) for size in node.meta["val"].shape]
