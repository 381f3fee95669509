"""Heads that are equal though they were computed with after they were repeated, as keys are that are rotated then.

Before::  key = rotated(expand(k [B, S, K, 1, D], [B, S, K, H / K, D])), value = expand(v)     H heads of each are kept
After::   the same key, of which the operand is one of each H / K heads                         K heads are

How it is proved: elements are given numbers, and equal numbers stand for equal values.  What is moved keeps its number;
what a pointwise operator makes has a new one for each combination of its arguments' numbers; what any other makes, and
all that comes from outside, has one of its own for each element.  So a norm of heads that were repeated hides it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from selective_compile.passes.attention_calls import Operand
from selective_compile.passes.elements import JOINS, MOVEMENTS, SPLITS
from selective_compile.passes.evaluate import evaluate, leaves
from selective_compile.passes.heads import CASTS, PROBE_TOKENS, Unreadable, sizes_of
from selective_compile.passes.rules_pointwise import UNTAGGED
from selective_compile.passes.token_axes import is_pointwise
from selective_compile.passes.traced_graph import TracedGraph

# Nodes in front of an attention among which heads are repeated, if they are; a rotary embedding and its tables have 25.
NEAR = 100


def equal_heads(traced: TracedGraph, operand: Operand, heads: int) -> Operand | None:
    """``operand`` with so many ``heads``, each for as many consecutive ones that equal it; None if they may differ."""
    if operand.heads == heads:
        return operand
    every, rest = divmod(operand.heads, heads)
    if rest:
        return None
    try:
        numbers = Numbers(traced).of(operand.node)
    except Unreadable:
        return None
    groups = numbers.permute(*operand.order).reshape(PROBE_TOKENS, heads, every, operand.head_size)
    equal = torch.equal(groups, groups[:, :, :1].expand_as(groups))
    return replace(operand, heads=heads, every=every) if equal else None


class Numbers:
    """Numbers elements, of which no two are equal that were given to different ones."""

    def __init__(self, traced: TracedGraph) -> None:
        self.traced, self.given = traced, 0

    def of(self, node: fx.Node) -> Tensor:
        """In the shape of ``node``, of one request.  Raises `Unreadable`."""
        first: dict[fx.Node, Tensor] = {}
        found = [node]
        for place, current in enumerate(found):  # which grows: the nearest come first
            sizes = sizes_of(self.traced, current)
            if place < NEAR and is_read(current):
                found += [parent for parent in tensors_of(current) if parent not in found]
            else:
                first[current] = self.new(sizes)
        return evaluate(self.traced, node, batch=1, tokens=PROBE_TOKENS, given=first, instead=self.made)

    def new(self, sizes: Sequence[int]) -> Tensor:
        """A number for each element."""
        self.given += prod(sizes)
        return torch.arange(self.given - prod(sizes), self.given, device="cpu").reshape(sizes)

    def made(self, node: fx.Node, arguments: tuple[Any, ...]) -> Tensor | None:
        """Those of what ``node`` makes of numbered elements; None where it moves their numbers itself."""
        if is_movement(node):
            return None
        if packet_of(node) in CASTS:  # of a second tensor they read the type
            return self.combined(arguments[:1])
        return self.combined([each for each in leaves(arguments) if isinstance(each, Tensor)])

    def combined(self, parts: Sequence[Tensor]) -> Tensor:
        """A new number for each combination of those that meet at a place."""
        found, *others = torch.broadcast_tensors(*parts)
        found = found.unique(return_inverse=True)[1]
        for other in others:
            found = (found * (other.max() + 1) + other).unique(return_inverse=True)[1]
        self.given += found.numel()
        return found + self.given - found.numel()


def is_read(node: fx.Node) -> bool:
    """Whether an operator moves elements, or makes each of the ones at its place, and of no others."""
    parents, packet = tensors_of(node), packet_of(node)
    if node.target is operator.getitem:
        return packet_of(parents[0]) in SPLITS
    if is_movement(node):
        return len(parents) == 1 or node.target in JOINS  # else a tensor says where to
    named = any(isinstance(each, fx.Node) for each in leaves(node.kwargs))
    return bool(parents) and not named and (packet in CASTS or packet in UNTAGGED or is_pointwise(node))


def is_movement(node: fx.Node) -> bool:
    return packet_of(node) in MOVEMENTS or node.target in (*JOINS, operator.getitem)


def packet_of(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


def tensors_of(node: fx.Node) -> list[fx.Node]:
    return [each for each in node.all_input_nodes if isinstance(each.meta.get("val"), (Tensor, list, tuple))]
