"""Part of pass 1: what is done to a looked-up bias row by row is done to what it is looked up in.

Before::  mul(masked_fill(gather(x [.., S, R], -1, index [.., S, S]), far, 0), factor [S, 1])
After::   masked_fill(gather(mul(x, factor), -1, index), far, 0)

So that what is added to scores is what was looked up, as where Inkling scales the bias of far queries.  Each number is
multiplied, or cast, as it was before it was looked up, and zeros stay zeros.  Declines for a factor that has a number
for each pair, and where what was looked up goes elsewhere too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import statically_known_true

from selective_compile.passes.evaluate import traced_value
from selective_compile.passes.nan_guards import is_zero

aten = torch.ops.aten
CASTS: tuple[OpOverload, ...] = (aten.to.dtype, aten._to_copy.default)
PRODUCTS: tuple[OpOverload, ...] = (aten.mul.Tensor, aten.mul.Scalar)


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
    """Which argument of a cast, or of a product with a number or a row's factor, may be what was looked up."""
    if node.target in CASTS and isinstance(node.args[0], fx.Node):
        return 0
    if node.target not in PRODUCTS or node.kwargs:
        return None
    for place, other in ((0, node.args[1]), (1, node.args[0])):
        if isinstance(node.args[place], fx.Node) and (isinstance(other, (int, float)) or is_same_for_keys(other)):
            return place
    return None


def is_same_for_keys(other: Any) -> bool:
    value = other.meta.get("val") if isinstance(other, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return False
    last = value.shape[-1] if value.dim() else 1
    return isinstance(last, int) and last == 1


def moved_in_front(node: fx.Node, place: int, mode: FakeTensorMode) -> fx.Node | None:
    """What gives the same as ``node``, with the lookup behind it; None where its argument is no lookup of a row's own
    numbers."""
    fills: list[fx.Node] = []
    lookup: Any = node.args[place]
    while len(lookup.users) == 1 and (filled := filled_with_zeros(lookup)) is not None:
        fills.append(lookup)
        lookup = lookup.args[filled]
    if lookup.target is not aten.gather.default or len(lookup.users) != 1 or lookup.kwargs:
        return None
    source, dim, index = lookup.args
    if dim not in (-1, source.meta["val"].dim() - 1):
        return None
    with node.graph.inserting_before(node):
        done = again(node, place, source, mode)
        if not same_sizes(done, source):
            node.graph.erase_node(done)
            return None
        behind = again(lookup, 0, done, mode)
        for fill in reversed(fills):
            filled = filled_with_zeros(fill)
            assert filled is not None
            behind = again(fill, filled, behind, mode)
    return behind


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
