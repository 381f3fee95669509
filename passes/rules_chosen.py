"""Transfer rule for finding the tokens that a mask chooses.

A mixture of experts written as a loop does so: for each expert it finds the tokens that chose it, computes with their
rows, and adds the results to the rows of the same tokens.  How many are found depends on all tokens, what is computed
in a row does not: along a `Chosen` dimension a value belongs to the token that was found there, and the numbers that
say which are read by index operators alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from selective_compile.passes.axes import Axes, Axis, Chosen, Mixes, Sizes
from selective_compile.passes.rules_lookup import readable
from selective_compile.passes.rules_pointwise import broadcast, pointwise

aten = torch.ops.aten
AxesOf = Callable[[Any], Axes]


def places(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    """``where(mask)``: one index for each dimension of ``mask``; see `place`.  With values to choose: pointwise."""
    if node.target not in FINDERS:
        return pointwise(node, axes_of, sizes)
    mask = readable(axes_of(node.args[0]))
    labelled = [dim for i, dim in enumerate(mask.dims) if mask.labelled(i)]
    if len(labelled) != 1 or not all(isinstance(factor, (Axis, int)) for factor in labelled[0]):
        raise Mixes("finds tokens by a mask that is not over the tokens alone")
    (size,) = node.meta["val"][0].shape
    found = Chosen(node, mask.dims, sizes.expression(size))
    return Axes(dims=((found,),), inputs=mask.inputs)


def place(found: Axes, index: int) -> Axes:
    """The ``index``-th result of `places`: of a dimension of tokens it numbers them, of another it is a value."""
    (factor,) = found.dims[0]
    assert isinstance(factor, Chosen)
    of = factor.of[index]
    labelled = not all(isinstance(f, int) for f in of)
    return Axes(dims=found.dims, numbers=of if labelled else (), inputs=found.inputs)


def puts_rows(node: fx.Node, axes_of: AxesOf) -> bool:
    """Whether it writes, or adds, to the rows of tokens that were found or sorted."""
    indices = [axes_of(index) for index in node.args[1] if index is not None]  # type: ignore[union-attr]
    reordered = any(axes.holding_chosen or axes.holding_parts or axes.is_permuted for axes in indices)
    return reordered and not axes_of(node.args[2]).numbers


def put_rows(node: fx.Node, axes_of: AxesOf) -> Axes:
    """``x[rows] = values``, with what was computed for each token that was found."""
    base, values = readable(axes_of(node.args[0])), readable(axes_of(node.args[2]))
    indices: Any = node.args[1]
    used = [dim for dim, index in enumerate(indices) if index is not None]
    found = [axes_of(indices[dim]) for dim in used]
    if used != list(range(used[0], used[-1] + 1)) or len({axes.dims for axes in found}) != 1:
        raise Mixes("writes at indices that were not found together")
    for dim, axes in zip(used, found, strict=True):
        if base.labelled(dim) and axes.numbers != base.dims[dim]:
            raise Mixes("writes what was found of tokens to rows of other tokens")
        if not base.labelled(dim):
            readable(axes)
    if any(base.labelled(dim) for dim in range(len(base.dims)) if dim not in used):
        raise Mixes("writes what was found of tokens to rows of several tokens")
    rows = (*base.dims[: used[0]], *found[0].dims, *base.dims[used[-1] + 1 :])
    if broadcast([rows, values.dims]) != rows:
        raise Mixes("writes rows of another shape")
    return Axes(dims=base.dims, inputs=base.inputs.union(values.inputs, *(axes.inputs for axes in found)))


FINDERS = (aten.where.default, aten.nonzero_numpy.default)
CHOICES: dict[Any, Callable[..., Any]] = {aten.where: places, aten.nonzero_numpy: places}
