"""Transfer rules for operators that move elements without changing them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import fx

from selective_compile.passes.axes import Axes, Axis, Dim, Extended, Mixes, Sizes, is_symbolic, merge_plain, regroup
from selective_compile.passes.rules_chosen import FINDERS, place
from selective_compile.passes.rules_order import joined, order_of, part_of, size_of_group, split_groups
from selective_compile.passes.rules_pointwise import broadcast
from selective_compile.passes.rules_reduce import dim_along, dims_along, refuse_labelled
from selective_compile.passes.table_rows import rows_of, slice_bounds

aten = torch.ops.aten
AxesOf = Callable[[Any], Axes]


def with_dims(axes: Axes, dims: tuple[Dim, ...] | list[Dim]) -> Axes:
    if axes.groups is not None and tuple(dims) != axes.dims:
        raise Mixes("reads the sizes of groups of tokens as values")
    return Axes(dims=tuple(dims), numbers=axes.numbers, inputs=axes.inputs, groups=axes.groups)


def constant_dims(value: Any) -> list[int]:
    return list(value)


def reshape(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    axes = axes_of(node.args[0])
    return with_dims(axes, regroup(axes.dims, sizes, tuple(node.meta["val"].shape)))


def complex_pairs(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    """``view_as_complex``: the last dimension, real and imaginary part, becomes one number."""
    axes = axes_of(node.args[0])
    refuse_labelled(node, axes, [len(axes.dims) - 1])
    return Axes(dims=axes.dims[:-1], inputs=axes.inputs)


def real_pairs(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    axes = axes_of(node.args[0])
    return Axes(dims=(*axes.dims, (2,)), inputs=axes.inputs)


def unsqueeze(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    axes, rank = axes_of(node.args[0]), node.meta["val"].dim()
    at = node.args[1] % rank
    return with_dims(axes, (*axes.dims[:at], (), *axes.dims[at:]))


def transpose(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    axes = axes_of(node.args[0])
    dims, rank = list(axes.dims), len(axes.dims)
    first, second = [dim % rank for dim in constant_dims(node.args[1:] or (0, 1))]
    dims[first], dims[second] = dims[second], dims[first]
    return with_dims(axes, dims)


def permute(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    axes = axes_of(node.args[0])
    return with_dims(axes, [axes.dims[i] for i in constant_dims(node.args[1])])


def reversed_dims(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    axes = axes_of(node.args[0])
    return with_dims(axes, axes.dims[::-1])


def expand(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    """A dimension of size 1 repeated: the value is the same along it, so the new dimension may bear its size's name."""
    axes, shape = axes_of(node.args[0]), node.meta["val"].shape
    padded = ((),) * (len(shape) - len(axes.dims)) + axes.dims
    return with_dims(axes, [dim if dim else sizes.dim(size) for dim, size in zip(padded, shape, strict=True)])


