"""Weights that a step reads as a type of fewer bits, as under autocast, are cast once and not in every step.

Before::  aten.linear(x, aten.to(weight, bfloat16))
After::   aten.linear(x, weight_bfloat16)

What is cast is an input behind all others, `FlatGraph.cast` says of which weights, and is made anew when these change
(`cast_weights`).  It is memory beside the model's; a step that casts reads each number in more bits, and writes and
reads it once more.  Declines for casts to as many bits or more, which would take memory to read more, and for weights
of a class of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from selective_compile.passes.flat_graph import Cast, FlatGraph
from selective_compile.passes.lower_grouped import CASTS
from selective_compile.tensor_state import class_of


def cast_once(flat: FlatGraph) -> int:
    """Returns how many weights are cast once from here on."""
    graph = flat.module.graph
    weights = dict(zip(graph.nodes, range(len(flat.weights)), strict=False))
    added: dict[Cast, fx.Node] = {}
    for node in [node for node in graph.nodes if is_narrowing(node, flat, weights)]:
        cast = Cast(weights[node.args[0]], node.meta["val"].dtype)
        if cast not in added:
            added[cast] = add_input(flat, node)
        node.replace_all_uses_with(added[cast])
        graph.erase_node(node)
    flat.cast = tuple(added)
    graph.lint()
    flat.module.recompile()
    return len(added)


def is_narrowing(node: fx.Node, flat: FlatGraph, weights: dict[fx.Node, int]) -> bool:
    if node.target not in CASTS or node.args[0] not in weights:
        return False
    weight: Any = flat.weights[weights[node.args[0]]].example  # type: ignore[index]
    value = node.meta["val"]
    if class_of(weight) is not Tensor or value.device != weight.device:
        return False
    both_of_floats = weight.is_floating_point() and value.is_floating_point()
    return both_of_floats and bool(value.dtype.itemsize < weight.dtype.itemsize)


def add_input(flat: FlatGraph, node: fx.Node) -> fx.Node:
    """With the shape and strides that the cast has in the graph."""
    graph, value = flat.module.graph, node.meta["val"]
    last = [each for each in graph.nodes if each.op == "placeholder"][-1]
    with graph.inserting_after(last):
        given = graph.placeholder(f"{node.args[0].name}_{str(value.dtype).removeprefix('torch.')}")  # type: ignore[union-attr]
    with flat.symbols.mode:
        given.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    flat.example_inputs.append(given.meta["val"])
    return given
