"""The RMS norm of heads, read off the flat graph: ``x / sqrt(mean(x ** 2) + eps) * (weight + offset)``, over a head.

Precondition: it is over the last dimension, of the head's size, and its weight, if it has one, is of that size, so that
all heads share it.  Another norm, as over all heads together or with a mean that is subtracted, is not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from selective_compile.passes.gated_output import CASTS, argument_of, behind, is_call

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class HeadNorm:
    """``x`` has the shape of the norm's result; ``weight`` has as many elements as a head."""

    x: fx.Node
    weight: fx.Node | None
    eps: float
    offset: float

    @property
    def options(self) -> tuple[float, float]:
        return self.eps, self.offset


def head_norm(node: fx.Node, size: int) -> HeadNorm | None:
    """The norm that ``node`` is the result of, whose last dimension is a head of ``size``; None if it is of none."""
    if not isinstance(node.meta["val"].shape[-1], int) or node.meta["val"].shape[-1] != size:
        return None
    result = behind(node, CASTS)
    if is_call(result, aten.rms_norm.default):
        return of_call(result, size)
    bare = normed(result)
    if bare is not None:
        return HeadNorm(x=bare[0], weight=None, eps=bare[1], offset=0.0)
    for weight, other in orders(result, aten.mul.Tensor):
        found, bare = weight_of(weight, size), normed(behind(other, CASTS))
        if found is not None and bare is not None:
            return HeadNorm(x=bare[0], weight=found[0], eps=bare[1], offset=found[1])
    return None


def of_call(node: fx.Node, size: int) -> HeadNorm | None:
    arguments: list[Any] = [*node.args, None, None]
    x, shape, weight, eps = arguments[:4]
    if node.kwargs or list(shape) != [size] or not isinstance(eps, float):
        return None
    return HeadNorm(x=behind(x, CASTS), weight=weight, eps=eps, offset=0.0)


def normed(node: Any) -> tuple[fx.Node, float] | None:
    """x and eps of ``x * rsqrt(mean(x ** 2) + eps)``, or of ``x / sqrt(...)``."""
    found = [(x, root) for x, scale in orders(node, aten.mul.Tensor) if (root := inverse_root(scale)) is not None]
    if is_call(node, aten.div.Tensor) and not node.kwargs:
        found += [(node.args[0], argument_of(behind(node.args[1], CASTS), aten.sqrt.default))]
    for x, moment in found:
        for mean, eps in orders(behind(moment, CASTS), aten.add.Tensor):
            source = behind(x, CASTS)
            if isinstance(eps, float) and isinstance(source, fx.Node) and squared(behind(mean, CASTS)) is source:
                return source, eps
    return None


def inverse_root(node: Any) -> Any:
    scale = behind(node, CASTS)
    if is_call(scale, aten.pow.Tensor_Scalar) and scale.args[1] == -0.5:
        return scale.args[0]
    reciprocal = argument_of(scale, aten.reciprocal.default)
    return argument_of(scale, aten.rsqrt.default) or argument_of(reciprocal, aten.sqrt.default)


def squared(node: Any) -> Any:
    """What ``node`` is the mean square of, over its last dimension."""
    if not is_call(node, aten.mean.dim) or node.kwargs or len(node.args) != 3 or node.args[2] is not True:
        return None
    square, rank = behind(node.args[0], CASTS), node.meta["val"].dim()
    if list(node.args[1]) not in ([-1], [rank - 1]):
        return None
    if is_call(square, aten.mul.Tensor):
        left, right = (behind(factor, CASTS) for factor in square.args)
        return left if left is right else None
    power = is_call(square, aten.pow.Tensor_Scalar) and square.args[1] == 2
    return behind(square.args[0], CASTS) if power or is_call(square, aten.square.default) else None


def weight_of(node: Any, size: int) -> tuple[fx.Node, float] | None:
    """The weight and what is added to it, from ``weight``, ``1 + weight`` or a cast of these."""
    found = behind(node, CASTS)
    for weight, offset in orders(found, aten.add.Tensor):
        if isinstance(offset, (int, float)) and is_weight(behind(weight, CASTS), size):
            return behind(weight, CASTS), float(offset)
    return (found, 0.0) if is_weight(found, size) else None


def is_weight(node: Any, size: int) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    return all(isinstance(d, int) for d in value.shape) and value.shape[-1:].numel() == value.numel() == size


def orders(node: Any, target: Any) -> list[tuple[Any, Any]]:
    """Both orders of the two operands of a call of ``target``."""
    if not is_call(node, target) or node.kwargs or len(node.args) != 2:
        return []
    return [(node.args[0], node.args[1]), (node.args[1], node.args[0])]
