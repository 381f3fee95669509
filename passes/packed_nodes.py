"""Nodes of a graph as plain data: arguments by their numbers, operators and functions by where Python finds them."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

# What stands in arguments beside nodes.
PLAIN = (bool, int, float, complex, str, type(None), type(Ellipsis))
OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class Reference:
    """In the arguments of a node: the node before it with this number."""

    number: int


@dataclass(frozen=True)
class Operator:
    """One of PyTorch's, which has no place where Python would find it; without an overload, all of its overloads."""

    namespace: str
    name: str
    overload: str | None


@dataclass(frozen=True)
class PackedCall:
    """What a node calls on what."""

    op: str
    name: str
    target: Any
    args: Any
    kwargs: Any


def packed_call(node: fx.Node, numbers: Mapping[fx.Node, int], own: Container[str] = ()) -> PackedCall:
    """``numbers`` of the nodes in front of it; ``own``: tensors that the graph has beside its nodes.

    Raises:
        ValueError: something in it is not plain: a tensor or module of the graph's own, or an argument.
    """
    if node.op == "call_module" or (node.op == "get_attr" and node.target not in own):
        raise ValueError(f"a graph must have nothing of its own, got {node.target!r}")

    def plain(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return Reference(numbers[value])
        if isinstance(value, (*PLAIN, *OF_TORCH)):
            return value
        raise ValueError(f"arguments must be nodes and plain values, got {type(value).__name__}")

    return PackedCall(
        op=node.op,
        name=node.name,
        target=packed_target(node.target),
        args=fx.node.map_aggregate(node.args, plain),
        kwargs=fx.node.map_aggregate(node.kwargs, plain),
    )


def unpacked_call(call: PackedCall, graph: fx.Graph, made: Sequence[fx.Node]) -> fx.Node:
    """A node at the end of ``graph``, whose nodes in front of it are ``made``."""

    def live(value: Any) -> Any:
        return made[value.number] if isinstance(value, Reference) else value

    args, kwargs = fx.node.map_aggregate(call.args, live), fx.node.map_aggregate(call.kwargs, live)
    return graph.create_node(call.op, unpacked_target(call.target), args, kwargs, call.name)


def packed_target(target: Any) -> Any:
    if isinstance(target, OpOverload):
        namespace, name = target._schema.name.split("::")
        return Operator(namespace, name, target._overloadname)
    if isinstance(target, OpOverloadPacket):
        namespace, name = target._qualified_op_name.split("::")
        return Operator(namespace, name, None)
    return target


def unpacked_target(target: Any) -> Any:
    if isinstance(target, Operator):
        packet = getattr(getattr(torch.ops, target.namespace), target.name)
        return packet if target.overload is None else getattr(packet, target.overload)
    return target
