"""Part of pass 1: what is done to a looked-up bias number by number, or row by row, is done to what it is looked up in.

Before::  mul(masked_fill(gather(x [.., S, R], -1, index [.., S, S]), far, 0), factor [S, 1])
After::   masked_fill(gather(mul(x, factor), -1, index), far, 0)

Before::  mul(sigmoid(permute(embedding(table [R, H], index [S, S]), [2, 0, 1])), 16)
After::   permute(embedding(mul(sigmoid(table), 16), index), [2, 0, 1])

So that what is added to scores is what was looked up, as where Inkling scales the bias of far queries, or Swin V2
bounds its own.  Each number is computed as it was after it was looked up, and zeros stay zeros.  Declines for a factor
that has a number for each pair, and where what was looked up goes elsewhere too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import statically_known_true

from selective_compile.passes.axes import is_symbolic
from selective_compile.passes.evaluate import leaves, traced_value
from selective_compile.passes.heads import CASTS, MOVES
from selective_compile.passes.nan_guards import is_zero
from selective_compile.passes.rules_pointwise import UNTAGGED
from selective_compile.passes.traced_graph import is_random

aten = torch.ops.aten
PRODUCTS: tuple[OpOverload, ...] = (aten.mul.Tensor, aten.mul.Scalar)
SCALED: tuple[OpOverload, ...] = (aten.neg.default, aten.div.Tensor, aten.div.Scalar)


def look_up_late(module: fx.GraphModule, mode: FakeTensorMode) -> int:
    """Returns how many operators went in front of a lookup."""
    found = 0
    for node in list(module.graph.nodes):
        place = place_of_lookup(node)
        moved = None if place is None else moved_in_front(node, place, mode)
        if moved is not None:
            node.replace_all_uses_with(moved)
            found += 1
    if found:
        module.graph.eliminate_dead_code()
        module.recompile()
    return found


def place_of_lookup(node: fx.Node) -> int | None:
    """Which argument of a product with a row's factor, or of what makes a number of each number, may be looked up."""
    if is_of_each_number(node):
        return next(place for place, given in enumerate(node.args) if isinstance(given, fx.Node))
    if node.target not in PRODUCTS or node.kwargs:
        return None
    for place, other in ((0, node.args[1]), (1, node.args[0])):
        if isinstance(node.args[place], fx.Node) and is_same_for_keys(other):
            return place
    return None


def is_of_each_number(node: fx.Node) -> bool:
    """Whether it makes a float of each number of one tensor, with nothing else that is no constant."""
    tags = getattr(node.target, "tags", ())
    pointwise = torch.Tag.pointwise in tags or getattr(node.target, "overloadpacket", None) in (*UNTAGGED, *CASTS)
    nodes = [given for given in leaves((node.args, node.kwargs)) if isinstance(given, fx.Node)]
    if not pointwise or is_random(node) or len(nodes) != 1 or nodes[0] not in node.args:
        return False
    values = (node.meta.get("val"), nodes[0].meta.get("val"))
    return all(isinstance(value, torch.Tensor) and value.dtype.is_floating_point for value in values)


def is_same_for_keys(other: Any) -> bool:
    value = other.meta.get("val") if isinstance(other, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return False
    last = value.shape[-1] if value.dim() else 1
    return isinstance(last, int) and last == 1


def moved_in_front(node: fx.Node, place: int, mode: FakeTensorMode) -> fx.Node | None:
    """What gives the same as ``node``, with the lookup behind it; None where its argument is no lookup."""
    between: list[tuple[fx.Node, int]] = []
    lookup: Any = node.args[place]
    while len(lookup.users) == 1 and (carried := carried_by(lookup, node)) is not None:
        between.append((lookup, carried))
        lookup = lookup.args[carried]
    if len(lookup.users) != 1 or lookup.kwargs or not is_lookup_for(lookup, node):
        return None
    source: Any = lookup.args[0]
    with node.graph.inserting_before(node):
        done = again(node, place, source, mode)
        if not same_sizes(done, source):
            node.graph.erase_node(done)
            return None
        behind = again(lookup, 0, done, mode)
        for each, carried in reversed(between):
            behind = again(each, carried, behind, mode)
    return behind


def carried_by(between: fx.Node, node: fx.Node) -> int | None:
    """Which argument of what is between a lookup and ``node`` may be in front of both as well as between them."""
    if keeps_zeros(node) and (filled := filled_with_zeros(between)) is not None:
        return filled
    moves = getattr(between.target, "overloadpacket", None) in MOVES and isinstance(between.args[0], fx.Node)
    return 0 if moves and is_of_each_number(node) else None


def keeps_zeros(node: fx.Node) -> bool:
    return node.target in (*PRODUCTS, *SCALED) or is_cast(node)


def is_cast(node: fx.Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in CASTS


def is_lookup_for(lookup: fx.Node, node: fx.Node) -> bool:
    """Whether it looks up a row's own numbers; or any of a table for each pair of tokens, and ``node`` is of each
    number by itself.  A table of all words is read at a few: all of it would be computed."""
    args: Any = lookup.args
    if lookup.target is aten.gather.default:
        rows = args[1] in (-1, args[0].meta["val"].dim() - 1)
        return rows and (is_for_pairs(lookup) or node.target in PRODUCTS or is_cast(node))
    one = lookup.target is aten.index.Tensor and sum(index is not None for index in args[1]) == 1
    return (one or lookup.target is aten.embedding.default) and is_of_each_number(node) and is_for_pairs(lookup)


def is_for_pairs(lookup: fx.Node) -> bool:
    """Whether two of its dimensions are as long as a request."""
    sizes = [str(size) for size in lookup.meta["val"].shape if is_symbolic(size)]
    return len(set(sizes)) < len(sizes)


def filled_with_zeros(node: fx.Node) -> int | None:
    """The argument that has zeros put in some places."""
    args: Any = node.args
    if node.target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor) and is_zero(args[2]):
        return 0
    if node.target in (aten.where.self, aten.where.ScalarOther) and is_zero(args[2]):
        return 1 if isinstance(args[1], fx.Node) else None
    return None


def again(node: fx.Node, place: int, argument: fx.Node, mode: FakeTensorMode) -> fx.Node:
    """The same call with another argument there."""
    args = [argument if at == place else given for at, given in enumerate(node.args)]
    made = node.graph.call_function(node.target, tuple(args), dict(node.kwargs))  # type: ignore[arg-type]
    made.meta.update(node.meta)
    made.meta["val"] = traced_value(made, mode, lambda given: given.meta["val"])
    return made


def same_sizes(one: fx.Node, other: fx.Node) -> bool:
    sizes, others = one.meta["val"].shape, other.meta["val"].shape
    return len(sizes) == len(others) and all(statically_known_true(a == b) for a, b in zip(sizes, others, strict=True))
