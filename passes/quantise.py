"""Of an engine with ``weights="int8"``: linear layers take their weights as int8 numbers with a scale for each row.

Before::  selective.linears(x, [wq, wk], [bq, bk])
After::   selective.linears_int8(x, [wq_int8, wk_int8], [wq_scales, wk_scales], [bq, bk])

The numbers and scales are inputs behind all others; `FlatGraph.quantised` says of which weights.  A tied weight is
quantised for the head, and stays what it is for the embedding; experts ``[E, N, K]`` have a scale for each row, and so
has what lies by columns, ``[K, N]`` or ``[E, K, N]``, for each of its columns: the numbers are ``[N, K]`` all the same.
Declines on other devices, for what is no linear layer on a weight, and for weights of 8 bits, which a layer casts:
numbers for them would take memory to be read less exactly.  Modules that run by themselves are called with the
model's own weights.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from selective_compile.grouped_ops import grouped_linear
from selective_compile.int8_ops import DTYPES, linears_int8
from selective_compile.passes.flat_graph import FlatGraph, Quantised
from selective_compile.passes.lower_grouped import CASTS, TRANSPOSITIONS, alike

ops = torch.ops.selective
LAYERS = (ops.linear.default, ops.linears.default, grouped_linear)


def quantise(flat: FlatGraph) -> int:
    """Returns how many weights are int8 from here on."""
    if flat.device.type != "cpu":  # where `lower` takes layers too, for a batch-invariant engine
        return 0
    graph = flat.module.graph
    weights = dict(zip(graph.nodes, range(len(flat.weights)), strict=False))
    layers = [node for node in graph.nodes if node.target in LAYERS]
    layers = [node for node in layers if all(source(weight, weights) is not None for weight in weights_of(node))]
    wanted = {weight: source(weight, weights) for node in layers for weight in weights_of(node)}
    added: dict[Any, tuple[fx.Node, fx.Node]] = {}
    for weight, quantised in wanted.items():
        if quantised not in added:
            added[quantised] = add_inputs(flat, weight)
    for node in layers:
        replace(graph, node, {weight: added[quantised] for weight, quantised in wanted.items()})
    flat.quantised = tuple(added)
    graph.eliminate_dead_code()  # what they were cast to
    graph.lint()
    flat.module.recompile()
    return len(added)


def source(weight: fx.Node, weights: Mapping[fx.Node, int]) -> Quantised | None:
    """Which of the ``weights`` it is, or is the transposition of; None if no numbers can stand for it."""
    value = weight.meta["val"]
    if value.dtype not in DTYPES or value.dim() not in (2, 3) or not value.shape[-1]:
        return None
    if weight in weights:
        return Quantised(weights[weight])
    if weight.target in CASTS and weight.args[0] in weights and has_more_bits(weight.args[0]):
        return Quantised(weights[weight.args[0]])  # type: ignore[index]
    given = weight.args[0] if weight.target in TRANSPOSITIONS else None
    if given not in weights or not alike(value, given.meta["val"].transpose(-2, -1)):  # type: ignore[union-attr]
        return None
    return Quantised(weights[given], by_columns=True)  # type: ignore[index]


def has_more_bits(weight: Any) -> bool:
    dtype = weight.meta["val"].dtype
    return bool(dtype.is_floating_point and dtype.itemsize > 1)


def weights_of(node: fx.Node) -> list[Any]:
    return list(node.args[1]) if node.target is ops.linears.default else [node.args[1]]  # type: ignore[arg-type]


def add_inputs(flat: FlatGraph, weight: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Numbers ``[N, K]`` and scales ``[N]``, or ``[E, N, K]`` and ``[E, N]``."""
    graph, shape = flat.module.graph, weight.meta["val"].shape
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last):
        scales = graph.placeholder(f"{weight.name}_scales")
    with graph.inserting_after(last):
        numbers = graph.placeholder(f"{weight.name}_int8")
    with flat.symbols.mode:
        for node, size, dtype in ((numbers, shape, torch.int8), (scales, shape[:-1], torch.float32)):
            node.meta["val"] = torch.empty(size, dtype=dtype, device=flat.device)
            flat.example_inputs.append(node.meta["val"])
    return numbers, scales


def replace(graph: fx.Graph, node: fx.Node, inputs: dict[fx.Node, tuple[fx.Node, fx.Node]]) -> None:
    if node.target is grouped_linear:
        x, weight, ends, _, *others = (*node.args, None)[: max(len(node.args), 4)]
        node.args = (x, inputs[weight][0], ends, inputs[weight][1], *others)  # type: ignore[index]
        return
    single = node.target is ops.linear.default
    numbers, scales = zip(*(inputs[weight] for weight in weights_of(node)), strict=True)
    with graph.inserting_before(node):
        biases = [node.args[2]] if single else node.args[2]
        call = graph.call_function(linears_int8, (node.args[0], list(numbers), list(scales), biases))
        call.meta = {**node.meta, "val": [node.meta["val"]] if single else node.meta["val"]}
        output = graph.call_function(operator.getitem, (call, 0)) if single else call
        output.meta = node.meta
        node.replace_all_uses_with(output)
    graph.erase_node(node)
