"""Pass 8: the LM head runs on the rows whose logits are asked for.

Before::  norm [1, T, h] -> linear [1, T, V] -> output
After::   norm [1, T, h] -> index_select(rows) [1, R, h] -> linear [1, R, V] -> output

The rows are selected as early as the output's own chain of single-input, token-wise nodes allows.  Declines (0) where
the output does not have exactly one dimension of T.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from selective_compile.passes.axes import size_expression
from selective_compile.passes.flat_graph import FlatGraph

aten = torch.ops.aten
HINT_ROWS = 6


def keep_sampled_rows(flat: FlatGraph) -> int:
    """Adds the placeholder ``logit_rows [R]`` behind the others; the single output then has R rows instead of T."""
    graph = flat.module.graph
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    (logits,) = output.args[0]
    point = earliest(flat, logits)
    if point is None or any(node.name == "logit_rows" for node in graph.nodes):
        return 0
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last):
        rows = graph.placeholder("logit_rows")
    with graph.inserting_after(point):
        chosen = graph.call_function(aten.index_select.default, (point, token_dim(flat, point), rows))
    point.replace_all_uses_with(chosen, delete_user_cb=lambda user: user is not chosen)
    with flat.symbols.mode:
        count = flat.symbols.size("rows", HINT_ROWS)
        flat.example_inputs.append(torch.empty([count], dtype=torch.int64, device=flat.device))
    graph.lint()
    flat.module.recompile()
    return 1


def earliest(flat: FlatGraph, node: fx.Node) -> fx.Node | None:
    """The furthest value back from ``node`` that alone leads to it and has one dimension of T all the way."""
    weights = weight_only(flat)
    if token_dim(flat, node) is None:
        return None
    while True:
        parents = [parent for parent in node.all_input_nodes if parent not in weights]
        if len(parents) != 1 or parents[0].op == "placeholder" or len(parents[0].users) != 1:
            return node
        if token_dim(flat, parents[0]) is None:
            return node
        if node.target in ATTENTION or any(isinstance(p.meta.get("val"), torch.SymInt) for p in node.all_input_nodes):
            return node
        node = parents[0]


ops = torch.ops.selective
ATTENTION = (ops.ragged_attention.default, ops.varlen_attention.default, ops.latent_attention.default)


def weight_only(flat: FlatGraph) -> set[fx.Node]:
    """Nodes computed from weights and constants alone."""
    placeholders = [node for node in flat.module.graph.nodes if node.op == "placeholder"]
    found = set(placeholders[: len(flat.weights)])
    for node in flat.module.graph.nodes:
        if node.op == "get_attr" or (node.op == "call_function" and all(p in found for p in node.all_input_nodes)):
            found.add(node)
    return found


def token_dim(flat: FlatGraph, node: fx.Node) -> Any:
    """The one dimension of size T, or None."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    total = flat.symbols.size("token", 0).node.expr
    sizes = [size_expression(size) for size in value.shape]
    symbolic = [i for i, size in enumerate(sizes) if size.free_symbols]
    return symbolic[0] if len(symbolic) == 1 and sizes[symbolic[0]] == total else None
