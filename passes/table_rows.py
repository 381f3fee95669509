"""Tables read by slices of as many rows as a request has tokens: learned positions, triangles kept in a buffer.

``table[2 : S + 2]`` gives the token at position p the row ``p + 2``: a function of its position.  ``table[N - S :]``
gives it the row ``N - S + p``, which depends on the length of the request as well; only a mask may hold such rows, and
only if it comes out the same for every length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from selective_compile.passes.axes import Axes, Axis, Sizes, is_symbolic
from selective_compile.passes.rules_lookup import indices_of
from selective_compile.passes.rules_reduce import dim_along

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class TableRows:
    """The rows ``start + position`` of dimension ``dim`` or, ``from_end``, ``start + position - length``.

    There are rows for requests of up to ``limit`` tokens.
    """

    dim: int
    start: int
    from_end: bool
    limit: int

    def at(self, table: torch.Tensor, positions: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        """The rows of tokens at ``positions`` ``[L]`` of a request of ``length`` ``[]`` tokens."""
        first = self.start - length if self.from_end else self.start
        return table.index_select(self.dim, positions + first)


def table_rows(node: fx.Node, axes: dict[fx.Node, Axes], sizes: Sizes) -> TableRows | None:
    """What ``node`` reads, if it is a slice of one row for each token out of a table that depends on no input."""
    source = node.args[0] if node.target is aten.slice.Tensor else None
    return rows_of(node, axes[source], sizes) if isinstance(source, fx.Node) and source in axes else None


def rows_at_positions(node: fx.Node, axes: dict[fx.Node, Axes]) -> TableRows | None:
    """What ``node`` reads, if it is ``table[positions]``, of such a table, at each token's own position from 0 on."""
    indices, table = indices_of(node), node.args[0] if node.args else None
    if indices is None or not isinstance(table, fx.Node) or table not in axes:
        return None
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    dim, index = given[0]
    own = index in axes and axes[index].numbers == (Axis.TOKEN,) and axes[index].dims == ((Axis.TOKEN,),)
    rows = table.meta["val"].shape[dim]
    if len(given) > 1 or not own or not isinstance(rows, int) or not is_of_positions(axes[table], dim):
        return None
    return TableRows(dim=dim, start=0, from_end=False, limit=rows)


def is_of_positions(table: Axes, dim: int) -> bool:
    """Whether it depends on no input, and its rows along ``dim`` are no tokens yet."""
    return not table.inputs and not table.numbers and not table.labelled(dim) and not table.holding(Axis.BATCH)


def rows_of(node: fx.Node, axes: Axes, sizes: Sizes) -> TableRows | None:
    """As `table_rows`, of a slice of a table with ``axes``."""
    dim = dim_along(node, 1, 0)
    start, _, step = slice_bounds(node)
    rows, taken = node.args[0].meta["val"].shape[dim], node.meta["val"].shape[dim]  # type: ignore[union-attr]
    if not is_of_positions(axes, dim) or step != 1 or not isinstance(rows, int) or not is_symbolic(taken):
        return None
    if sizes.monomial(taken) != (1, 0, 1):
        return None
    if start is None or isinstance(start, int) and start >= 0:
        return TableRows(dim=dim, start=start or 0, from_end=False, limit=rows - (start or 0))
    end = start_and_length(start, sizes)
    if end is not None and -rows < end <= 0:
        end += rows  # such a start is negative for every length, and counts from the last row
    if end is None or not 0 < end <= rows:
        return None
    return TableRows(dim=dim, start=end, from_end=True, limit=end)


def start_and_length(start: Any, sizes: Sizes) -> int | None:
    """The constant that a symbolic start and the number of tokens add up to; None if they do not."""
    size: Any = start.meta.get("val") if isinstance(start, fx.Node) else None
    if not is_symbolic(size):
        return None
    total = sympy.expand(sizes.expression(size) + sizes.token)
    return int(total) if total.is_Integer else None


def slice_bounds(node: fx.Node) -> list[Any]:
    """Start, end and step as given, None, None and 1 where they are not."""
    given: list[Any] = [*node.args[2:]]
    return given + [None, None, 1][len(given) :]
