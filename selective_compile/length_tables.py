"""Whether something holds of all of a table that is made of a request's length and of constants alone.

    causal = torch.triu(torch.full((length, length), -math.inf), diagonal=1)
    if (mask == causal).all(): ...

``nn.TransformerEncoder`` asks this of each mask.  What such a table has in a place does not depend on how long the
request is, as no operator but `arange`, sizes and triangles is told: so what holds of all places of a long request
holds of those of a shorter one, and no place but those chosen is looked at, in a table that has these alone.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from selective_compile.passes.lengths import LARGEST, lengths_around

DENSE = 256  # every place up to here is looked at
OF_ALL = {torch.all, torch.any, "all", "any"}
CREATED = {torch.full, torch.ones, torch.zeros, "new_full", "new_ones", "new_zeros", "expand"}
TRIANGLES = {torch.triu: operator.ge, "triu": operator.ge, torch.tril: operator.le, "tril": operator.le}
COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
ELEMENTWISE = {
    *("logical_not", "logical_and", "logical_or", "logical_xor", "abs", "neg", "add", "sub", "mul", "clamp", "isinf"),
    *("masked_fill", "unsqueeze", "transpose", "clone", *COMPARED),
}
WITHIN = {
    *(getattr(torch, name) for name in (*ELEMENTWISE, "where", "zeros_like", "ones_like", "full_like")),
    *(getattr(operator, name) for name in (*COMPARED, "and_", "or_", "xor", "invert", "neg", "add", "sub", "mul")),
    *ELEMENTWISE,
    *("masked_fill_", "float", "bool", "int", "long", "to", "contiguous", "t", "where"),
    *(f"__{name}__" for name in (*COMPARED, "and", "or", "xor", "invert")),  # as torch 2.11 has them
}


def table_of(node: fx.Node) -> list[fx.Node] | None:
    """What ``node``, of a graph of Dynamo's, is made of, in order; None where it is not of a table, or of all of it."""
    if node.target not in OF_ALL or len(node.args) != 1 or node.kwargs:
        return None
    found, left = set(), [node]
    while left:
        each = left.pop()
        if each in found:
            continue
        found.add(each)
        if is_length(each):
            continue
        if each is not node and not is_known(each):
            return None
        left += each.all_input_nodes
    return [each for each in node.graph.nodes if each in found]


def is_length(node: fx.Node) -> bool:
    """Whether it is a request's number of tokens: the one size that is not static, of the trace's inputs."""
    value = node.meta.get("example_value")
    return isinstance(value, torch.SymInt) and value.node.expr.is_Symbol and not free_unbacked_symbols(value)


def is_known(node: fx.Node) -> bool:
    if node.target is torch.arange:
        return len(node.args) == 1 and node.kwargs.keys() <= {"dtype", "device"}
    if node.target in TRIANGLES:
        return all(isinstance(size, torch.SymInt) for size in node.all_input_nodes[0].meta["example_value"].shape[-2:])
    if node.target is operator.getitem:
        index = node.args[1]
        return all(each in (None, slice(None)) for each in (index if isinstance(index, tuple) else (index,)))
    sized = any(map(is_length, node.all_input_nodes))
    return node.op != "placeholder" and node.target in (CREATED if sized else CREATED | WITHIN)


def holds_of_places(nodes: Sequence[fx.Node], length: int) -> bool:
    """What the last of `table_of` gives for a request of ``length`` tokens."""
    constants = {abs(each) for node in nodes for each in numbers_of(node)}
    counts = [count for count in lengths_around(constants, 1, dense=DENSE, largest=LARGEST) if count <= length]
    places = torch.tensor(counts, dtype=torch.int64, device="cpu") - 1
    values: dict[fx.Node, Any] = {}
    for node in nodes:
        values[node] = len(counts) if is_length(node) else value_of(node, values, places)
    return bool(values[nodes[-1]])


def value_of(node: fx.Node, values: dict[fx.Node, Any], places: Tensor) -> Any:
    given: Any = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    args, kwargs = given
    if "device" in kwargs or node.target in (torch.full, torch.ones, torch.zeros):
        kwargs = {**kwargs, "device": "cpu"}
    args = tuple("cpu" if isinstance(arg, torch.device) else arg for arg in args)
    if node.target is torch.arange:
        return places.to(kwargs.get("dtype") or torch.int64)
    if node.target in TRIANGLES:
        table, diagonal = args[0], kwargs.get("diagonal", args[1] if len(args) > 1 else 0)
        kept = TRIANGLES[node.target](places - places[:, None], diagonal)
        return torch.where(kept, table, torch.zeros_like(table))
    call: Any = getattr(type(args[0]), str(node.target)) if node.op == "call_method" else node.target
    return call(*args, **kwargs)


def numbers_of(node: fx.Node) -> list[int]:
    found: list[int] = []
    given = (node.args, node.kwargs)
    torch.utils._pytree.tree_map_only(int, lambda number: found.append(int(number)), given)
    return found
