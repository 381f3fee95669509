"""Before pass 2, for the engine: both of what a model computes for short and for long requests, each token its own.

Before::  mul(positions [1, S, 1], where(longer, long [D], short [D]))
After::   where(mark [S, 1], mul(positions, long), mul(positions, short)), for mark = ge(arange(S), LONG)

What depends on the condition is there twice up to the first values that have tokens; of these, each token has the one
of its own request.  In the graph over [B, S] nothing is marked, so that all proofs are of short requests; in the flat
one the numbers of tokens whose request is long are greater by `LONG`, which nothing else sees (`flatten`).  Long
requests read the same operators on the same axes, with other constants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher

from selective_compile.passes.axes import is_symbolic, size_expression
from selective_compile.passes.traced_graph import TracedGraph, is_mutable, is_random
from selective_compile.step import LONG

aten = torch.ops.aten


def has_forms(traced: TracedGraph, conditions: Sequence[fx.Node]) -> bool:
    """Whether all that depends on these comes to values of tokens, by operators that may be there twice."""
    twofold = set(conditions)
    for node in traced.graph.nodes:
        if node in twofold or twofold.isdisjoint(node.all_input_nodes):
            continue
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor) or is_mutable(node) or is_random(node):
            return False
        if has_tokens(traced, value):
            if token_dim(traced, value) is None:
                return False
        elif any(map(is_symbolic, value.shape)):
            return False
        else:
            twofold.add(node)
    return bool(conditions)


def has_tokens(traced: TracedGraph, value: torch.Tensor) -> bool:
    return any(traced.sizes.token in size_expression(size).free_symbols for size in value.shape)


def token_dim(traced: TracedGraph, value: torch.Tensor) -> int | None:
    """The one dimension that has a place for each token of a request; None if it is not so."""
    sizes = [size_expression(size) for size in value.shape]
    holding = [dim for dim, size in enumerate(sizes) if traced.sizes.token in size.free_symbols]
    return holding[0] if len(holding) == 1 and sizes[holding[0]] == traced.sizes.token else None


def keep_both(traced: TracedGraph, conditions: Mapping[fx.Node, bool], beyond: int) -> None:
    """``conditions``: with what they are for requests of at most ``beyond`` tokens; all `has_forms`."""
    traced.long_beyond = beyond
    forms: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}  # of short requests, and of long ones
    mark = marked(traced)
    for node in list(traced.graph.nodes):
        if node in conditions:
            with traced.graph.inserting_before(node):
                forms[node] = known_as(node, conditions[node]), known_as(node, not conditions[node])
        elif not forms.keys().isdisjoint(node.all_input_nodes):
            chosen = by_condition(node, conditions, forms)
            with traced.graph.inserting_before(node):
                short, long = chosen or (copied(node, {n: pair[form] for n, pair in forms.items()}) for form in (0, 1))
                dim = token_dim(traced, node.meta["val"])
                if dim is None:
                    forms[node] = short, long
                else:
                    each = along(mark, dim, node.meta["val"].dim())
                    node.replace_all_uses_with(call(aten.where.self, each, long, short, like=node))


def by_condition(
    node: fx.Node, conditions: Mapping[fx.Node, bool], forms: Mapping[fx.Node, tuple[fx.Node, fx.Node]]
) -> tuple[fx.Node, fx.Node] | None:
    """Its two forms where it chooses by one of these, and by nothing that has two forms itself."""
    condition: Any = node.args[0] if node.args else None
    if condition not in conditions or not forms.keys().isdisjoint(node.all_input_nodes[1:]):
        return None
    holds = conditions[condition]
    short, long = chosen_by(node, condition, holds), chosen_by(node, condition, not holds)
    return None if short is None or long is None else (short, long)


def marked(traced: TracedGraph) -> fx.Node:
    """[S] bool: which tokens are of long requests."""
    ids = traced.tokens()[0].node
    last = [node for node in traced.graph.nodes if node.op == "placeholder"][-1]
    with traced.graph.inserting_after(last):
        size = call(aten.sym_size.int, ids, 1, like=ids)
    with traced.graph.inserting_after(size):
        numbers = call(aten.arange.default, size, like=ids, device=ids.meta["val"].device)
    with traced.graph.inserting_after(numbers):
        traced.long_numbers = numbers
        return call(aten.ge.Scalar, numbers, LONG, like=ids)


def along(mark: fx.Node, dim: int, dims: int) -> fx.Node:
    """The mark for a value of ``dims`` dimensions with tokens in the one named."""
    for _ in range(dims - 1 - dim):
        mark = call(aten.unsqueeze.default, mark, -1, like=mark)
    return mark


def chosen_by(user: fx.Node, condition: fx.Node, holds: bool) -> fx.Node | None:
    """What ``user`` is if the condition is ``holds``; None if that is no other node."""
    if user.target is not aten.where.self or user.args[0] is not condition:
        return None
    chosen: Any = user.args[1 if holds else 2]
    one, other = chosen.meta["val"], user.meta["val"]
    same = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    return chosen if same else None


def known_as(node: fx.Node, holds: bool) -> fx.Node:
    value = node.meta["val"]
    return call(aten.full.default, list(value.shape), holds, like=node, dtype=torch.bool, device=value.device)


def copied(node: fx.Node, instead: Mapping[fx.Node, fx.Node]) -> fx.Node:
    return node.graph.node_copy(node, lambda given: instead.get(given, given))


def call(target: Any, *args: Any, like: fx.Node, **kwargs: Any) -> fx.Node:
    """A new node, from the place in the user's code that ``like`` is from."""
    node = like.graph.call_function(target, args, kwargs)
    values = fx.node.map_arg((args, kwargs), lambda given: given.meta["val"])
    node.meta = dict(like.meta)
    # Without the dispatcher torch 2.11 asks for numbers where it computes a product of symbolic sizes.
    with enable_python_dispatcher(), like.meta["val"].fake_mode:
        node.meta["val"] = target(*values[0], **values[1])
    return node
