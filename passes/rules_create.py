"""Transfer rules for operators that make new values: constants, index ranges, table look-ups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from selective_compile.passes.axes import Axes, Axis, Mixes, Sizes, is_symbolic
from selective_compile.passes.rules_pointwise import broadcast

aten = torch.ops.aten
AxesOf = Callable[[Any], Axes]


def filled(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    """One value everywhere, so any dimension of the batch's or the tokens' size may be called by that name."""
    values = [a for a in (*node.args[1:], *node.kwargs.values()) if isinstance(a, fx.Node)]
    if any(is_symbolic(a.meta["val"]) for a in values):
        raise Mixes("fills with the number of tokens or requests, which is not known of one token")
    return Axes(dims=tuple(sizes.dim(size) for size in node.meta["val"].shape))


def arange(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    """``arange(S)`` numbers the tokens of a request; ``arange(B)`` the requests."""
    dim = sizes.dim(node.meta["val"].shape[0])
    if len(dim) > 1:
        raise Mixes("numbers the tokens of all requests together")
    axis = dim[0] if dim and isinstance(dim[0], Axis) else None
    from_zero = node.target is aten.arange.default or (node.target is aten.arange.start and node.args[0] == 0)
    if axis is not None and not from_zero:
        raise Mixes("numbers tokens from a start that is not 0")
    return Axes(dims=(dim,), iota=axis)


def embedding(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    table, index = axes_of(node.args[0]), axes_of(node.args[1])
    if not table.is_constant:
        raise Mixes("looks tokens up in a table that depends on tokens")
    return Axes(dims=(*index.dims, *table.dims[1:]), inputs=index.inputs)


def index(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    """``x[i, j, ...]``: a constant table looked up per token, or ``x`` read at its own batch and token index."""
    axes, indices = axes_of(node.args[0]), list(node.args[1])  # type: ignore[arg-type]
    used = [i for i, index in enumerate(indices) if index is not None]
    if any(indices[i].meta["val"].dtype == torch.bool for i in used):
        raise Mixes("selects by a boolean mask: how many values are left depends on the data")
    if used != list(range(used[0], used[0] + len(used))):
        raise Mixes("indexes dimensions that are not side by side")
    found = [axes_of(indices[i]) for i in used]
    for i, index_axes in zip(used, found, strict=True):
        own = axes.dims[i]
        if axes.labelled(i) and own != (index_axes.iota,):
            raise Mixes(f"gathers along dimension {i} by an index that is not the token's own")
    dims = broadcast([index_axes.dims for index_axes in found])
    inputs = axes.inputs.union(*(index_axes.inputs for index_axes in found))
    return Axes(dims=(*axes.dims[: used[0]], *dims, *axes.dims[used[-1] + 1 :]), inputs=inputs)


def reads_own_index(node: fx.Node, axes: dict[fx.Node, Axes]) -> bool:
    """Whether an ``index`` node reads a token-carrying tensor at each token's own index (true in a mask only)."""
    return node.target is aten.index.Tensor and node in axes and not axes[node.args[0]].is_constant  # type: ignore[index]


CREATIONS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.zeros, aten.ones, aten.full, aten.empty, aten.scalar_tensor), filled),
    **dict.fromkeys((aten.new_ones, aten.new_zeros, aten.new_full), filled),
    **dict.fromkeys((aten.zeros_like, aten.ones_like, aten.full_like), filled),
    aten.arange: arange,
    aten.embedding: embedding,
    aten.index: index,
}
