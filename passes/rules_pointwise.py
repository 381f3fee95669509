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
    numbers = kept_numbers(node, operands)
    if not numbers and any(axes.opaque for axes in operands):
        raise Mixes("computes with the numbers by which tokens are reordered")
    return Axes(dims=dims, inputs=inputs, numbers=numbers)


def broadcast(shapes: Sequence[tuple[Dim, ...]]) -> tuple[Dim, ...]:
    aligned = zip_longest(*(reversed(dims) for dims in shapes), fillvalue=())
    return tuple(reversed([meet(column) for column in aligned]))


def meet(column: Sequence[Dim]) -> Dim:
    """The common factors of dimensions that are broadcast against each other."""
    present = {dim for dim in column if dim != ()}
    if len(present) > 1:
        raise Mixes(f"combines dimensions of different meaning: {sorted(map(str, present))}")
    return present.pop() if present else ()


def kept_numbers(node: fx.Node, operands: Sequence[Axes]) -> Dim:
    """``x + 0`` and ``x * 1`` keep a value a number; ``x // k`` is that of the row, if ``k`` of them make a row."""
    scalars = [a for a in node.args[1:] if isinstance(a, (int, float))]
    if len(operands) != 1 or len(scalars) != 1 or node.meta["val"].dtype.is_floating_point:
        return ()
    numbers, name = operands[0].numbers, str(node.target).split(".")[1]
    if (name, scalars[0]) in UNCHANGED:
        return numbers
    divides = name == "floor_divide" or (name == "div" and node.kwargs.get("rounding_mode") in ("floor", "trunc"))
    if divides and scalars[0] == 1:
        return numbers
    return numbers[:-1] if divides and numbers and numbers[-1] == scalars[0] else ()


UNCHANGED = (("add", 0), ("sub", 0), ("mul", 1))
# Pointwise operators that bear no tag in ATen.
UNTAGGED: dict[Any, Callable[..., Axes]] = {
    getattr(torch.ops.aten, name): pointwise
    for name in (
        "__and__",
        "__or__",
        "__xor__",
        "type_as",
        "masked_fill",
        "fill",
        "where",
        "floor_divide",
        "gelu",
        "silu",
        "log_sigmoid",
        "_prelu_kernel",
        "hardswish",
        "rsub",
        "complex",
        "real",
        "imag",
        "_conj",
        "resolve_conj",
        "clamp",
        "softplus",
        "copy",
        "polar",
        # Other names of operators that bear the tag.
        "multiply",
        "divide",
        "true_divide",
        "subtract",
        "negative",
        "absolute",
        "square",
        "clip",
        "greater",
        "greater_equal",
        "less",
        "less_equal",
        "not_equal",
    )
}
