"""Transfer rules for operators that read one tensor, or write it, at the indices that another holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from selective_compile.passes.axes import Axes, Axis, Dim, Mixes, Sizes
from selective_compile.passes.rules_pointwise import broadcast
from selective_compile.passes.rules_reduce import dim_along, refuse_labelled
from selective_compile.passes.rules_selection import mark_keys, marks_keys

aten = torch.ops.aten
AxesOf = Callable[[Any], Axes]


def readable(axes: Axes) -> Axes:
    if axes.opaque:
        raise Mixes("reads the numbers by which tokens are reordered as values")
    return axes


def embedding(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    table, index = axes_of(node.args[0]), axes_of(node.args[1])
    if not table.is_constant:
        raise Mixes("looks tokens up in a table that depends on tokens")
    readable(index)
    return Axes(dims=(*index.dims, *table.dims[1:]), inputs=index.inputs)


def index(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    """``x[i, j, ...]``: a constant table looked up per token, or ``x`` read at its own batch and token index."""
    axes, indices = readable(axes_of(node.args[0])), list(node.args[1])  # type: ignore[arg-type]
    used = [i for i, index in enumerate(indices) if index is not None]
    if any(indices[i].meta["val"].dtype == torch.bool for i in used):
        raise Mixes("selects by a boolean mask: how many values are left depends on the data")
    if used != list(range(used[0], used[0] + len(used))):
        raise Mixes("indexes dimensions that are not side by side")
    found = [axes_of(indices[i]) for i in used]
    for i, index_axes in zip(used, found, strict=True):
        own = axes.dims[i]
        refuse_reordered(index_axes, labelled=axes.labelled(i))
        if axes.labelled(i) and own != index_axes.numbers:
            raise Mixes(f"gathers along dimension {i} by an index that is not the token's own")
    dims = broadcast([index_axes.dims for index_axes in found])
    inputs = axes.inputs.union(*(index_axes.inputs for index_axes in found))
    return Axes(dims=(*axes.dims[: used[0]], *dims, *axes.dims[used[-1] + 1 :]), inputs=inputs)


def refuse_reordered(index: Axes, *, labelled: bool) -> None:
    """The place of a token in an order of all tokens, or the size of a group, is no index into anything else."""
    if index.groups is not None or (index.opaque and not labelled):
        raise Mixes("reads a table by the numbers by which tokens are reordered")


def reads_own_index(node: fx.Node, axes: dict[fx.Node, Axes]) -> bool:
    """Whether a node reads a token-carrying tensor at each token's own index (true in a mask only)."""
    indices = indices_of(node)
    if indices is None or node not in axes:
        return False
    table = axes.get(node.args[0])  # type: ignore[arg-type]  # None: rows of a table, which `flatten` has made
    if axes[node].is_permuted or (table is not None and (table.is_constant or table.is_permuted)):
        return False
    indices = [index for index in indices if index is not None]
    # An index that is new to the graph is made of the positions that took an old one's place.
    numbers = [axes[index].numbers if index in axes else (Axis.TOKEN,) for index in indices]
    return any(n in ((Axis.TOKEN,), (Axis.BATCH,)) for n in numbers)


def indices_of(node: fx.Node) -> list[Any] | None:
    """For each dimension up to the last that ``index`` or ``index_select`` reads at an index, that or None."""
    if node.target is aten.index.Tensor:
        return list(node.args[1])  # type: ignore[arg-type]
    return [None] * dim_along(node, 1) + [node.args[2]] if node.target is aten.index_select.default else None


