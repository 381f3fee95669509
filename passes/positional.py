"""Values that are made of sizes alone: what they are at a position is found by evaluating them.

A model numbers its tokens by ``arange(S)``, by a running sum of ones, by tests on differences of positions.  Such a
value depends on no token input and no weight.  If its entries stay the same however long the request is, the entry at
position p is a function of p alone, which is what marking claims of a token-wise value.
"""

from __future__ import annotations

import itertools

import torch
from torch import fx

from selective_compile.passes.axes import Axes, Axis, Dim, Mixes
from selective_compile.passes.evaluate import ancestors, constants_in, evaluate
from selective_compile.passes.traced_graph import TracedGraph, is_mutable

aten = torch.ops.aten
LENGTHS = (2, 3, 5, 17, 40, 130)
LONGEST = 2**20
LINE_LENGTH = 300


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
    except IndexError:  # a table that is too short for some length
        return None
    if all(prefix_of(short, long, dims) for short, long in itertools.pairwise(values)):
        return Axes(dims=dims, probed=True)
    return None


def made_of_sizes(traced: TracedGraph, node: fx.Node) -> bool:
    refused = {refusal.node for refusal in traced.refusals}
    sources = {given.node for given in traced.inputs if given.place != "size"}
    found = ancestors(node)
    return not any(current in sources or current.name in refused or is_mutable(current) for current in found) and all(
        torch.Tag.nondeterministic_seeded not in getattr(current.target, "tags", ()) for current in found
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
    """The entries of a positional root at ``positions``, along its one token dimension."""
    (dim,) = traced.axes[node].holding(Axis.TOKEN)
    longest = int(positions.max()) + 1
    return evaluate(traced, node, batch=1, tokens=longest, given={}).index_select(dim, positions)


def straight_line(traced: TracedGraph, node: fx.Node) -> tuple[int, int] | None:
    """(first, step) if a positional root is ``first + step * position``, the same for all requests; else None."""
    axes = traced.axes[node]
    if axes.is_pair or node.meta["val"].dtype.is_floating_point or node.meta["val"].dtype == torch.bool:
        return None
    length = max([LINE_LENGTH, *(2 * c for c in constants_in(node) if c <= LONGEST)])
    value = evaluate(traced, node, batch=1, tokens=length, given={}).movedim(axes.holding(Axis.TOKEN)[0], -1)
    rows = value.reshape(-1, length)
    first, step = int(rows[0, 0]), int(rows[0, 1] - rows[0, 0])
    line = first + step * torch.arange(length)
    return (first, step) if torch.equal(rows, line.to(rows.dtype).expand_as(rows)) else None
