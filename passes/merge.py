"""Pass 9, fuse: linear layers that read the same rows become one call, as query, key and value, or gate and up.

Before::  query = selective.linear(x, wq, bq); key = selective.linear(x, wk, bk)
After::   query, key = selective.linears(x, [wq, wk], [bq, bk])

The weights stay where the model has them: nothing is joined, so no copy takes memory or misses an update.  What is
saved is a call's own time, and the packing of x, which is done once; the results are the same to the bit.  Runs after
`lower`, since only the kernel that it chooses takes several weights; declines on a GPU, whose kernel does not (`join`).
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import fx

from selective_compile.passes.equal_values import first_of_equal
from selective_compile.passes.flat_graph import FlatGraph
from selective_compile.passes.lower_grouped import CASTS

ops = torch.ops.selective


def merge(flat: FlatGraph) -> int:
    """Returns how many layers went into calls with others."""
    if flat.device.type != "cpu":
        return 0
    graph = flat.module.graph
    merged = readers_of_same_rows(graph, ops.linear.default)
    for layers in merged:
        become_one(graph, layers)
    graph.eliminate_dead_code()  # rows that each layer had cast for itself
    flat.module.recompile()
    return sum(map(len, merged))


def readers_of_same_rows(graph: fx.Graph, target: Any) -> list[list[fx.Node]]:
    """Calls of ``target`` on the same rows, where several have weights and biases that are inputs, or are cast."""
    first, readers = first_of_equal(graph), defaultdict[Any, list[fx.Node]](list)
    for node in graph.nodes:
        if node.target is target and all(map(given, node.args[1:])):
            readers[first[node.args[0]]].append(node)
    return [layers for layers in readers.values() if len(layers) > 1]


def given(operand: fx.node.Argument) -> bool:
    """Whether it is there from the graph's start, where the first of several layers may be, or can be made there."""
    if isinstance(operand, fx.Node) and operand.target in CASTS:
        operand = operand.args[0]
    return operand is None or (isinstance(operand, fx.Node) and operand.op == "placeholder")


def become_one(graph: fx.Graph, layers: list[fx.Node]) -> None:
    first = layers[0]
    for operand in [operand for layer in layers for operand in layer.args[1:]]:
        if isinstance(operand, fx.Node) and operand.target in CASTS and first < operand:
            first.prepend(operand)
    with graph.inserting_before(first):
        weights, biases = ([layer.args[i] for layer in layers] for i in (1, 2))
        call = graph.call_function(ops.linears.default, (first.args[0], weights, biases))
        call.meta = {**first.meta, "val": [layer.meta["val"] for layer in layers]}
        for i, layer in enumerate(layers):
            output = graph.call_function(operator.getitem, (call, i))
            output.meta = layer.meta
            layer.replace_all_uses_with(output)
    for layer in layers:
        graph.erase_node(layer)
