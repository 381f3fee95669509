"""Pass 9, fuse: on a GPU linear layers that read the same rows become one product, as query, key and value.

Before::  query = aten.linear(x, wq, bq); key = aten.linear(x, wk, bk)
After::   query, key = aten.split_with_sizes(aten.linear(x, w, b), [N of wq, N of wk], -1)

The joined weight and bias are inputs behind all others, `FlatGraph.joined` says of which weights; the model's own lie
in them (`joined_weights`).  Precondition: each weight is read by one layer alone, either all have biases or none, and
the results of each begin at an aligned address in a row.  It takes what is left to the library: on a CPU, and of a
batch-invariant engine, layers have gone to kernels of ours by now (`lower`), of which the CPU's reads several weights
where they lie (`merge`).  Declines for weights of a class of their own, and for those whose memory somebody else holds.

What it saves is launches, two in a layer's attention and one in its MLP, and that small products, as of keys, fill
little of a device by themselves; it is not measured.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from selective_compile.joined_weights import ALIGNMENT, can_be_joined
from selective_compile.passes.axes import size_expression
from selective_compile.passes.flat_graph import FlatGraph
from selective_compile.passes.known_values import KnownValues
from selective_compile.passes.merge import readers_of_same_rows

aten = torch.ops.aten


def join(flat: FlatGraph) -> int:
    """Returns how many layers went into products with others."""
    weights = dict(zip(flat.module.graph.nodes, range(len(flat.weights)), strict=False))
    values, joined, parts = KnownValues(flat.symbols.mode), [], []
    for readers in readers_of_same_rows(flat.module.graph, aten.linear.default):
        for layers in joinable(flat, readers, weights):
            joined.append(layers)
            parts += become_one(flat, layers, weights, values)
    follow_strides(flat, parts, values)
    flat.module.graph.lint()
    flat.module.recompile()
    return sum(map(len, joined))


def joinable(flat: FlatGraph, readers: Sequence[fx.Node], weights: dict[fx.Node, int]) -> list[list[fx.Node]]:
    """Those of the layers that become one: all that have biases, and all that have none."""
    groups: dict[bool, list[fx.Node]] = defaultdict(list)
    for layer in readers:
        alone = all(node in weights and len(node.users) == 1 for node in operands(layer))
        if alone and row_bytes(layer) % ALIGNMENT == 0:
            groups[len(operands(layer)) > 1].append(layer)
    return [layers for layers in groups.values() if len(layers) > 1 and have_memory(flat, layers, weights)]


def have_memory(flat: FlatGraph, layers: Sequence[fx.Node], weights: dict[fx.Node, int]) -> bool:
    """Whether weights, and biases, can lie one behind the other."""
    for given, dims in zip(zip(*map(operands, layers), strict=True), (2, 1), strict=False):
        tensors: list[Any] = [flat.weights[weights[node]].example for node in given]
        if any(tensor.dim() != dims for tensor in tensors) or not can_be_joined(tensors):
            return False
    return True


def row_bytes(layer: fx.Node) -> int:
    value = layer.meta["val"]
    return int(value.shape[-1]) * value.dtype.itemsize


def operands(layer: fx.Node) -> list[Any]:
    """Weight and, if there is one, bias."""
    return [operand for operand in layer.args[1:] if operand is not None]


def become_one(
    flat: FlatGraph, layers: Sequence[fx.Node], weights: dict[fx.Node, int], values: KnownValues
) -> list[fx.Node]:
    """The parts of the product in their places."""
    graph, first = flat.module.graph, layers[0]
    given = [add_input(flat, nodes, weights) for nodes in zip(*map(operands, layers), strict=True)]
    sizes = [layer.args[1].meta["val"].shape[0] for layer in layers]  # type: ignore[union-attr]
    with graph.inserting_before(first):
        product = computed(graph, values, aten.linear.default, first.args[0], *given)
        whole = computed(graph, values, aten.split_with_sizes.default, product, sizes, -1)
        parts = [computed(graph, values, operator.getitem, whole, place) for place in range(len(layers))]
    product.meta = {**first.meta, **product.meta}
    for layer, part in zip(layers, parts, strict=True):
        part.meta = {**layer.meta, **part.meta}
        layer.replace_all_uses_with(part)
        graph.erase_node(layer)
    return parts


def add_input(flat: FlatGraph, nodes: Sequence[fx.Node], weights: dict[fx.Node, int]) -> fx.Node:
    """``[sum N, ...]`` of weights ``[N, ...]``."""
    graph, values = flat.module.graph, [node.meta["val"] for node in nodes]
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last):
        given = graph.placeholder(f"{nodes[0].name}_joined")
    with flat.symbols.mode:
        shape = [sum(value.shape[0] for value in values), *values[0].shape[1:]]
        given.meta["val"] = torch.empty(shape, dtype=values[0].dtype, device=values[0].device)
    flat.example_inputs.append(given.meta["val"])
    flat.joined += (tuple(weights[node] for node in nodes),)
    return given


def follow_strides(flat: FlatGraph, parts: Sequence[fx.Node], values: KnownValues) -> None:
    """Parts have the strides of the whole, and so may what is computed of them, as later passes read."""
    others = set(parts)
    for node in flat.module.graph.nodes:
        if node.op != "call_function" or node in parts or others.isdisjoint(node.all_input_nodes):
            continue
        value = values.of(node)
        if strides(value) != strides(node.meta.get("val")):
            node.meta["val"] = value
            others.add(node)


def strides(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return list(map(strides, value))
    return [*map(size_expression, value.stride())] if isinstance(value, torch.Tensor) else None


def computed(graph: fx.Graph, values: KnownValues, target: Any, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = values.of(node)
    return node
