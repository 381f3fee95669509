"""Sinks that act on an attention's output: ``softmax(s) @ v * sigmoid(logsumexp(s) - sinks)``.

It is the softmax over the scores and one more, the sink, that no value belongs to: with ``Z = sum(exp(s))``, each
weight ``exp(s) / Z`` times ``Z / (Z + exp(sink))`` is ``exp(s) / (Z + exp(sink))``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from selective_compile.passes.axes import Axis
from selective_compile.passes.traced_graph import TracedGraph

aten = torch.ops.aten
CASTS = (aten.to, aten._to_copy, aten.clone, aten.contiguous, aten.type_as)


@dataclass(frozen=True, kw_only=True)
class GatedOutput:
    """The product with the gate, the sinks that it stands for (one for each head, broadcast), and the logsumexp."""

    node: fx.Node
    sinks: fx.Node
    covers: tuple[fx.Node, ...]


def gated_output(traced: TracedGraph, softmax: fx.Node, output: fx.Node) -> GatedOutput | None:
    """What multiplies the ``output`` of the attention around ``softmax``; None if that is no gate of sinks.

    ``output`` has its heads in the order of the scores, then tokens, then the size of a value.
    """
    users = [user for user in output.users if user in traced.axes]
    if len(users) != 1 or users[0].target is not aten.mul.Tensor or users[0].kwargs:
        return None
    (product,) = users
    (gate,) = [other for other in product.args if other is not output] or [None]
    dims = traced.axes[output].dims
    if not isinstance(gate, fx.Node) or traced.axes[gate].dims != (*dims[:-1], ()) or Axis.TOKEN in dims[-1]:
        return None
    difference = behind(argument_of(behind(gate, (*CASTS, aten.unsqueeze)), aten.sigmoid.default), CASTS)
    if not is_call(difference, aten.sub.Tensor) or difference.kwargs or traced.axes[difference].dims != dims[:-1]:
        return None
    total, sinks = (behind(part, CASTS) for part in difference.args)
    if not is_call(total, aten.logsumexp.default) or not isinstance(sinks, fx.Node):
        return None
    if behind(total.args[0], CASTS) is not behind(softmax.args[0], CASTS):
        return None
    return GatedOutput(node=product, sinks=sinks, covers=(total,))


def is_call(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is target


def argument_of(node: Any, target: Any) -> Any:
    return node.args[0] if is_call(node, target) else None


def behind(node: Any, operators: tuple[Any, ...]) -> Any:
    """What ``node`` only casts to another floating-point type, or moves."""
    while isinstance(node, fx.Node) and getattr(node.target, "overloadpacket", None) in operators:
        if not node.meta["val"].dtype.is_floating_point:
            return node
        node = node.args[0]
    return node
