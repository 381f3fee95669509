"""Transfer rules for tokens put in another order, each group of them treated alike, and put back.

A mixture of experts does so: it sorts (token, expert) pairs by expert, multiplies each expert's rows by its weight, and
undoes the sorting.  Which row a pair gets depends on all pairs, what is computed in the row does not: along a
`Permuted` dimension a value belongs to the pair that was put there, and the numbers that say which are read by index
operators alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from selective_compile.passes.axes import Axes, Dim, Factor, Groups, Mixes, Part, Permuted, Sizes
from selective_compile.passes.rules_chosen import put_rows, puts_rows
from selective_compile.passes.rules_lookup import put_features, puts_features, readable
from selective_compile.passes.rules_reduce import dim_along, dims_along, selection

aten = torch.ops.aten
AxesOf = Callable[[Any], Axes]
CASTS = (aten.to, aten._to_copy, aten.reshape, aten.view, aten.clone, aten.contiguous, aten.flatten)
WIDE = (torch.int64, torch.int32, torch.float32, torch.float64)
ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
SORTS = (aten.sort.default, aten.sort.stable)
ITEMS = (aten.item.default, aten._local_scalar_dense.default)
NEVER_NEGATIVE = "never_negative"  # in the meta of a table that holds no negative numbers
INDEX_MAKERS = (aten.topk, aten.sort, aten.argsort, aten.argmax, aten.argmin, aten.max, aten.min)


def order_of(axes: Axes) -> Permuted:
    """The permutation of a one-dimensional value that has nothing else."""
    if len(axes.dims) == 1 and len(axes.dims[0]) == 1 and isinstance(axes.dims[0][0], Permuted):
        return axes.dims[0][0]
    raise Mixes("must be one dimension of sorted tokens")


def sort(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    """Along features: token-wise.  Of a vector of tokens: its dimension becomes `Permuted`."""
    axes = axes_of(node.args[0])
    if len(axes.dims) != 1 or not axes.labelled(0):
        readable(axes)
        return selection(node, axes_of, sizes)
    single = node.target is not aten.sort.default and node.target is not aten.sort.stable
    if axes.numbers and axes.is_permuted and single and not descends(node):  # sorting the numbers undoes their order
        order = order_of(axes)
        if axes.numbers == order.of:
            return Axes(dims=(order.of,), numbers=(order,), inputs=axes.inputs)
    readable(axes)
    if axes.is_permuted:
        raise Mixes("sorts tokens that are sorted already")
    order = Permuted(node, axes.dims[0])
    return Axes(dims=((order,),), numbers=order.of if single else (), inputs=axes.inputs)


def descends(node: fx.Node) -> bool:
    """Whether a sort begins with the largest."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    place = names.index("descending")
    return bool(node.args[place] if len(node.args) > place else node.kwargs.get("descending", False))


