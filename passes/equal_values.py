"""Nodes that compute the same from the same: what a model has written for queries and for keys, or in each layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from selective_compile.passes.traced_graph import is_mutable, is_random


def first_of_equal(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each node the first one that is the same call of the same operator on equal nodes: it may be itself."""
    first: dict[fx.Node, fx.Node] = {}
    seen: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        first[node] = node
        if isinstance(node.target, torch._ops.OpOverload) and is_pure(node):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda given: first[given])
            key = (node.target, repr(args), repr(kwargs))  # a node's name is its own, and 1 is written unlike 1.0
            first[node] = seen.setdefault(key, node)
    return first


def is_pure(node: fx.Node) -> bool:
    """Whether a call gives the same for the same, and changes nothing."""
    return not is_mutable(node) and not is_random(node)
