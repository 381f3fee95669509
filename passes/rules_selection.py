"""Transfer rules for a selection among keys: the best of each query, and the marks that say which they are.

Which keys a query gets depends on all of the request's keys, so what holds their numbers is opaque to every other rule,
and both operators are sequence nodes: they must be read as a whole (`selections`), or are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import Min

from selective_compile.passes.axes import Axes, Axis, Mixes, Selected, Sizes, size_expression

aten = torch.ops.aten
AxesOf = Callable[[Any], Axes]


def select_keys(node: fx.Node, axes: Axes, dim: int, sizes: Sizes) -> tuple[str, Axes]:
    """``topk`` over the key axis: values and numbers, ``[..., queries, selected]``."""
    if axes.opaque or axes.dims[dim] != (Axis.TOKEN,):
        raise Mixes("selects among keys that other values were put behind, or by the numbers of others")
    selected = Selected(node, most_selected(node.args[1], sizes))
    dims = (*axes.dims[:dim], (selected,), *axes.dims[dim + 1 :])
    return "selection over the key axis", Axes(dims=dims, inputs=axes.inputs)


def most_selected(size: Any, sizes: Sizes) -> int:
    """``k`` of a size that is the smaller of ``k`` and the number of tokens; `Mixes` for any other size."""
    expression = size_expression(size.meta["val"] if isinstance(size, fx.Node) else size)
    if expression == 1:
        return 1
    if expression.func in (Min, sympy.Min) and len(expression.args) == 2 and sizes.token in expression.args:
        (count,) = set(expression.args) - {sizes.token}
        if count.is_Integer and count > 0:
            return int(count)
    raise Mixes(f"selects {expression} keys, which is not the smaller of a constant and the number of tokens")


def marks_keys(node: fx.Node, axes_of: AxesOf) -> bool:
    """Whether a ``scatter`` writes at the numbers of selected keys."""
    index = axes_of(node.args[2])
    return any(isinstance(factor, Selected) for dim in index.dims for factor in dim)


def mark_keys(node: fx.Node, axes_of: AxesOf) -> tuple[str, Axes]:
    """One number written over a (query, key) tensor at the keys that were selected."""
    base, index = axes_of(node.args[0]), axes_of(node.args[2])
    dim: int = node.args[1] % len(base.dims)  # type: ignore[operator,assignment]
    if node.target is not aten.scatter.value or node.kwargs:
        raise Mixes("writes several values at the numbers of selected keys")
    whole = base.is_pair and dim == base.key_dims[-1] and base.dims[dim] == (Axis.TOKEN,)
    last = index.dims[dim] if len(index.dims) == len(base.dims) else ()
    if not whole or len(last) != 1 or not isinstance(last[0], Selected):
        raise Mixes("writes at the numbers of selected keys along a dimension that does not enumerate keys")
    if base.opaque or [*base.dims[:dim], *base.dims[dim + 1 :]] != [*index.dims[:dim], *index.dims[dim + 1 :]]:
        raise Mixes("writes the keys selected for one query into the row of another")
    return "marks of selected keys", Axes(dims=base.dims, inputs=base.inputs | index.inputs)