def slice_(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    """A full slice was removed by pass 1, so what is left cuts its dimension."""
    axes, value = axes_of(node.args[0]), node.meta["val"]
    dim = dim_along(node, 1, 0)
    if cuts_extension(node, axes, dim, sizes):
        return with_dims(axes, replaced(axes.dims, dim, (Axis.TOKEN,)))
    refuse_labelled(node, axes, [dim])
    if rows_of(node, axes, sizes) is not None:
        return with_dims(axes, replaced(axes.dims, dim, (Axis.TOKEN,)))
    if not all(bound is None or isinstance(bound, int) for bound in (*node.args[2:], value.shape[dim])):
        raise Mixes("reads a table by the number of tokens")
    return with_dims(axes, replaced(axes.dims, dim, sizes.dim(value.shape[dim])))


def cuts_extension(node: fx.Node, axes: Axes, dim: int, sizes: Sizes) -> bool:
    """Whether a slice leaves exactly the tokens of an `Extended` dimension."""
    (factor,) = axes.dims[dim] if len(axes.dims[dim]) == 1 else (None,)
    if not isinstance(factor, Extended):
        return False
    start, _, step = slice_bounds(node)
    size = node.meta["val"].shape[dim]
    return (start is None or start == 0) and step == 1 and is_symbolic(size) and sizes.monomial(size) == (1, 0, 1)


def replaced(dims: tuple[Dim, ...], at: int, new: Dim) -> tuple[Dim, ...]:
    return (*dims[:at], new, *dims[at + 1 :])


def select(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    axes = axes_of(node.args[0])
    if axes.groups is not None:
        return size_of_group(node, axes.groups)
    dim = dim_along(node, 1, 0)
    refuse_labelled(node, axes, [dim])
    return with_dims(axes, (*axes.dims[:dim], *axes.dims[dim + 1 :]))


def split(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    """``split`` and ``chunk`` of an unlabelled dimension; ``getitem`` then picks a part (see `getitem`)."""
    axes = axes_of(node.args[0])
    if any(is_symbolic(size.meta["val"]) for size in node.all_input_nodes[1:]):
        return split_groups(node, axes_of)
    position = 1 if node.target is aten.unbind.int else 2
    refuse_labelled(node, axes, dims_along(node, position, 0))
    return axes


def getitem(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    """One of several results; their labelled dimensions are the producer's, plain sizes are read off the value."""
    axes, shape = axes_of(node.args[0]), node.meta["val"].shape
    if axes.holding_parts:
        return part_of(node, axes)
    if node.args[0].target in FINDERS:  # type: ignore[union-attr,operator]
        return place(axes, node.args[1])  # type: ignore[arg-type]
    producer = node.args[0].target.overloadpacket  # type: ignore[union-attr]
    dims = axes.dims
    if producer is aten.unbind:
        (gone,) = dims_along(node.args[0], 1, 0)  # type: ignore[arg-type]
        dims = (*dims[:gone], *dims[gone + 1 :])
    kept = [any(not isinstance(f, int) for f in dim) for dim in dims]
    named = [d if k else sizes.dim(s) for d, k, s in zip(dims, kept, shape, strict=True)]
    if producer is aten.sort and node.args[1] == 1 and axes.is_permuted:
        return Axes(dims=tuple(named), numbers=order_of(axes).of, inputs=axes.inputs)
    return with_dims(axes, named)


def cat(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    parts = [axes_of(part) for part in node.args[0]]  # type: ignore[union-attr]
    parts = [axes for axes in parts if axes.dims != ((0,),)]  # an empty cache, as Hugging Face creates it
    inputs = frozenset().union(*(axes.inputs for axes in parts))
    if len(parts) == 1:
        return Axes(dims=parts[0].dims, inputs=inputs)
    rank = node.meta["val"].dim()
    dim = (node.args[1] if len(node.args) > 1 else 0) % rank
    others = broadcast([replaced(axes.dims, dim, ()) for axes in parts])
    if any(axes.holding_parts for axes in parts):
        return Axes(dims=replaced(others, dim, joined([axes.dims[dim] for axes in parts])), inputs=inputs)
    if (count := extension(parts, dim)) is not None:
        return Axes(dims=replaced(others, dim, (Extended(count),)), inputs=inputs)
    for axes in parts:
        refuse_labelled(node, axes, [dim])
    return Axes(dims=replaced(others, dim, sizes.dim(node.meta["val"].shape[dim])), inputs=inputs)


def extension(parts: list[Axes], dim: int) -> int | None:
    """How many constants are put behind the keys of (query, key) pairs; None for any other concatenation."""
    keys, *behind = (axes.dims[dim] for axes in parts)
    if not parts[0].is_pair or keys != (Axis.TOKEN,) or any(axes.labelled(dim) for axes in parts[1:]):
        return None
    return sum(prod(f for f in factors if isinstance(f, int)) for factors in behind)


def stack(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    parts = [axes_of(part) for part in node.args[0]]  # type: ignore[union-attr]
    rank = node.meta["val"].dim()
    dim = (node.args[1] if len(node.args) > 1 else 0) % rank
    dims = broadcast([axes.dims for axes in parts])
    inputs = frozenset().union(*(axes.inputs for axes in parts))
    return Axes(dims=(*dims[:dim], sizes.dim(len(parts)), *dims[dim:]), inputs=inputs)


def padded(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    """``pad``: elements added to, or taken from, both ends of the last dimensions."""
    axes, value, ends = axes_of(node.args[0]), node.meta["val"], list(node.args[1])  # type: ignore[arg-type]
    if axes.numbers or axes.groups is not None or not all(isinstance(count, int) for count in ends):
        raise Mixes("pads the numbers of tokens, or by the number of tokens")
    last = len(axes.dims) - 1
    changed = [last - i for i in range(len(ends) // 2) if any(ends[2 * i : 2 * i + 2])]
    refuse_labelled(node, axes, changed)
    dims = [sizes.dim(size) if i in changed else axes.dims[i] for i, size in enumerate(value.shape)]
    return with_dims(axes, dims)


def diagonal(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    axes, rank = axes_of(node.args[0]), node.args[0].meta["val"].dim()  # type: ignore[union-attr]
    given = (None, *node.args[2:], *(0, 1)[len(node.args[2:]) :])
    crossed = [node.kwargs.get(f"dim{place}", given[place]) % rank for place in (1, 2)]
    refuse_labelled(node, axes, crossed)
    rest = [dim for i, dim in enumerate(axes.dims) if i not in crossed]
    return with_dims(axes, [*rest, sizes.dim(node.meta["val"].shape[-1])])


def squeeze(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    axes = axes_of(node.args[0])
    gone = [d for d in dims_along(node, 1) if axes.dims[d] == ()]
    if len(axes.dims) - len(gone) != node.meta["val"].dim():
        raise Mixes("squeezes a dimension whose size is not known to be 1")
    return with_dims(axes, [dim for i, dim in enumerate(axes.dims) if i not in gone])


def repeat_interleave(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    """Along one dimension, by a constant count: heads repeated, or each token as often as it has experts."""
    axes, count = axes_of(node.args[0]), node.args[1] if len(node.args) > 1 else None
    if not isinstance(count, int) or axes.numbers:
        raise Mixes("repeats elements as often as a tensor says, or repeats the numbers of tokens")
    dim = dim_along(node, 2)
    repeated = (*axes.dims[dim], count) if axes.labelled(dim) else sizes.dim(node.meta["val"].shape[dim])
    return with_dims(axes, replaced(axes.dims, dim, merge_plain(repeated)))


def repeat(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    """The whole tensor several times along some dimensions: ``[T, h]`` repeated E times is ``[E * T, h]``."""
    axes, times = axes_of(node.args[0]), list(node.args[1])  # type: ignore[arg-type]
    if not all(isinstance(count, int) for count in times) or axes.numbers:
        raise Mixes("repeats a tensor as often as there are tokens, or repeats the numbers of tokens")
    padded = ((),) * (len(times) - len(axes.dims)) + axes.dims
    return with_dims(axes, [merge_plain((n, *dim)) for n, dim in zip(times, padded, strict=True)])


def broadcast_tensors(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    parts = [axes_of(part) for part in node.args[0]]  # type: ignore[union-attr]
    return Axes(dims=broadcast([a.dims for a in parts]), inputs=frozenset().union(*(a.inputs for a in parts)))


def same(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    """Casts and copies; a cast of an index to a float or to few bits is no index any more."""
    axes = axes_of(node.args[0])
    if axes.groups is not None or node.meta["val"].dtype in (torch.int32, torch.int64):
        return axes
    if axes.opaque:
        raise Mixes("casts the numbers by which tokens are reordered to a type that may not hold them")
    return axes.plain()


VIEWS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.view, aten.reshape, aten._unsafe_view, aten.flatten, aten.unflatten), reshape),
    **dict.fromkeys((aten.view_as, aten.reshape_as), reshape),
    **dict.fromkeys((aten.transpose, aten.t), transpose),
    **dict.fromkeys((aten.to, aten._to_copy, aten.type_as, aten.clone, aten.contiguous), same),
    **dict.fromkeys((aten.split, aten.unsafe_split, aten.split_with_sizes, aten.chunk, aten.unbind), split),
    operator.getitem: getitem,
    aten.unsqueeze: unsqueeze,
    aten.view_as_complex: complex_pairs,
    aten.view_as_real: real_pairs,
    aten.squeeze: squeeze,
    aten.permute: permute,
    aten.numpy_T: reversed_dims,
    aten.expand: expand,
    aten.expand_as: expand,
    aten.slice: slice_,
    aten.select: select,
    **dict.fromkeys((aten.pad, aten.constant_pad_nd), padded),
    aten.diagonal: diagonal,
    aten.cat: cat,
    aten.stack: stack,
    aten.repeat_interleave: repeat_interleave,
    aten.repeat: repeat,
    aten.broadcast_tensors: broadcast_tensors,
}
