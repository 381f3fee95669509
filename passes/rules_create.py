"""Transfer rules for operators that make new values: constants and index ranges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from selective_compile.passes.axes import Axes, Axis, Mixes, Sizes, is_symbolic

aten = torch.ops.aten
AxesOf = Callable[[Any], Axes]


def filled(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    """One value everywhere, so any dimension of the batch's or the tokens' size may be called by that name."""
    values = [a for a in (*node.args[1:], *node.kwargs.values()) if isinstance(a, fx.Node)]
    if any(is_symbolic(a.meta["val"]) for a in values):
        raise Mixes("fills with the number of tokens or requests, which is not known of one token")
    return Axes(dims=tuple(sizes.dim(size) for size in node.meta["val"].shape))


def arange(node: fx.Node, axes_of: AxesOf, sizes: Sizes) -> Axes:
    """``arange(S)`` numbers the tokens of a request; ``arange(B)`` the requests; ``arange(B * S * k)`` all rows."""
    dim = sizes.dim(node.meta["val"].shape[0])
    labelled = any(isinstance(factor, Axis) for factor in dim)
    from_zero = node.target is aten.arange.default or (node.target is aten.arange.start and node.args[0] == 0)
    if labelled and not from_zero:
        raise Mixes("numbers tokens from a start that is not 0")
    return Axes(dims=(dim,), numbers=dim if labelled else ())


CREATIONS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.zeros, aten.ones, aten.full, aten.empty, aten.scalar_tensor), filled),
    **dict.fromkeys((aten.new_ones, aten.new_zeros, aten.new_full, aten.new_empty), filled),
    **dict.fromkeys((aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like), filled),
    aten.arange: arange,
}
