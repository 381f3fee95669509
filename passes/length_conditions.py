"""Before pass 2, for the engine: what tells whether a request is longer than some number bounds requests.

Before::  where(gt(add(max(positions), 1), 4096), long, short)
After::   short, and requests have at most 4096 tokens

As where the model's own code asks for the number of tokens, which Dynamo takes down (`lengths`): the graph is of the
side that short requests are on.  Tried on lengths, not proved: on all up to `DENSE`, and around every constant and
power of two beyond.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from selective_compile.passes.axes import is_symbolic
from selective_compile.passes.evaluate import ancestors, constants_in, evaluate
from selective_compile.passes.lengths import CAPTURE_TOKENS, SHORTEST, lengths_around
from selective_compile.passes.traced_graph import TracedGraph, is_lost, is_mutable

aten = torch.ops.aten
DENSE, LARGEST = 512, 2**20


def settle_lengths(traced: TracedGraph) -> int:
    """Replaces conditions that hold, or do not, for all requests up to some length; returns how many."""
    settled = 0
    for node in list(traced.tensors()):
        if not is_condition(traced, node):
            continue
        known = value_up_to(traced, node)
        if known is None:
            continue
        holds, longest = known
        if longest < LARGEST:
            traced.bound(longest)
        settle(traced, node, holds)
        settled += 1
    if settled:
        traced.graph.eliminate_dead_code()
        traced.module.recompile()
    return settled


def is_condition(traced: TracedGraph, node: fx.Node) -> bool:
    """Whether it is one boolean that depends on the number of tokens, and on nothing else that may change."""
    value = node.meta["val"]
    if node.op != "call_function" or value.dtype != torch.bool or not all(size == 1 for size in value.shape):
        return False
    needed, counted = ancestors(node), False
    for current in needed:
        size: Any = current.meta.get("val")
        if is_symbolic(size):
            if size.node.expr.free_symbols - {traced.sizes.token}:
                return False  # another number, as of values that are not 0
            counted = True
        elif current.op == "placeholder" or is_lost(traced, current) or is_mutable(current):
            return False
        elif torch.Tag.nondeterministic_seeded in getattr(current.target, "tags", ()):
            return False
    return counted


def value_up_to(traced: TracedGraph, node: fx.Node) -> tuple[bool, int] | None:
    """What the condition is for short requests, and up to which length; None if other lengths are in between."""

    def at(tokens: int) -> bool:
        return bool(evaluate(traced, node, batch=1, tokens=tokens, given={}))

    first, last = at(SHORTEST), SHORTEST
    for length in lengths_around(constants_in(node), SHORTEST, dense=DENSE, largest=LARGEST):
        if at(length) != first:
            return (first, last) if last > CAPTURE_TOKENS else None
        last = length
    return first, LARGEST


def settle(traced: TracedGraph, node: fx.Node, holds: bool) -> None:
    """The condition is ``holds``: who chooses by it alone has chosen."""
    for user in list(node.users):
        if user.target is aten.where.self and user.args[0] is node:
            chosen: Any = user.args[1 if holds else 2]
            if alike(chosen, user):
                user.replace_all_uses_with(chosen)
                traced.graph.erase_node(user)
    if node.users:
        value = node.meta["val"]
        with traced.graph.inserting_before(node):
            known = traced.graph.call_function(
                aten.full.default, (list(value.shape), holds), {"dtype": torch.bool, "device": value.device}
            )
        known.meta = dict(node.meta)
        node.replace_all_uses_with(known)


def alike(chosen: fx.Node, result: fx.Node) -> bool:
    one, other = chosen.meta["val"], result.meta["val"]
    return bool(one.shape == other.shape and one.dtype == other.dtype and one.device == other.device)
