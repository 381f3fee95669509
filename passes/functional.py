"""Part of pass 1: operators that change a tensor in place become ones that return it changed.

Before::  product = grouped_mm(x, w); add_ = aten.add_(product, bias); relu(product)
After::   product = grouped_mm(x, w); add = aten.add(product, bias);   relu(add)

Before::  keys = aten.new_empty(x, sizes); part = aten.slice(keys, 3, 0, 4); copy_ = aten.copy_(part, x); mul(keys, 2)
After::   keys = aten.new_empty(x, sizes); written = aten.slice_scatter(keys, x, 3, 0, 4);            mul(written, 2)

Whatever is read behind the write of the same memory, as another part of it, is taken of what was written.  Declines,
leaving the node for pass 2 to refuse, unless the memory was allocated in the graph, and all that is read of it behind
the write is known as a view of it (`memory`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from selective_compile.passes.memory import TAKEN, View, allocates, linked, may_alias, overlaps, view_of
from selective_compile.passes.traced_graph import is_mutable

aten = torch.ops.aten
# `a &= b` and its like, which are not spelt as other operators that write are.
INFIX = {f"aten::__i{name}__": f"aten::__{name}___" for name in ("and", "or", "xor", "lshift", "rshift")}


def make_functional(module: fx.GraphModule) -> int:
    """Rewrites what it can; returns how many."""
    rewritten = 0
    order = {node: place for place, node in enumerate(module.graph.nodes)}
    for node in list(module.graph.nodes):
        if node.op != "call_function" or not is_mutable(node):
            continue
        returning = functional(node)
        # A value with numbers was made outside of the trace, as by a graph that `vmap` went through.
        if returning is None or not isinstance(node.meta.get("val"), FakeTensor):
            continue
        write = Write(node, returning, order)
        if write.can_become_value():
            write.rewrite()
            rewritten += 1
    module.graph.eliminate_dead_code()
    module.recompile()
    return rewritten


def functional(node: fx.Node) -> Any:
    """The operator that returns what ``node`` writes into its first argument, and into nothing else; or None."""
    schema = node.target._schema  # type: ignore[union-attr]
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    name = INFIX.get(schema.name, schema.name).split("::")[1]
    if written != [schema.arguments[0].name] or not schema.name.startswith("aten::") or not name.endswith("_"):
        return None
    packet = getattr(aten, name.removesuffix("_"), None)
    overloads = () if packet is None else (getattr(packet, each) for each in packet.overloads())
    taken = [str(argument.type) for argument in schema.arguments]  # `pow` has the overload of a name for others
    return next((one for one in overloads if [str(a.type) for a in one._schema.arguments] == taken), None)


class Write:
    """A node that writes: to a part of the memory of ``root``, through ``views``, the last of which is the root's."""

    def __init__(self, node: fx.Node, returning: Any, order: dict[fx.Node, int]) -> None:
        self._node, self._returning, self._order = node, returning, order
        self._graph = node.graph
        self._part: Any = node.args[0]
        self._views: list[View] = []
        self._root: Any = self._part
        while isinstance(self._root, fx.Node) and (view := view_of(self._root)) is not None:
            self._views.append(view)
            self._root = view.source

    def can_become_value(self) -> bool:
        """Whether it writes to nobody else's memory, and what is read of it from then on is known to be a view."""
        if not isinstance(self._root, fx.Node) or overlaps(self._part.meta["val"]) or self._changes_shape:
            return False
        own = {}
        for other in linked(self._root):
            if not may_alias(other) and not allocates(other):
                return False
            if self._order[other] <= self._order[self._node] and other is not self._node:
                own[other] = self._is_view(other)
        return all(known or not self._behind(other) for other, known in own.items())

    @property
    def _changes_shape(self) -> bool:
        """As `squeeze_`, which writes to no memory."""
        return any(returned.alias_info is not None for returned in self._returning._schema.returns)

    def _is_view(self, node: fx.Node) -> bool:
        while node is not self._root and (view := view_of(node)) is not None:
            node = view.source
        return node is self._root

    def _behind(self, node: fx.Node) -> list[fx.Node]:
        """Who reads it behind the write; its sizes stay what they were."""
        sizes = (aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default)
        after = [user for user in node.users if self._order[user] > self._order[self._node]]
        return [user for user in after if user.target not in sizes]

    def rewrite(self) -> None:
        before = [other for other in linked(self._root) if self._order[other] < self._order[self._node]]
        part = self._written()
        new = {self._part: part}
        for view, of in zip(self._views, (self._part, *(view.source for view in self._views)), strict=False):
            put = view.put(new[of])
            new[view.source] = new[of] if put is None else self._make(*put, like=view.source)
        if self._views and self._is_written_again(before):
            new = {self._root: new[self._root]}  # the part is a view of it for the next write, too
        for other in before:
            for user in self._behind(other):
                user.replace_input_with(other, self._anew(other, new))
        self._node.replace_all_uses_with(self._anew(self._part, new))
        self._graph.erase_node(self._node)

    def _is_written_again(self, before: list[fx.Node]) -> bool:
        made = {*before, self._node}
        behind = [user for one in linked(self._root) for user in one.users if user not in made]
        return any(is_mutable(user) and self._order[user] > self._order[self._node] for user in behind)

    def _anew(self, node: fx.Node, new: dict[fx.Node, fx.Node]) -> fx.Node:
        """The value that ``node`` has behind the write."""
        if node not in new:
            view = view_of(node)
            assert view is not None
            new[node] = self._make(*view.take(self._anew(view.source, new)), like=node)
            if new[node].target is aten.reshape.default:
                new[node].meta[TAKEN] = True
        return new[node]

    def _written(self) -> fx.Node:
        """What the part is then."""
        node, like = self._node, self._node.meta["val"]
        if self._returning is aten.copy.default and self._is_all(node.args[1]):
            return node.args[1]  # type: ignore[return-value]
        returned = fake_result(self._returning, node)
        new = self._make(self._returning, node.args, like=node, **node.kwargs)
        if returned.dtype == like.dtype:
            return new
        new.meta["val"] = returned
        return self._make(aten.to.dtype, (new, like.dtype), like=node)  # writing keeps the type of what is written to

    def _is_all(self, source: Any) -> bool:
        """Whether what is copied is nobody else's, and all that is left of the part."""
        if not isinstance(source, fx.Node) or list(source.users) != [self._node] or not allocates(source):
            return False
        one, other = source.meta["val"], self._part.meta["val"]
        return one.dtype == other.dtype and one.device == other.device and one.shape == other.shape

    def _make(self, target: Any, arguments: tuple[Any, ...], *, like: fx.Node, **keywords: Any) -> fx.Node:
        with self._graph.inserting_before(self._node):
            new = self._graph.call_function(target, arguments, keywords)
        new.meta = {**self._node.meta, "val": like.meta["val"]}
        self._order[new] = self._order[self._node]
        return new


def fake_result(returning: Any, node: fx.Node) -> torch.Tensor:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda given: given.meta["val"])
    with node.meta["val"].fake_mode, torch.no_grad():
        result: torch.Tensor = returning(*args, **kwargs)
    return result
