"""Pass 9, fuse: queries and keys are rotated, and normed before that, in the launch that writes keys and values.

Before::  q = norm(view(linear)) * cos + rotate_half(norm(view(linear))) * sin; k likewise
          selective.ragged_attention(q, k, v, pools, metadata)
After::   selective.rotary_attention(view(linear), view(linear), v, cos, sin, weights, eps, ..., pools, metadata)

Precondition: the queries and the keys of a call are projections (or something else that is in memory anyhow), rotated
alike, by the same tables (`rotation`), half-split or interleaved, over the whole head or a part of it; a norm over the
head (`head_norm`) may come before that, with one epsilon.  Declines, and leaves the call as it is: whatever is read
otherwise; another norm, or something else that is computed of a projection first, since its own kernel would stay and
no launch be saved; pools of int8; and inputs whose rows are not contiguous.  It is for the
Triton kernels, so the caller asks for it: on a CPU the native path stays as it is.

What it saves in each layer, in launches on a GPU: the one or two kernels that Inductor makes of norm and rotation, two
where keys have fewer heads than queries.  The tables take a launch of their own, once in a step.  Results are rounded
once, in the end, as in the code that Inductor makes of the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from selective_compile.passes.axes import size_expression
from selective_compile.passes.batch_dependence import is_kernel
from selective_compile.passes.elements import SPLITS, UnreadableError, dependents
from selective_compile.passes.equal_values import first_of_equal
from selective_compile.passes.flat_graph import FlatGraph
from selective_compile.passes.head_norm import HeadNorm, head_norm
from selective_compile.passes.heads import CASTS, MOVES
from selective_compile.passes.retrace import kind_of
from selective_compile.passes.rotation import Rotation, Rotations, Table, rows_first

aten, ops = torch.ops.aten, torch.ops.selective
# Nodes in front of an attention among which the heads are looked for before they are rotated: a layer has fewer.
NEAR = 200


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Queries or keys before they are rotated, and the norm of their heads that they are the result of, if any."""

    source: fx.Node
    rotation: Rotation
    norm: HeadNorm | None


def fuse_rotary(flat: FlatGraph) -> int:
    """Returns how many attention calls rotate their own queries and keys from here on."""
    graph, tables, rotations = flat.module.graph, Tables(Views(flat)), Rotations(flat)
    calls = [node for node in graph.nodes if node.target is ops.ragged_attention.default]
    fused = [node for node in calls if rotates_its_own(flat, node, tables, rotations)]
    graph.eliminate_dead_code()
    graph.lint()
    flat.module.recompile()
    return len(fused)


def rotates_its_own(flat: FlatGraph, node: fx.Node, tables: Tables, rotations: Rotations) -> bool:
    """Put the fused operator in the place of an attention, if that can be."""
    ends: list[Any] = list(node.args[:2])
    pools: list[Any] = list(node.args[3:5])
    if any(pool.meta["val"].dtype == torch.int8 for pool in pools):
        return False
    query, key = (heads_of(rotations, end) for end in ends)
    if query is None or key is None or tables.shared(query.rotation) != tables.shared(key.rotation):
        return False
    both = normed_alike(query, key)
    arguments = fused_arguments(flat, node, both, tables) if all(map(in_memory, both)) else None
    if arguments is None:
        return False
    with flat.module.graph.inserting_before(node):
        fused = flat.module.graph.call_function(ops.rotary_attention.default, arguments, node.kwargs)
    fused.meta = {**node.meta}
    node.replace_all_uses_with(fused)
    flat.module.graph.erase_node(node)
    return True


def fused_arguments(
    flat: FlatGraph, node: fx.Node, both: tuple[Heads, Heads], tables: Tables
) -> tuple[fx.node.Argument, ...] | None:
    """What the operator is called with in the place of ``node``; None where rows are not contiguous."""
    rotation, norm, ends = tables.shared(both[0].rotation), both[0].norm, node.args[:2]
    with flat.module.graph.inserting_before(node):
        rows = [rows_of(tables.views, heads.source, end) for heads, end in zip(both, ends, strict=True)]
        weights = [None if heads.norm is None else weight_of(tables.views, heads.norm) for heads in both]
    turning = [tables.rows(table) for table in (rotation.cos, rotation.sin)]
    if any(given is not None and given.meta["val"].stride()[-1] != 1 for given in (*rows, *turning, *weights)):
        return None
    scaling = (None, 0.0) if norm is None else norm.options
    places = (rotation.first, rotation.rotated, rotation.interleaved)
    return (*rows, node.args[2], *turning, *weights, *scaling, *places, *node.args[3:])


def normed_alike(query: Heads, key: Heads) -> tuple[Heads, Heads]:
    """With their norms, of which they are the input then, where these differ in the weights alone; else without."""
    if query.norm is None or key.norm is None or query.norm.options != key.norm.options:
        return replace(query, norm=None), replace(key, norm=None)
    return replace(query, source=query.norm.x), replace(key, source=key.norm.x)


def heads_of(rotations: Rotations, end: fx.Node) -> Heads | None:
    """What ``end`` ``[T, heads, D]`` is rotated out of; None if it is not, as far as can be read."""
    for source in sources(end):
        try:
            rotation = rotations.read(source, end)
        except UnreadableError as reason:
            if reason.final:
                return None
            continue
        return unrotated(rotations, source, end, rotation)
    return None


