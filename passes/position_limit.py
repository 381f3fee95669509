"""How many positions the flat graph's own tables have: learned positions end where their embedding does.

A configuration may say how far a model reaches; a decoder that has none says it by the tables it reads.  An analysis
of the flat graph: every read of a table at an index that is made of ``positions`` alone is tried on positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from selective_compile.passes.evaluate import CPU, ancestors, moved_to
from selective_compile.passes.flat_graph import FlatGraph

aten = torch.ops.aten
LONGEST = 2**21
MOVES = (aten.to, aten._to_copy, aten.reshape, aten.view, aten.unsqueeze, aten.squeeze, aten.clone, aten.contiguous)


def position_limit(flat: FlatGraph) -> int | None:
    """The first position at which a table would be read beyond its end; None: no table is read by position."""
    placeholders = [node for node in flat.module.graph.nodes if node.op == "placeholder"]
    if not flat.uses_positions:
        return None
    positions = placeholders[len(flat.weights) + len(flat.tokens)]
    limits = [
        first_beyond(index, positions, rows)
        for node in flat.module.graph.nodes
        for index, rows in reads(node)
        if positions in ancestors(index)
    ]
    return min((limit for limit in limits if limit is not None), default=None)


def id_limit(flat: FlatGraph, *, through: Callable[[fx.Node], bool] = lambda node: False) -> int | None:
    """The first token id at which a table would be read beyond its end; None: no table is read at ids as they are.

    ``through``: what else leaves the ids in question as they are.
    """
    placeholders = [node for node in flat.module.graph.nodes if node.op == "placeholder"]
    stack = placeholders[len(flat.weights) : len(flat.weights) + len(flat.tokens)]
    limits: list[int] = []
    while stack:
        ids = stack.pop()
        for user in ids.users:
            limits += [rows for index, rows in reads(user) if index is ids]
            if getattr(user.target, "overloadpacket", None) in MOVES or through(user):
                stack.append(user)
    return min(limits, default=None)


def reads(node: fx.Node) -> list[tuple[fx.Node, int]]:
    """The indices at which ``node`` reads, with the size of the dimension each counts in."""
    if node.target is aten.embedding.default:
        found: list[tuple[Any, int]] = [(node.args[1], 0)]
    elif node.target in (aten.index_select.default, aten.gather.default):
        found = [(node.args[2], int(node.args[1]))]  # type: ignore[arg-type]
    elif node.target is aten.index.Tensor:
        found = [(index, dim) for dim, index in enumerate(node.args[1])]  # type: ignore[arg-type]
    else:
        return []
    if "val" not in node.args[0].meta:  # type: ignore[union-attr]
        return []  # flattening made it, of tokens
    shape = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    return [(index, shape[dim]) for index, dim in found if isinstance(index, fx.Node) and isinstance(shape[dim], int)]


def first_beyond(index: fx.Node, positions: fx.Node, rows: int) -> int | None:
    """The smallest position whose index is not below ``rows``; None: there is none, or positions alone do not tell."""
    count = min(2 * rows + 2, LONGEST)
    values: dict[fx.Node, Any] = {}
    for node in ancestors(index):
        if node is positions:
            values[node] = torch.arange(count, device="cpu")
        elif isinstance(node.meta.get("val"), torch.SymInt):
            values[node] = count
        elif node.op == "get_attr":
            values[node] = getattr(node.graph.owning_module, str(node.target)).cpu()
        elif node.op == "placeholder":
            values[node] = None  # only its size may be asked for, which is above
        elif any(values[parent] is None for parent in node.all_input_nodes):
            return None
        else:
            args, kwargs = moved_to(CPU, node, values)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    tokens = [dim for dim, size in enumerate(values[index].shape) if size == count]
    if len(tokens) != 1:
        return None
    largest = values[index].movedim(tokens[0], 0).reshape(count, -1).amax(1)
    beyond = (largest >= rows).nonzero()
    return int(beyond[0]) if len(beyond) else None
