"""Part of pass 1: operators that change a tensor in place become ones that return it changed.

Before::  product = grouped_mm(x, w); add_ = aten.add_(product, bias); relu(product)
After::   product = grouped_mm(x, w); add = aten.add(product, bias);   relu(add)

Before::  keys = aten.new_empty(x, sizes); copy_ = aten.copy_(aten.slice(keys, 3, 0, 4), x)
After::   keys = aten.new_empty(x, sizes); written = aten.slice_scatter(keys, aten.copy(..., x), 3, 0, 4)

Declines, leaving the node for pass 2 to refuse, unless the changed tensor was made in the graph by an operator that
allocates it, and nothing that shares its memory is read afterwards but through its name.
"""

from __future__ import annotations

import operator
import sys
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from selective_compile.passes.traced_graph import is_mutable

aten = torch.ops.aten
# They may return their input itself, which their schemas do not say.
UNDECLARED_ALIASES = (aten.dropout, aten.feature_dropout, aten.alpha_dropout, aten.type_as, aten.cat)
# `a &= b` and its like, which are not spelt as other operators that write are.
INFIX = {f"aten::__i{name}__": f"aten::__{name}___" for name in ("and", "or", "xor", "lshift", "rshift")}
# The operator that puts a part back into what a view took it from; its other arguments are the view's.
SCATTERS: dict[Any, Any] = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
}


def make_functional(module: fx.GraphModule) -> int:
    """Rewrites what it can; returns how many."""
    rewritten = 0
    order = {node: place for place, node in enumerate(module.graph.nodes)}
    for node in list(module.graph.nodes):
        if node.op != "call_function" or not is_mutable(node):
            continue
        returning = functional(node)
        views = views_to_base(node.args[0]) if node.args else []
        # A value with numbers was made outside of the trace, as by a graph that `vmap` went through.
        traced = isinstance(node.meta.get("val"), FakeTensor)
        if returning is None or not traced or not views or not owned(views, node, order):
            continue
        replace(module.graph, node, views, returning, order)
        rewritten += 1
    module.graph.eliminate_dead_code()
    module.recompile()
    return rewritten


def views_to_base(changed: Any) -> list[fx.Node]:
    """What is written to, what it is a view of, and so on to the whole tensor."""
    chain = []
    while isinstance(changed, fx.Node):
        chain.append(changed)
        changed = changed.args[0] if may_alias(changed) and changed.args else None
    return chain


def functional(node: fx.Node) -> Any:
    """The operator that returns what ``node`` writes into its first argument, and into nothing else; or None."""
    schema = node.target._schema  # type: ignore[union-attr]
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    name = INFIX.get(schema.name, schema.name).split("::")[1]
    if written != [schema.arguments[0].name] or not schema.name.startswith("aten::") or not name.endswith("_"):
        return None
    packet = getattr(aten, name.removesuffix("_"), None)
    return getattr(packet, schema.overload_name or "default", None)


def owned(views: list[fx.Node], writer: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether the whole tensor was allocated in the graph, and what shares its memory is not read after writing.

    A view that no scatter puts back, as a permutation, must be the only one that is read after writing.
    """
    if not allocates(views[-1]):
        return False
    behind = views[put_back(views) + 1 :]
    if any(order[user] > order[writer] for view in behind for user in view.users):
        return False
    aliases = [user for view in views for user in view.users if user not in (*views, writer) and may_alias(user)]
    while aliases:
        alias = aliases.pop()
        if order[alias] >= order[writer]:
            continue  # it is, or will be made from, what is written
        if any(order[user] > order[writer] for user in alias.users):
            return False
        aliases += [user for user in alias.users if may_alias(user)]
    return True


def put_back(views: list[fx.Node]) -> int:
    """How many of the views a scatter each puts back, from what is written on."""
    return next((i for i, view in enumerate(views) if view.target not in SCATTERS), len(views) - 1)


def allocates(node: fx.Node) -> bool:
    return node.op == "call_function" and not may_alias(node) and not is_mutable(node)


def may_alias(node: fx.Node) -> bool:
    """Whether a value of ``node`` may share memory with one of its arguments; what is no operator may."""
    if node.target is operator.getitem:  # one of several results
        return may_alias(node.args[0])  # type: ignore[arg-type]
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.op != "output"
    if node.target.overloadpacket in UNDECLARED_ALIASES:
        return True
    source: Any = node.args[0] if node.args else None
    if node.target.overloadpacket is aten.to and source.meta["val"].dtype != node.meta["val"].dtype:
        return False
    return any(returned.alias_info is not None for returned in node.target._schema.returns)


def replace(graph: fx.Graph, node: fx.Node, views: list[fx.Node], returning: Any, order: dict[fx.Node, int]) -> None:
    """The new part, and the new whole around it, take the places of the old ones behind ``node``."""

    def make(target: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], like: fx.Node) -> fx.Node:
        with graph.inserting_before(node):
            new = graph.call_function(target, arguments, keywords)
        new.meta = {**node.meta, "val": like.meta["val"]}
        order[new] = order[node]
        return new

    returned = fake_result(returning, node)
    new = make(returning, node.args, dict(node.kwargs), node)
    promoted = returned.dtype != node.meta["val"].dtype  # writing keeps the type of what is written to
    if promoted:
        new.meta["val"] = returned
        new = make(aten.to.dtype, (new, node.meta["val"].dtype), {}, node)
    node.replace_all_uses_with(new)
    last = views[put_back(views)]
    for view in views[: put_back(views) + 1]:
        for user in [user for user in view.users if order[user] > order[node]]:
            user.replace_input_with(view, new)
        if view is not last:
            whole = view.args[0]
            assert isinstance(whole, fx.Node)
            if takes_all(view):  # as of tokens in `x[:, :, :4] = 0`
                continue
            new = make(SCATTERS[view.target], (whole, new, *view.args[1:]), dict(view.kwargs), whole)
    graph.erase_node(node)


def takes_all(view: fx.Node) -> bool:
    """Whether a slice is the whole of what it is taken from."""
    if view.target is not aten.slice.Tensor or view.kwargs:
        return False
    given: list[Any] = [*view.args, *(0, None, None, 1)[len(view.args) - 1 :]]
    start, end, step = given[2:]
    return start in (None, 0) and step == 1 and (end is None or (isinstance(end, int) and end == sys.maxsize))


def fake_result(returning: Any, node: fx.Node) -> torch.Tensor:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda given: given.meta["val"])
    with node.meta["val"].fake_mode, torch.no_grad():
        result: torch.Tensor = returning(*args, **kwargs)
    return result
