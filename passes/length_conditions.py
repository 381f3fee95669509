"""Before pass 2, for the engine: what tells whether a request is longer than some number is settled.

Before::  where(gt(add(max(positions), 1), 4096), long, short)
After::   short, and requests have at most 4096 tokens; or both, and each token's own (`long_form`)

As where the model's own code asks for the number of tokens, which Dynamo takes down (`lengths`): the graph is of the
side that short requests are on.  Tried on lengths, not proved: on all up to `DENSE`, and around every constant and
power of two beyond; where it turns between two of these is looked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import sympy
import torch
from torch import fx

from selective_compile.passes.axes import is_symbolic, size_expression
from selective_compile.passes.evaluate import ancestors, constants_in, evaluate
from selective_compile.passes.lengths import ALL_LENGTHS, CAPTURE_TOKENS, SHORTEST, Answer, answer, lengths_around
from selective_compile.passes.long_form import chosen_by, has_forms, keep_both, known_as
from selective_compile.passes.traced_graph import TracedGraph, is_lost, is_mutable, is_random

DENSE, LARGEST = 512, 2**20
NUMBERS = 2**24  # in a tensor that is made to try a length: a mask of all pairs of 4,096 tokens


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A boolean, and which requests it holds for."""

    node: fx.Node
    answer: Answer


def settle_lengths(traced: TracedGraph, *, long_form: bool) -> int:
    """Replaces conditions that hold, or do not, for all requests up to some length; returns how many.

    ``long_form``: longer requests are computed, too, where the model computes all that are longer in one other way.
    """
    found = deciding(traced)
    beyond = min((each.answer.longest for each in found), default=ALL_LENGTHS)
    turning = [each for each in found if each.answer.longest == beyond < ALL_LENGTHS]
    if long_form and all(each.answer.once for each in turning) and has_forms(traced, [each.node for each in turning]):
        keep_both(traced, {each.node: each.answer.holds for each in turning}, beyond)
    else:
        turning = []
    for each in found:
        if each in turning:
            continue
        if each.answer.longest < ALL_LENGTHS:
            traced.bound(each.answer.longest)
        settle(each.node, each.answer.holds)
    if found:
        traced.graph.eliminate_dead_code()
        traced.module.recompile()
    return len(found)


def deciding(traced: TracedGraph) -> list[Condition]:
    """Those that are known, and decide something by themselves, not by way of others alone."""
    found = [known_of(traced, node) for node in list(traced.tensors()) if is_condition(traced, node)]
    known = [each for each in found if each is not None]
    nodes = {each.node for each in known}
    return [each for each in known if not nodes.issuperset(each.node.users)]


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
        elif current.op == "placeholder" or is_lost(traced, current) or is_mutable(current) or is_random(current):
            return False
    return counted


def known_of(traced: TracedGraph, node: fx.Node) -> Condition | None:
    """None if neither of its values is that of all lengths from the shortest to one beyond that of the capture."""

    def at(tokens: int) -> bool:
        return bool(evaluate(traced, node, batch=1, tokens=tokens, given={}))

    largest = largest_tried(traced, node)
    if largest <= CAPTURE_TOKENS:
        return None
    found = answer(at, lengths_around(constants_in(node), SHORTEST, dense=min(DENSE, largest), largest=largest))
    if largest < LARGEST:
        found = replace(found, longest=min(found.longest, largest))
    return None if found.longest <= CAPTURE_TOKENS else Condition(node=node, answer=found)


def largest_tried(traced: TracedGraph, node: fx.Node) -> int:
    """The largest power of two, up to `LARGEST`, of which what the condition is made of has at most `NUMBERS`."""
    values: list[Any] = [current.meta.get("val") for current in ancestors(node)]
    made = [prod(map(size_expression, value.shape)) for value in values if isinstance(value, torch.Tensor)]
    counts = {sympy.sympify(count) for count in made}
    alone = {} if traced.sizes.batch is None else {traced.sizes.batch: 1}
    largest = LARGEST
    while largest > 1 and any(count.subs({traced.sizes.token: largest, **alone}) > NUMBERS for count in counts):
        largest //= 2
    return largest


def settle(node: fx.Node, holds: bool) -> None:
    """The condition is ``holds``: who chooses by it alone has chosen."""
    for user in list(node.users):
        chosen = chosen_by(user, node, holds)
        if chosen is not None:
            user.replace_all_uses_with(chosen)
            user.graph.erase_node(user)
    if node.users:
        with node.graph.inserting_before(node):
            node.replace_all_uses_with(known_as(node, holds))