def histogram(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    """How many sorted tokens each group has: `Groups`, if every group number has a bin of its own."""
    order = order_of(readable(axes_of(node.args[0])))
    counted = made_from(node.args[0])
    if counted.args[0] is not order.order or counted.args[1] != 0:  # the first result of a sort
        raise Mixes("counts other values than those that tokens were sorted by")
    if descends(order.order):
        raise Mixes("counts the first group first, where tokens were sorted to begin with the last")
    if not never_negative(order.order.args[0]):
        raise Mixes("counts values of tokens that are not known to be indices")
    (bins,) = node.meta["val"].shape
    dtype = node.args[0].meta["val"].dtype  # type: ignore[union-attr]
    if node.target is aten.histc.default and not dtype.is_floating_point:
        dtype = torch.float64  # integers are counted on a GPU alone, by the same bins
    values = torch.arange(bins, device="cpu").to(dtype)
    counts = [node.target(value[None], *node.args[1:], **node.kwargs) for value in values]  # type: ignore[operator]
    if not torch.equal(torch.stack(counts), torch.eye(bins, dtype=counts[0].dtype, device="cpu")):
        raise Mixes("counts several group numbers as one")
    return Axes(dims=((bins,),), groups=Groups(order=order.order))


def made_from(node: Any) -> fx.Node:
    """The node behind views, and casts that keep apart as many numbers as there can be groups."""
    while getattr(node.target, "overloadpacket", None) in CASTS and node.meta["val"].dtype in WIDE:
        node = node.args[0]
    assert isinstance(node, fx.Node)
    return node


def never_negative(node: Any, tables: list[fx.Node] | None = None) -> bool:
    """Whether the values are indices that an operator found, or were looked up among such; these go to ``tables``."""
    source = made_from(node)
    packet = getattr(source.target, "overloadpacket", None)
    if packet in (aten.cat, aten.stack):
        return all(never_negative(part, tables) for part in source.args[0])  # type: ignore[union-attr]
    if source.target is aten.masked_fill.Scalar and isinstance(source.args[2], int) and source.args[2] >= 0:
        return never_negative(source.args[0], tables)
    if packet in (aten.index, aten.embedding, aten.index_select):
        table: Any = source.args[0]
        if tables is not None:
            tables.append(table)
        return bool(table.meta.get(NEVER_NEGATIVE))
    if source.target is operator.getitem:
        packet = getattr(source.args[0].target, "overloadpacket", None)  # type: ignore[union-attr]
        return bool(source.args[1] == 1) and packet in INDEX_MAKERS  # of (values, indices)
    return packet in (aten.argsort, aten.argmax, aten.argmin)


def tables_counted(axes: Axes) -> list[fx.Node]:
    """Tables whose values are what tokens were sorted by, of a `histogram`."""
    tables: list[fx.Node] = []
    if axes.groups is not None and axes.groups.order.target in SORTS:
        never_negative(axes.groups.order.args[0], tables)
    return tables


def counted_groups(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes | None:
    """How many times tokens name each group; None for any other sum.

    ``zeros.scatter(-1, groups, 1).sum(0)``, where the groups that one token names must be different ones, as those that
    ``topk`` finds are; or ``one_hot(groups).sum(0)``.
    """
    marks = made_from(node.args[0]) if isinstance(node.args[0], fx.Node) else None
    if marks is None:
        return None
    axes = axes_of(marks)
    if marks.target is aten.one_hot.default:
        found = made_from(marks.args[0])
    elif marks.target is aten.scatter.value and marks.args[3] == 1 and dims_along(marks, 1) == [1]:
        found = made_from(marks.args[2])
        of_topk = found.target is operator.getitem and getattr(found.args[0], "target", None) is aten.topk.default
        if getattr(marks.args[0], "target", None) not in ZEROS or not of_topk:
            return None
    else:
        return None
    if not never_negative(found) or len(axes.dims) != 2 or dims_along(node, 1) != [0] or not axes.labelled(0):
        return None
    if node.meta["val"].dim() != 1 or node.meta["val"].dtype.is_floating_point or axes.opaque:
        return None
    return Axes(dims=axes.dims[1:], inputs=axes.inputs, groups=Groups(order=found, unsorted=True))


def size_of_group(node: fx.Node, groups: Groups) -> Axes:
    """``sizes[i]``, which may only say where sorted tokens are split."""
    index = node.args[2]
    if groups.ends or groups.one is not None or not isinstance(index, int):
        raise Mixes("reads the sizes of groups of tokens as values")
    return Axes(dims=(), groups=replace(groups, one=index % node.args[0].meta["val"].shape[0]))  # type: ignore[union-attr]


def split_groups(node: fx.Node, axes_of: AxesOf) -> Axes:
    """Sorted rows split at the sizes of all their groups in turn; `part_of` then takes one."""
    rows, listed = axes_of(node.args[0]), node.args[1]
    dim = dim_along(node, 2, 0)
    (order,) = rows.dims[dim] if len(rows.dims[dim]) == 1 else (None,)
    wrong = Mixes("splits tokens at other places than the sizes of their groups")
    if not isinstance(order, Permuted) or rows.numbers or not isinstance(listed, (tuple, list)):
        raise wrong
    source = made_from(order.order.args[0])
    if descends(order.order):
        raise wrong
    for place, size in enumerate(listed):
        read = size.args[0] if isinstance(size, fx.Node) and size.target in ITEMS else None
        if read is None or axes_of(read).groups != Groups(order=source, one=place, unsorted=True):
            raise wrong
        if len(listed) != read.args[0].meta["val"].shape[0]:  # type: ignore[union-attr]
            raise wrong
    part = Part(order, len(listed))
    return Axes(dims=(*rows.dims[:dim], (part,), *rows.dims[dim + 1 :]), inputs=rows.inputs)


def part_of(node: fx.Node, axes: Axes) -> Axes:
    group = node.args[1]
    assert isinstance(group, int)

    def taken(factor: Factor) -> Factor:
        return replace(factor, group=group) if isinstance(factor, Part) else factor

    if any(isinstance(f, Part) and f.group is not None for dim in axes.dims for f in dim):
        raise Mixes("takes a part of the rows of one group")
    return replace(axes, dims=tuple(tuple(map(taken, dim)) for dim in axes.dims))


def joined(dims: list[Dim]) -> Dim:
    """All groups one after another are the sorted tokens again."""
    parts = [dim[0] if len(dim) == 1 else None for dim in dims]
    first = parts[0]
    if not isinstance(first, Part) or parts != [Part(first.of, first.groups, i) for i in range(first.groups)]:
        raise Mixes("puts parts of sorted tokens together that are not all of them in their order")
    return (first.of,)


def running_sum(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes | None:
    """Sizes of groups summed up are their ends; None for any other sum."""
    axes = axes_of(node.args[0])
    if axes.groups is None:
        return None
    if axes.groups != Groups(order=axes.groups.order) or dims_along(node, 1) != [0]:
        raise Mixes("sums up more than the sizes of groups")
    return Axes(dims=axes.dims, groups=Groups(order=axes.groups.order, ends=True))


def grouped_product(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    """``rows [R, K] @ weight[group of the row] [K, N]``, with the rows sorted by group."""
    rows, weight, ends = (axes_of(node.args[i]) for i in range(3))
    (order,) = rows.dims[0] if len(rows.dims) == 2 and len(rows.dims[0]) == 1 else (None,)
    if not isinstance(order, Permuted) or rows.opaque or ends.groups != Groups(order=order.order, ends=True):
        raise Mixes("multiplies groups of rows that are not those of one sorting of tokens")
    weight_of_each_group = weight.is_constant and len(weight.dims) == 3
    has_bias = len(node.args) > 3 and node.args[3] is not None
    if not weight_of_each_group or rows.labelled(1) or has_bias:
        raise Mixes("multiplies groups of rows by what is no weight of each group")
    return Axes(dims=(rows.dims[0], weight.dims[2]), inputs=rows.inputs)


def index_put(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    """``inverse[order] = arange``: for each token, where the sorting put it; else features that are written."""
    if puts_features(node, axes_of):
        return put_features(node, axes_of, sizes)
    if puts_rows(node, axes_of):
        return put_rows(node, axes_of)
    base, values = axes_of(node.args[0]), axes_of(node.args[2])
    indices: Any = node.args[1]
    index = axes_of(indices[0]) if len(indices) == 1 and indices[0] is not None else Axes(dims=())
    accumulates = len(node.args) > 3 and node.args[3]
    if not index.is_permuted or index.numbers != order_of(index).of or accumulates:
        raise Mixes("writes at indices that are not the numbers of sorted tokens")
    order = order_of(index)
    if base.dims != (order.of,) or values.dims != (order.of,) or values.numbers != order.of or values.is_permuted:
        raise Mixes("writes other values at the numbers of sorted tokens than their places")
    return Axes(dims=(order.of,), numbers=(order,), inputs=index.inputs)


def is_inverse(axes: dict[fx.Node, Axes], node: fx.Node) -> bool:
    """Whether a node makes the inverse of an order by writing an index range into it."""
    found = axes.get(node)
    return node.target is aten.index_put.default and found is not None and bool(found.numbers)


def index_add(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    """Sorted rows added to the rows of the tokens they belong to."""
    base, index, source = readable(axes_of(node.args[0])), axes_of(node.args[2]), readable(axes_of(node.args[3]))
    dim = dim_along(node, 1)
    if not base.labelled(dim):
        raise Mixes("adds rows of tokens to rows that are not tokens")
    rows, rest = source.dims[dim], (*source.dims[:dim], (), *source.dims[dim + 1 :])
    if base.dims[dim] != index.numbers or index.dims != (rows,):
        raise Mixes("adds rows of tokens to rows of other tokens")
    if not index.opaque:  # places in a request are none in the ragged batch
        raise Mixes("adds rows of tokens at their places in the request")
    if rest != (*base.dims[:dim], (), *base.dims[dim + 1 :]):
        raise Mixes("adds rows of another shape")
    return Axes(dims=base.dims, inputs=base.inputs | index.inputs | source.inputs)


ORDERS: dict[Any, Callable[..., Any]] = {
    aten.sort: sort,
    aten.argsort: sort,
    aten.histc: histogram,
    aten.index_put: index_put,
    aten.index_add: index_add,
}
# By name: another library registers the one, and only where it is imported.
GROUPED_PRODUCTS = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")
READ_NUMBERS = (aten.index, aten.index_select, aten.index_put, aten.index_add, aten.sort, aten.argsort, aten.scatter)
