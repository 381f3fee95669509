"""Part of pass 1: a softmax that is written out is that operator.

Before::  e = exp(x - amax(x, -1, keepdim)); e / sum(e, -1, keepdim)
          exp(x - logsumexp(x, -1, keepdim)); exp(log_softmax(x, -1))
After::   softmax(x, -1)

As in courses that build it up from its formula.  Declines where nothing is taken off before the exponential, which
then overflows for scores that a softmax has a number for; and in 16 bits, where each step is rounded.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from selective_compile.passes.folded_calls import fold_calls
from selective_compile.passes.gated_output import is_call
from selective_compile.passes.traced_graph import arguments_of

aten = torch.ops.aten
WIDE = (torch.float32, torch.float64)


def fold_softmaxes(module: fx.GraphModule) -> int:
    """Returns how many there were."""
    return fold_calls(module, aten.softmax.int, written_out)


def written_out(node: fx.Node) -> tuple[fx.Node, int] | None:
    """What ``node`` is the softmax of, and along which dimension; None if it is none."""
    if node.target is aten.exp.default:
        return of_logarithms(node.args[0])
    if node.target is not aten.div.Tensor or node.kwargs:
        return None
    raised, total = node.args
    if not is_call(raised, aten.exp.default) or not is_call(total, aten.sum.dim_IntList):
        return None
    difference = raised.args[0]  # type: ignore[union-attr]
    dim = one_dimension(total)
    if not is_call(difference, aten.sub.Tensor) or difference.kwargs or dim is None or total.args[0] is not raised:  # type: ignore[union-attr]
        return None
    x, largest = difference.args  # type: ignore[union-attr]
    if is_call(largest, operator.getitem) and largest.args[1] == 0 and is_call(largest.args[0], aten.max.dim):  # type: ignore[union-attr]
        largest = largest.args[0]  # type: ignore[union-attr]
    elif not is_call(largest, aten.amax.default):
        return None
    same = largest.args[0] is x and one_dimension(largest) == dim  # type: ignore[union-attr]
    return (x, dim) if same and node.meta["val"].dtype in WIDE else None  # type: ignore[return-value]


def of_logarithms(node: Any) -> tuple[fx.Node, int] | None:
    """What the exponentials of ``node`` are the softmax of."""
    if is_call(node, aten.log_softmax.int):
        x, dim, *dtype = arguments_of(node)
        return (x, dim) if not any(dtype) and not node.kwargs and node.meta["val"].dtype in WIDE else None
    if not is_call(node, aten.sub.Tensor) or node.kwargs or node.meta["val"].dtype not in WIDE:
        return None
    x, total = node.args
    dim = one_dimension(total) if is_call(total, aten.logsumexp.default) else None
    return (x, dim) if dim is not None and total.args[0] is x else None


def one_dimension(node: Any) -> int | None:
    """The dimension that a reduction works along and keeps, counted from the last, which is -1; None for any other."""
    source, dims, keeps, *rest = [*arguments_of(node), False, False][:4]
    dims = [dims] if isinstance(dims, int) else dims
    if keeps is not True or any(rest) or node.kwargs or len(dims) != 1:
        return None
    rank = source.meta["val"].dim()
    return int(dims[0] % rank - rank)
