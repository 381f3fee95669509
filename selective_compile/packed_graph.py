"""A captured graph as plain data: without its model, and made one again for the model of another process.

Weights are told by their names in the model, sizes by their symbols, and operators by where Python finds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule

from selective_compile.captured import Captured
from selective_compile.live_settings import Read
from selective_compile.model_call import TOKEN_INPUTS
from selective_compile.named_tensors import all_tensors_of
from selective_compile.passes.lengths import CAPTURE_TOKENS
from selective_compile.passes.normalise import SOURCE, Symbols, source_name
from selective_compile.passes.packed_nodes import PackedCall, packed_call, unpacked_call
from selective_compile.trace_conditions import Condition

TEXTS = ("stack_trace", SOURCE)
VALUE = "example_value"


@dataclass(frozen=True)
class Size:
    symbol: str


@dataclass(frozen=True)
class Weight:
    name: str


@dataclass(frozen=True)
class Tokens:
    """An input that is none of the model's own; ``shape`` has symbols in it."""

    shape: tuple[int | str, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class PackedNode:
    call: PackedCall
    meta: Mapping[str, Any]
    given: Size | Weight | Tokens | None


@dataclass(frozen=True)
class PackedGraph:
    nodes: tuple[PackedNode, ...]
    ends: tuple[int, ...]
    asked: bool


def packed(captured: Captured, model: nn.Module) -> PackedGraph:
    """What ``captured``, of ``model``, is beside what it has read.

    Raises:
        ValueError: something in it is not plain: a tensor or module of its own, or a size that is no input.
    """
    names: dict[int, str] = {}
    for name, tensor in all_tensors_of(model):
        names.setdefault(id(tensor), name)
    examples = iter(captured.examples)
    numbers = {node: number for number, node in enumerate(captured.module.graph.nodes)}
    texts: dict[str, str] = {}  # of which there are few, as of a layer's lines: each is written once

    def node_of(node: fx.Node) -> PackedNode:
        stack = node.meta.get("nn_module_stack")
        meta: dict[str, Any] = {
            key: texts.setdefault(node.meta[key], node.meta[key]) for key in TEXTS if key in node.meta
        }
        if stack is not None:
            meta["nn_module_stack"] = {
                texts.setdefault(key, key): (texts.setdefault(path, path), texts.setdefault(str(kind), str(kind)))
                for key, (path, kind) in stack.items()
            }
        return PackedNode(
            call=packed_call(node, numbers),
            meta=meta,
            given=given_by(node, next(examples), names) if node.op == "placeholder" else None,
        )

    nodes = tuple(map(node_of, captured.module.graph.nodes))
    return PackedGraph(nodes=nodes, ends=captured.ends, asked=captured.asked)


def given_by(node: fx.Node, example: Any, names: Mapping[int, str]) -> Size | Weight | Tokens:
    if isinstance(example, torch.SymInt):
        return Size(str(example.node.expr))
    if id(example) in names:
        return Weight(names[id(example)])
    source, value = source_name(node), node.meta[VALUE]
    if isinstance(example, Tensor) and source in TOKEN_INPUTS:
        sizes = tuple(size if isinstance(size, int) else str(size.node.expr) for size in value.shape)
        return Tokens(sizes, value.dtype, value.device)
    raise ValueError(f"an input must be of the model or tokens, got {source}")


def unpacked(graph: PackedGraph, model: nn.Module, read: Read, conditions: tuple[Condition, ...]) -> Captured:
    """The graph with the weights that ``model`` has."""
    tensors = dict(all_tensors_of(model))
    symbols = Symbols()
    made: list[fx.Node] = []
    examples: list[Any] = []
    result = fx.Graph()

    def value_of(given: Size | Weight | Tokens) -> tuple[Any, Any]:
        """What the node is said to be given, and an example of it."""
        if isinstance(given, Size):
            size = symbols.size(given.symbol, CAPTURE_TOKENS)
            return size, size
        if isinstance(given, Weight):
            tensor = tensors[given.name]
            return symbols.mode.from_tensor(tensor, static_shapes=True), tensor
        shape = [symbols.size(size, CAPTURE_TOKENS) if isinstance(size, str) else size for size in given.shape]
        with symbols.mode:
            fake = torch.empty(shape, dtype=given.dtype, device=given.device)
        numbers = [CAPTURE_TOKENS if isinstance(size, str) else size for size in given.shape]
        return fake, torch.ones(numbers, dtype=given.dtype, device=given.device)

    for node in graph.nodes:
        new = unpacked_call(node.call, result, made)
        new.meta = dict(node.meta)
        if node.given is not None:
            new.meta[VALUE], example = value_of(node.given)
            examples.append(example)
        made.append(new)
    result.lint()
    return Captured(
        module=_LazyGraphModule({}, result),
        examples=examples,
        ends=graph.ends,
        read=read,
        conditions=conditions,
        asked=graph.asked,
    )
