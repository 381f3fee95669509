"""What a model's code asks of its own buffers alone: answered by the values that they have while Dynamo traces.

    if self.freqs_cos[0, 0] == 0: ...  # tables that were lost where the model was made without memory

What is asked must be made of elements by functions that nothing else decides, and no call may write to the buffers, so
that each gets the same answer as long as the buffers keep their values.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from selective_compile.length_tables import is_in_place, nodes_in

NAMES = {
    *("eq", "ne", "lt", "le", "gt", "ge", "all", "any", "sum", "max", "min", "amax", "amin", "isnan", "isinf"),
    *("isfinite", "abs", "neg", "logical_not", "logical_and", "logical_or", "invert", "and", "or", "getitem"),
    *("bool", "float", "int", "long", "clone", "detach", "flatten", "view", "reshape", "squeeze", "unsqueeze"),
}
FUNCTIONS = {
    getattr(module, name): name.strip("_")
    for module in (torch, operator)
    for name in (*NAMES, "and_", "or_")
    if hasattr(module, name)
}


@dataclass(frozen=True, kw_only=True)
class BufferQuestion:
    """``nodes``: what the last of them is made of, in order; ``buffers``: those of the model that are among them."""

    nodes: tuple[fx.Node, ...]
    buffers: Mapping[fx.Node, Tensor]

    def holds(self) -> bool:
        """Raises whatever an operator raises."""
        values: dict[fx.Node, Any] = dict(self.buffers)
        for node in self.nodes:
            if node not in values:
                given: Any = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                call: Any = node.target
                if node.op == "call_method":
                    call = getattr(type(given[0][0]), str(node.target))
                values[node] = call(*given[0], **given[1])
        return bool(values[self.nodes[-1]])


def question_of(node: fx.Node, buffers: Collection[int]) -> BufferQuestion | None:
    """What ``node``, of a graph that Dynamo makes, asks of ``buffers``, which are known by their identity; None where
    it asks anything of anything else."""
    found, left = set[fx.Node](), [node]
    given: dict[fx.Node, Tensor] = {}
    while left:
        each = left.pop()
        if each in found:
            continue
        found.add(each)
        if each.op == "placeholder":
            value = getattr(each.meta.get("grapharg"), "example", None)
            if not isinstance(value, Tensor) or id(value) not in buffers:
                return None
            given[each] = value
        elif not is_of_elements(each):
            return None
        left += each.all_input_nodes
    return BufferQuestion(nodes=tuple(each for each in node.graph.nodes if each in found), buffers=given)


def is_of_elements(node: fx.Node) -> bool:
    if not nodes_in(node.args) or "out" in node.kwargs or is_in_place(node):
        return False
    name = str(node.target).strip("_") if node.op == "call_method" else FUNCTIONS.get(node.target, "")
    return node.op in ("call_method", "call_function") and name in NAMES
