"""Values that are made of sizes alone: what they are at a position is found by evaluating them.

A model numbers its tokens by ``arange(S)``, by a running sum of ones, by tests on differences of positions.  Such a
value depends on no token input and no weight.  If its entries stay the same however long the request is, the entry at
position p is a function of p alone, which is what marking claims of a token-wise value.  It is looked at up to a length
that few requests reach, and longer ones are not served.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import fx

from selective_compile.passes.axes import Axes, Axis, Dim, Mixes
from selective_compile.passes.evaluate import ancestors, concrete, constants_in, evaluate
from selective_compile.passes.traced_graph import TracedGraph, is_mutable, is_random

aten = torch.ops.aten
LENGTHS = (2, 3, 5, 17, 40, 130)
LONGEST = 2**20
MOST_NUMBERS = 2**24  # of a value that is looked at whole


def positional(traced: TracedGraph, node: fx.Node) -> Axes | None:
    """Axes of a value made of sizes alone whose entries do not depend on them; None if it is not such a value."""
    if not isinstance(node.meta.get("val"), torch.Tensor) or not made_of_sizes(traced, node):
        return None
    try:
        dims = tuple(traced.sizes.dim(size) for size in node.meta["val"].shape)
    except Mixes:
        return None
    axes = Axes(dims=dims)
    if any(len(dim) > 1 for dim in dims) or axes.is_pair:
        return None
    lengths = sorted({*LENGTHS, *(c + d for c in constants_in(node) for d in (-1, 0, 1, 2) if c + d > 1)})
    if lengths[-1] > LONGEST:
        return None
    try:
        values = [
            evaluate(traced, node, batch=batch, tokens=length, given={}) for length in lengths for batch in (2, 3)
        ]
    except (IndexError, RuntimeError):  # a table, or a type of numbers, that is too short for some length
        return None
    length, far = farthest(traced, node)
    if length < lengths[-1] or not all(prefix_of(a, b, dims) for a, b in itertools.pairwise([*values, far])):
        return None
    traced.bound(length)
    return Axes(dims=dims, probed=True)


def farthest(traced: TracedGraph, node: fx.Node) -> tuple[int, torch.Tensor]:
    """The longest requests that a value made of sizes alone can be looked at for, and the value for three of them.

    A threshold that a function of positions crosses need not be a number in the graph: it shows here.
    """
    length = LONGEST
    while True:
        if numbers_in(traced, node, length) <= MOST_NUMBERS:
            try:
                return length, evaluate(traced, node, batch=3, tokens=length, given={})
            except (IndexError, RuntimeError):  # a table has no rows, or a type no numbers, for so many
                pass
        length //= 2


def numbers_in(traced: TracedGraph, node: fx.Node, tokens: int) -> int:
    """Of the largest tensor that a value for so many tokens is computed by way of."""
    symbols = {traced.sizes.token: tokens} | ({traced.sizes.batch: 3} if traced.sizes.batch is not None else {})
    tensors = (current.meta.get("val") for current in ancestors(node))
    shapes = [value.shape for value in tensors if isinstance(value, torch.Tensor)]
    return max(math.prod(concrete(size, symbols) for size in shape) for shape in shapes)


def made_of_sizes(traced: TracedGraph, node: fx.Node) -> bool:
    refused = {refusal.node for refusal in traced.refusals}
    sources = {given.node for given in traced.inputs if given.place != "size"}
    if traced.long_numbers is not None:  # whose marks no size tells
        sources.add(traced.long_numbers)
    return not any(
        current in sources or current.name in refused or is_mutable(current) or is_random(current)
        for current in ancestors(node)
    )


def prefix_of(short: torch.Tensor, long: torch.Tensor, dims: tuple[Dim, ...]) -> bool:
    """Whether ``short`` is the beginning of ``long`` along tokens, and both are the same for every request."""
    for dim, (factors, size) in enumerate(zip(dims, short.shape, strict=True)):
        if factors == (Axis.TOKEN,):
            long = long.narrow(dim, 0, size)
        elif factors == (Axis.BATCH,):
            first = long.narrow(dim, 0, 1)
            if not torch.equal(long, first.expand_as(long)):
                return False
            long = first.repeat_interleave(size, dim)
    return torch.equal(short, long)


def is_positional_root(axes: Axes, node: fx.Node) -> bool:
    """Whether a value's entries are known by position without looking at what it is computed from."""
    numbers = node.target in (aten.arange.default, aten.arange.start) and axes.numbers == (Axis.TOKEN,)
    return numbers or (axes.probed and axes.holding(Axis.TOKEN) != ())


def at_positions(traced: TracedGraph, node: fx.Node, positions: torch.Tensor) -> torch.Tensor:
    """The entries of a positional root at ``positions`` ``[G, L]``: ``[G, ...]``, with L in its one token dimension."""
    if not traced.axes[node].probed:  # it counts from 0, and far positions, as a number that hides is one, take memory
        return positions.to(node.meta["val"].dtype)
    (dim,) = traced.axes[node].holding(Axis.TOKEN)
    longest = int(positions.max()) + 1
    value = evaluate(traced, node, batch=1, tokens=longest, given={})
    return value.index_select(dim, positions.reshape(-1)).unflatten(dim, positions.shape).movedim(dim, 0)


def straight_line(traced: TracedGraph, node: fx.Node) -> tuple[int, int] | None:
    """(first, step) if a positional root is ``first + step * position``, the same for all requests; else None.

    As floats too, in which far positions may be rounded: cast to their type, a line is rounded alike.
    """
    axes = traced.axes[node]
    if axes.is_pair or node.meta["val"].dtype == torch.bool:
        return None
    length, value = farthest(traced, node)
    value = value.movedim(axes.holding(Axis.TOKEN)[0], -1)
    rows = value.reshape(-1, length)
    if not bool(rows[0, :2].isfinite().all()):
        return None
    first, step = int(rows[0, 0]), int(rows[0, 1] - rows[0, 0])
    line = first + step * torch.arange(length, device="cpu")
    if not torch.equal(rows, line.to(rows.dtype).expand_as(rows)):
        return None
    if axes.probed:  # not by a rule
        traced.bound(length)
    return first, step
