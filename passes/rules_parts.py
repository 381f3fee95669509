"""Transfer rules for sorted rows that are sliced at the sizes of their groups, and put together again: `part_ops`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import fx

from selective_compile.part_ops import group_part, joined_parts
from selective_compile.passes.axes import Axes, Groups, Mixes, Part, Permuted, Sizes
from selective_compile.passes.rules_order import descends, joined, made_from
from selective_compile.passes.rules_pointwise import broadcast

AxesOf = Callable[[Any], Axes]


def part_axes(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    """The rows of one group, or the numbers of their tokens, of what was sorted by what ``sizes`` counts."""
    rows, counts = axes_of(node.args[0]), axes_of(node.args[1])
    (order,) = rows.dims[0] if len(rows.dims[0]) == 1 else (None,)
    if not isinstance(order, Permuted) or descends(order.order):
        raise Mixes("takes a group of tokens out of rows that are not sorted by groups")
    if counts.groups != Groups(order=made_from(order.order.args[0]), unsorted=True):
        raise Mixes("takes a group of tokens by other sizes than those that they were sorted by")
    part = Part(order, node.args[1].meta["val"].shape[0], node.args[2])  # type: ignore[union-attr,arg-type]
    return replace(rows, dims=((part,), *rows.dims[1:]), inputs=rows.inputs | counts.inputs)


def joined_axes(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    """All groups, in their order."""
    parts = [axes_of(part) for part in node.args[0]]  # type: ignore[union-attr]
    if any(part.numbers for part in parts):
        raise Mixes("puts the numbers of tokens together as values")
    others = broadcast([((), *part.dims[1:]) for part in parts])
    inputs = frozenset().union(*(part.inputs for part in parts))
    return Axes(dims=(joined([part.dims[0] for part in parts]), *others[1:]), inputs=inputs)


PARTS: dict[Any, Callable[..., Axes]] = {
    group_part.overloadpacket: part_axes,
    joined_parts.overloadpacket: joined_axes,
}
