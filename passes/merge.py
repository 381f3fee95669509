"""Pass 9, fuse: linear layers that read the same rows become one call, as query, key and value, or gate and up.

Before::  query = selective.linear(x, wq, bq); key = selective.linear(x, wk, bk)
After::   query, key = selective.linears(x, [wq, wk], [bq, bk])

The weights stay where the model has them: nothing is joined, so no copy takes memory or misses an update.  What is
saved is a call's own time, and the packing of x, which is done once; the results are the same to the bit.  Runs after
`lower`, since only the kernel that it chooses takes several weights; declines on a GPU, whose kernel does not.
"""

from __future__ import annotations

import operator
from collections import defaultdict

import torch
from torch import fx

from selective_compile.passes.flatten import FlatGraph

ops = torch.ops.selective


def merge(flat: FlatGraph) -> int:
    """Returns how many layers went into calls with others."""
    if flat.device.type != "cpu":
        return 0
    graph = flat.module.graph
    readers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.target is ops.linear.default and given(node.args[1]) and given(node.args[2]):
            readers[node.args[0]].append(node)
    merged = [layers for layers in readers.values() if len(layers) > 1]
    for layers in merged:
        become_one(graph, layers)
    flat.module.recompile()
    return sum(map(len, merged))


def given(operand: fx.node.Argument) -> bool:
    """Whether it is there from the graph's start, where the first of several layers may be."""
    return operand is None or (isinstance(operand, fx.Node) and operand.op == "placeholder")


def become_one(graph: fx.Graph, layers: list[fx.Node]) -> None:
    first = layers[0]
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