def gather(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    """``out[i, j] = x[i, index[i, j]]``: within each token's own row, or a constant table's row for each token."""
    axes, index = readable(axes_of(node.args[0])), readable(axes_of(node.args[2]))
    dim = dim_along(node, 1)
    refuse_labelled(node, axes, [dim])
    same_rows(dim, axes, index)
    return Axes(dims=index.dims, inputs=axes.inputs | index.inputs)


def scatter(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Any:
    """``x[i, index[i, j]] = source[i, j]``, or added to it: within each token's own row."""
    if marks_keys(node, axes_of):
        return mark_keys(node, axes_of)
    given = [axes_of(a) for a in (node.args[0], *node.args[2:4]) if isinstance(a, fx.Node)]
    dim = dim_along(node, 1)
    for axes in given:
        refuse_labelled(node, readable(axes), [dim])
    same_rows(dim, *given)
    return Axes(dims=given[0].dims, inputs=frozenset().union(*(axes.inputs for axes in given)))


def put_back(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    """``slice_scatter`` and ``select_scatter``: some features of each token's row replaced."""
    if any(isinstance(bound, fx.Node) for bound in (*node.args[2:], *node.kwargs.values())):
        raise Mixes("writes at a place that the number of tokens or requests decides")
    whole, part = readable(axes_of(node.args[0])), readable(axes_of(node.args[1]))
    dim = dim_along(node, 2, 0)
    refuse_labelled(node, whole, [dim])
    if node.target is aten.select_scatter.default:
        part = replace(part, dims=(*part.dims[:dim], (), *part.dims[dim:]))
    refuse_labelled(node, part, [dim])
    same_rows(dim, whole, part)
    return Axes(dims=whole.dims, inputs=whole.inputs | part.inputs)


def index_fill(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    """Some features of each token's row become a number."""
    if isinstance(node.args[3], fx.Node) or not axes_of(node.args[2]).is_constant or axes_of(node.args[2]).numbers:
        raise Mixes("fills what values decide")
    whole = readable(axes_of(node.args[0]))
    refuse_labelled(node, whole, [dim_along(node, 1)])
    return Axes(dims=whole.dims, inputs=whole.inputs)  # numbers that enumerate tokens do so no longer


def same_rows(dim: int, *given: Axes) -> None:
    """Dimensions other than ``dim`` must enumerate the same: such operators do not broadcast, they cut."""
    rows: set[tuple[Dim, ...]] = set()
    for axes in given:
        rows.add(tuple(d if axes.labelled(i) else () for i, d in enumerate(axes.dims) if i != dim))
    if len(rows) > 1:
        raise Mixes(f"reads rows of different meaning: {sorted(map(str, rows))}")


def index_select(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    axes, index = readable(axes_of(node.args[0])), axes_of(node.args[2])
    dim = dim_along(node, 1)
    refuse_reordered(index, labelled=axes.labelled(dim))
    if axes.labelled(dim) and axes.dims[dim] != index.numbers:
        raise Mixes(f"gathers along dimension {dim} by an index that is not the token's own")
    return Axes(dims=(*axes.dims[:dim], *index.dims, *axes.dims[dim + 1 :]), inputs=axes.inputs | index.inputs)


def one_hot(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    axes = readable(axes_of(node.args[0]))
    if len(node.args) < 2 or node.args[1] == -1:
        raise Mixes("has as many classes as the largest value of all tokens")
    return Axes(dims=(*axes.dims, sizes.dim(node.args[1])), inputs=axes.inputs)


def among_constants(values: int, constants: int) -> Callable[..., Axes]:
    """Each value by itself, held to the same constants: which bucket it is in, or whether it is one of them."""

    def rule(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
        axes, those = readable(axes_of(node.args[values])), axes_of(node.args[constants])
        in_order = node.target is not aten.searchsorted.Tensor or len(those.dims) == 1
        constant = readable(those).is_constant and axes_of(node.kwargs.get("sorter")).is_constant
        if not constant or not in_order:
            raise Mixes("compares with what depends on tokens, or with rows of its own for each value")
        if node.kwargs.get("assume_unique"):
            raise Mixes("takes it that no two tokens have the same value")
        return Axes(dims=axes.dims, inputs=axes.inputs)

    return rule


def put_features(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    """``x[..., [3, 5]] = values``: at the same places of each token's row."""
    base, values = readable(axes_of(node.args[0])), readable(axes_of(node.args[2]))
    indices: Any = node.args[1]
    (dim,) = [i for i, index in enumerate(indices) if index is not None]
    index = axes_of(indices[dim])
    refuse_labelled(node, base, [dim])
    broadcast([(*base.dims[:dim], *index.dims, *base.dims[dim + 1 :]), values.dims])
    return Axes(dims=base.dims, inputs=base.inputs | values.inputs)


def puts_features(node: fx.Node, axes_of: AxesOf) -> bool:
    """Whether it writes along one dimension, at places that are constants."""
    used = [index for index in node.args[1] if index is not None]  # type: ignore[union-attr]
    if len(used) != 1 or used[0].meta["val"].dtype is torch.bool:  # type: ignore[union-attr]
        return False
    index = axes_of(used[0])
    return index.is_constant and not index.numbers and index.groups is None


LOOKUPS: dict[Any, Callable[..., Any]] = {
    aten.embedding: embedding,
    aten.index: index,
    aten.gather: gather,
    **dict.fromkeys((aten.scatter, aten.scatter_add, aten.scatter_reduce), scatter),
    **dict.fromkeys((aten.slice_scatter, aten.select_scatter), put_back),
    aten.index_select: index_select,
    aten.index_fill: index_fill,
    aten.one_hot: one_hot,
    aten.bucketize: among_constants(0, 1),
    aten.isin: among_constants(0, 1),
    aten.searchsorted: among_constants(1, 0),
}
