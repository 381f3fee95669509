"""Transfer rules for operators that combine or reorder elements along some dimensions: these must not be tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from selective_compile.passes.axes import Axes, Axis, Dim, Factor, Mixes, Sizes, is_symbolic
from selective_compile.passes.rules_pointwise import broadcast, pointwise
from selective_compile.passes.rules_selection import select_keys

aten = torch.ops.aten


def dims_along(node: fx.Node, position: int, default: Any = None) -> list[int]:
    """The dimensions a node works along (argument ``position`` or ``dim=``), as non-negative numbers."""
    rank = node.args[0].meta["val"].dim()  # type: ignore[union-attr]
    given = node.args[position] if len(node.args) > position else node.kwargs.get("dim", default)
    every = given in (None, [], ()) or isinstance(given, bool)  # whether `std` is unbiased comes first, too
    chosen = range(rank) if every else ([given] if isinstance(given, int) else given)
    return [dim % rank for dim in chosen] if rank else []  # type: ignore[union-attr]


def dim_along(node: fx.Node, position: int, default: Any = None) -> int:
    """The one dimension that a node works along."""
    dims = dims_along(node, position, default)
    if len(dims) != 1:
        raise Mixes(f"works along {len(dims)} dimensions, where one is understood")
    return dims[0]


def refuse_labelled(node: fx.Node, axes: Axes, dims: list[int]) -> None:
    for dim in dims:
        if axes.labelled(dim):
            raise Mixes(f"combines values along dimension {dim}, which enumerates {named(axes.dims[dim])}")


def named(dim: Dim) -> str:
    names: dict[Factor, str] = {Axis.BATCH: "requests", Axis.TOKEN: "tokens"}
    factors = [factor for factor in dim if not isinstance(factor, (int, torch.SymInt))]
    return " and ".join(names[f] if isinstance(f, Axis) else "sorted or chosen tokens" for f in factors)


def reduction(position: int = 1, keepdim_position: int = 2, default: Any = None) -> Callable[..., Any]:
    def rule(node: fx.Node, axes_of: Callable[[Any], Axes], sizes: Sizes) -> Any:
        if node.target in OF_TWO:
            return pointwise(node, axes_of, sizes)
        axes, dims = axes_of(node.args[0]), dims_along(node, position, default)
        over_keys = node.target in OVER_KEYS and len(dims) == 1 and is_keys(axes, dims[0])
        if not over_keys:
            refuse_labelled(node, axes, dims)
        keep = node.args[keepdim_position] if len(node.args) > keepdim_position else node.kwargs.get("keepdim", False)
        kept = tuple(() if i in dims else dim for i, dim in enumerate(axes.dims) if keep or i not in dims)
        found = Axes(dims=kept, inputs=axes.inputs)
        return (OVER_KEYS[node.target], found) if over_keys else found

    return rule


def is_keys(axes: Axes, dim: int) -> bool:
    """Whether a dimension holds the keys of a (query, key) pair."""
    return axes.is_pair and dim == axes.key_dims[-1] and len(axes.dims[dim]) == 1


def along(position: int = 1, default: Any = -1) -> Callable[..., Axes]:
    """The shape is kept; values mix along the given dimensions only."""

    def rule(node: fx.Node, axes_of: Callable[[Any], Axes], sizes: Sizes) -> Any:
        axes, dims = axes_of(node.args[0]), dims_along(node, position, default)
        if node.target in SOFTMAX and dims and is_keys(axes, dims[0]):
            return "softmax over the key axis", axes.plain()
        refuse_labelled(node, axes, dims)
        return axes.plain()

    return rule


SOFTMAX = (aten.softmax.int, aten._softmax.default)
MAXIMA = (aten.max.dim, aten.amax.default)
OVER_KEYS: dict[Any, str] = {
    **dict.fromkeys(MAXIMA, "maximum over the key axis"),
    aten.logsumexp.default: "logarithm of the sum over the key axis",
}
OF_TWO = (aten.max.other, aten.min.other)  # of two tensors, which shares a name with that of one


def selection(node: fx.Node, axes_of: Callable[[Any], Axes], sizes: Sizes) -> Any:
    """``topk`` and ``sort``: order within one unlabelled dimension, which changes its size at most.

    Of the keys of a (query, key) pair, ``topk`` selects some.
    """
    position = 2 if node.target in (aten.topk.default, aten.sort.stable, aten.argsort.stable) else 1
    axes, dims = axes_of(node.args[0]), dims_along(node, position, -1)
    if not dims:  # one number
        return axes.plain()
    if node.target is aten.topk.default and is_keys(axes, dims[0]):
        return select_keys(node, axes, dims[0], sizes)
    if any(is_symbolic(given.meta["val"]) for given in node.all_input_nodes[1:]):
        raise Mixes("computes with the number of tokens or requests, which is not known of one token")
    refuse_labelled(node, axes, dims)
    value = node.meta["val"]
    size = (value if isinstance(value, torch.Tensor) else value[0]).shape[dims[0]]
    cut: Dim = (size,) if size != 1 else ()
    return Axes(dims=tuple(cut if i in dims else d for i, d in enumerate(axes.dims)), inputs=axes.inputs)


def normalised_shape(node: fx.Node, axes_of: Callable[[Any], Axes], sizes: Sizes) -> Axes:
    """``layer_norm`` and ``rms_norm`` normalise over the last ``len(normalized_shape)`` dimensions."""
    axes, count = axes_of(node.args[0]), len(node.args[1])  # type: ignore[arg-type]
    refuse_labelled(node, axes, list(range(len(axes.dims) - count, len(axes.dims))))
    if not all(axes_of(weight).is_constant for weight in node.args[2:4] if isinstance(weight, fx.Node)):
        raise Mixes("normalises with a weight that depends on tokens")
    return axes.plain()


def attention(node: fx.Node, axes_of: Callable[[Any], Axes], sizes: Sizes) -> Axes:
    """One row per query; that rows mix only as a proved mask allows is for passes 3 and 4 to show."""
    query, key, value = (axes_of(a) for a in node.args[:3])
    heads = 1 if node.kwargs.get("enable_gqa") else 0
    leading = broadcast([axes.dims[: len(axes.dims) - 2 - heads] for axes in (query, key, value)])
    dims = (*leading, *query.dims[len(leading) : -1], value.dims[-1])
    return Axes(dims=dims, inputs=query.inputs | key.inputs | value.inputs)


def resized(position: int = 1) -> Callable[..., Axes]:
    """Values mix along one dimension, which may have another size then: as one half gates the other in ``glu``."""

    def rule(node: fx.Node, axes_of: Callable[[Any], Axes], sizes: Sizes) -> Axes:
        axes, dim = axes_of(node.args[0]), dim_along(node, position, -1)
        refuse_labelled(node, axes, [dim])
        size = sizes.dim(node.meta["val"].shape[dim])
        return Axes(dims=(*axes.dims[:dim], size, *axes.dims[dim + 1 :]), inputs=axes.inputs)

    return rule


REDUCTIONS: dict[Any, Callable[..., Any]] = {
    **{op: reduction() for op in (aten.mean, aten.sum, aten.amax, aten.amin, aten.argmax, aten.argmin, aten.prod)},
    **{op: reduction() for op in (aten.nansum, aten.median, aten.nanmedian, aten.aminmax, aten.count_nonzero)},
    **{op: reduction(keepdim_position=3) for op in (aten.std, aten.var, aten.std_mean, aten.var_mean)},
    **{op: reduction(2, 3) for op in (aten.linalg_vector_norm, aten.norm)},
    aten.mode: reduction(default=-1),
    aten.kthvalue: reduction(2, 3, default=-1),
    aten.max: reduction(),
    aten.min: reduction(),
    **{op: reduction() for op in (aten.any, aten.all, aten.logsumexp)},
    **{op: along() for op in (aten.softmax, aten._softmax, aten.log_softmax, aten.cumsum, aten.cumprod, aten.flip)},
    **{op: along() for op in (aten.cummax, aten.cummin, aten.logcumsumexp)},
    aten.roll: along(2, ()),
    aten.glu: resized(),
    **{op: resized(2) for op in (aten.fft_fft, aten.fft_ifft, aten.fft_rfft, aten.fft_irfft)},
    aten.scaled_dot_product_attention: attention,
    aten.topk: selection,
    aten.layer_norm: normalised_shape,
    aten.rms_norm: normalised_shape,
}
