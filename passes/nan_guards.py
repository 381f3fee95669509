"""Part of pass 1: what makes zeros of weights that are not numbers is one operator, however it is written.

Before::  where(isnan(w), zeros_like(w), w), or masked_fill(w, w != w, 0), of w = softmax(...)
After::   nan_to_num(w, 0)

A row that sees no key has such weights, and what reads an attention knows that operator.  Weights are never infinite,
of which `nan_to_num` would make something else: so it is of a softmax alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from selective_compile.passes.folded_calls import fold_calls

aten = torch.ops.aten
SOFTMAX = (aten.softmax.int, aten._softmax.default)
CASTS = (aten.to.dtype, aten._to_copy.default, aten.clone.default)
ZEROS = (aten.zeros_like.default, aten.zeros.default)


def fold_nan_guards(module: fx.GraphModule) -> int:
    """Returns how many there were."""

    def read(node: fx.Node) -> tuple[Any, ...] | None:
        weights = guarded(node)
        return (weights, 0.0) if weights is not None and is_softmax(weights) else None

    return fold_calls(module, aten.nan_to_num.default, read)


def guarded(node: fx.Node) -> fx.Node | None:
    """What has zeros in ``node`` where it is not a number."""
    args: Any = node.args
    if node.target is aten.where.self:
        condition, zeros, weights = args
    elif node.target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        weights, condition, zeros = args
    else:
        return None
    if not tells_nan(condition, weights) or not is_zero(zeros):
        return None
    before, behind = weights.meta["val"], node.meta["val"]
    return weights if behind.dtype == before.dtype and list(behind.shape) == list(before.shape) else None


def tells_nan(condition: fx.Node, weights: fx.Node) -> bool:
    """Nothing else is unequal to itself."""
    if condition.target is aten.isnan.default:
        return condition.args[0] is weights
    return condition.target is aten.ne.Tensor and condition.args == (weights, weights)


def is_zero(value: Any) -> bool:
    if isinstance(value, fx.Node) and value.op == "get_attr":
        constant: Any = getattr(value.graph.owning_module, str(value.target))
        return isinstance(constant, Tensor) and constant.numel() == 1 and constant.item() == 0
    if isinstance(value, fx.Node):
        return value.target in ZEROS or (value.target is aten.scalar_tensor.default and is_zero(value.args[0]))
    return bool(isinstance(value, (int, float)) and value == 0)


def is_softmax(node: fx.Node) -> bool:
    while node.target in CASTS:
        node = node.args[0]  # type: ignore[assignment]
    return node.target in SOFTMAX