def sources(end: fx.Node) -> Iterator[fx.Node]:
    """Values that ``end`` is computed from and that have as many elements, the nearest first."""
    needed, node, count = set(end.all_input_nodes), end, size_expression(end.meta["val"].numel())
    for _ in range(NEAR):
        node = node.prev
        if node.op == "root":
            return
        if node in needed:
            needed.update(node.all_input_nodes)
            value: Any = node.meta.get("val")
            floating = isinstance(value, torch.Tensor) and value.is_floating_point()
            if floating and size_expression(value.numel()) == count:
                yield node


def unrotated(rotations: Rotations, source: fx.Node, end: fx.Node, rotation: Rotation) -> Heads | None:
    """Back from ``source`` over movements and casts: to a value of the end's dtype, and to a norm of its heads."""
    last, size = end.meta["val"].dtype, end.meta["val"].shape[-1]
    found = None
    while True:
        if found is None and source.meta["val"].dtype == last:
            found = source
        norm = head_norm(source, size)
        if norm is not None and is_of(norm, source, last):
            return Heads(source=found or norm.x, rotation=rotation, norm=norm)
        before = source.args[0] if getattr(source.target, "overloadpacket", None) in (*MOVES, *CASTS) else None
        if not isinstance(before, fx.Node) or not is_rotated(rotations, before, end, rotation):
            return None if found is None else Heads(source=found, rotation=rotation, norm=None)
        source = before


def is_of(norm: HeadNorm, result: fx.Node, dtype: torch.dtype) -> bool:
    """Whether a norm is of values of that dtype, as many as it results in, and computed in no narrower one."""
    value = norm.x.meta["val"]
    alike = [*map(size_expression, value.shape)] == [*map(size_expression, result.meta["val"].shape)]
    return alike and value.dtype == dtype and dtypes(norm.x, result) <= {torch.float32, dtype}


def dtypes(first: fx.Node, last: fx.Node) -> set[torch.dtype]:
    """Of the numbers that are computed from ``first`` up to ``last``."""
    values = (node.meta.get("val") for node in dependents(first, last))
    return {value.dtype for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()}


def is_rotated(rotations: Rotations, source: fx.Node, end: fx.Node, rotation: Rotation) -> bool:
    """Whether the same rotation leads to ``end`` from further back."""
    value, count = source.meta["val"], size_expression(end.meta["val"].numel())
    if not value.is_floating_point() or size_expression(value.numel()) != count:
        return False
    try:
        return rotations.read(source, end) == rotation
    except UnreadableError:
        return False


def in_memory(heads: Heads) -> bool:
    weight = None if heads.norm is None else heads.norm.weight
    return is_in_memory(heads.source) and (weight is None or is_in_memory(weight))


def is_in_memory(node: fx.Node) -> bool:
    """Whether Inductor makes no kernel of its own for a value: an input, a product of matrices, an operator of ours."""
    while getattr(node.target, "overloadpacket", None) in (*MOVES, *SPLITS) or node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    return node.op in ("placeholder", "get_attr") or is_kernel(node)


class Views:
    """Puts views into a graph; what they are like is found out once for values alike, as those of other layers are."""

    def __init__(self, flat: FlatGraph) -> None:
        self.flat = flat
        self._known: dict[Hashable, Any] = {}

    def add(self, target: Any, node: fx.Node, *args: Any) -> fx.Node:
        value = node.meta["val"]
        kind = target, kind_of(value), str(args)
        if kind not in self._known:
            with self.flat.symbols.mode:
                self._known[kind] = target(value, *args)
        made = self.flat.module.graph.call_function(target, (node, *args))
        made.meta["val"] = self._known[kind]
        return made


def rows_of(views: Views, node: fx.Node, end: Any) -> fx.Node:
    """``[T, heads, D]`` of a value with as many elements: a view wherever its strides allow it."""
    moved = views.add(aten.permute.default, node, rows_first(views.flat, node))
    return views.add(aten.reshape.default, moved, [-1, *end.meta["val"].shape[1:]])


def weight_of(views: Views, norm: HeadNorm) -> fx.Node | None:
    return None if norm.weight is None else views.add(aten.reshape.default, norm.weight, [-1])


class Tables:
    """The tables of a graph as ``[T, width]``: one for all calls that read equal ones."""

    def __init__(self, views: Views) -> None:
        self.views, self._first = views, first_of_equal(views.flat.module.graph)
        self._rows: dict[Table, fx.Node] = {}

    def shared(self, rotation: Rotation) -> Rotation:
        """By the first ones that are equal to its tables."""
        cos, sin = (replace(table, node=self._first[table.node]) for table in (rotation.cos, rotation.sin))
        return replace(rotation, cos=cos, sin=sin)

    def rows(self, table: Table) -> fx.Node:
        if table not in self._rows:
            flat, node = self.views.flat, table.node
            end = table.start + table.width
            for target, arguments in (
                (aten.permute.default, (rows_first(flat, node),)),
                (aten.flatten.using_ints, (1,)),
                (aten.slice.Tensor, (1, table.start, end)),
            ):
                with flat.module.graph.inserting_after(node):
                    node = self.views.add(target, node, *arguments)
            self._rows[table] = node
        return self._rows[table]
