"""Transfer rule for pointwise operators, and the broadcasting that other rules share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import fx

from selective_compile.passes.axes import Axes, Dim, Mixes, Sizes


def pointwise(node: fx.Node, axes_of: Callable[[Any], Axes], sizes: Sizes) -> Axes:
    """Dimensions align from the right; where both are larger than 1 their factors must be the same."""
    operands = [axes_of(a) for a in node.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor)]
    dims = broadcast([axes.dims for axes in operands])
    inputs = frozenset().union(*(axes.inputs for axes in operands))
    return Axes(dims=dims, inputs=inputs, iota=kept_iota(node, operands))


def broadcast(shapes: Sequence[tuple[Dim, ...]]) -> tuple[Dim, ...]:
    aligned = zip_longest(*(reversed(dims) for dims in shapes), fillvalue=())
    return tuple(reversed([meet(column) for column in aligned]))


def meet(column: Sequence[Dim]) -> Dim:
    """The common factors of dimensions that are broadcast against each other."""
    present = {dim for dim in column if dim != ()}
    if len(present) > 1:
        raise Mixes(f"combines dimensions of different meaning: {sorted(map(str, present))}")
    return present.pop() if present else ()


def kept_iota(node: fx.Node, operands: Sequence[Axes]) -> Any:
    """``x + 0``, ``x * 1`` and casts between integers keep a value its own index."""
    if len(operands) != 1:
        return None
    name = str(node.target).split(".")[1]
    scalars = [a for a in node.args[1:] if isinstance(a, (int, float))]
    keeps = {"add": [0], "sub": [0], "mul": [1]}.get(name)
    integral = not node.meta["val"].dtype.is_floating_point
    return operands[0].iota if keeps is not None and scalars == keeps and integral else None


# Pointwise operators that bear no tag in ATen.
UNTAGGED: dict[Any, Callable[..., Axes]] = {
    getattr(torch.ops.aten, name): pointwise
    for name in (
        "__and__",
        "__or__",
        "__xor__",
        "type_as",
        "masked_fill",
        "where",
        "floor_divide",
        "gelu",
        "silu",
        "clamp",
        "softplus",
    )
}
