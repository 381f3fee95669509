"""On Dynamo's graph: a call of `flex_attention` is written out as what it computes.

Before::  out, _, _ = flex_attention(q, k, v, score_mod, (..., mask_mod), scale, ...)
After::   scores = score_mod((q @ k.transpose(-2, -1)).float() * scale, b, h, i, j)
          out = where(mask_mod(b, h, i, j), scores, -inf).softmax(-1).to(q.dtype) @ v

Both functions are of numbers; here they run on all scores at once, and on indices that are broadcast.  Precondition:
each of their operators takes numbers to a number, or looks numbers up in a tensor from outside
(`vmapped.takes_numbers`); the mask is what its function says, of each head what it said of those that it was asked for,
and no blocks of somebody's own leave pairs out; nothing but the result is read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from selective_compile.flex_blocks import is_told_by_function
from selective_compile.passes.packed_trace import OF_SOURCE
from selective_compile.passes.refusals import Refusal, RefusedError, module_path, source_line
from selective_compile.passes.vmapped import NUMBERS, takes_numbers
from selective_compile.passes.watched_calls import alike, without_numbers

EXAMPLE = "example_value"
FLEX = torch.ops.higher_order.flex_attention
INDICES = 4  # of the request, the head, the query and the key


def write_out_flex(module: fx.GraphModule) -> int:
    """Returns how many calls there were.

    Raises:
        RefusedError: something else reads the blocks of a mask, which were not computed.
    """
    for node in module.graph.nodes:
        if is_told_by_function(node) and any(user.target is not FLEX for user in node.users):
            raise RefusedError([read_otherwise(node)])
    found = [call for node in list(module.graph.nodes) if (call := call_of(module, node)) is not None]
    for call in found:
        call.write_out()
    if found:
        module.recompile()
    return len(found)


@dataclass(frozen=True, kw_only=True)
class FlexCall:
    node: fx.Node
    query: fx.Node  # [B, H, S, D]
    key: fx.Node  # [B, K, S, D]
    value: fx.Node  # [B, K, S, Dv]
    scale: float
    score: Numbers
    shown: Numbers

    def write_out(self) -> None:
        """In front of it; what reads its result reads that of the product with the values."""
        query = self.query.meta[EXAMPLE]
        graph = self.node.graph
        write = Writer(self.node)
        with graph.inserting_before(self.node), torch.no_grad(), without_numbers([query]):
            key, value = (self._for_each_head(write, each) for each in (self.key, self.value))
            wide = torch.promote_types(query.dtype, torch.float32)
            left, right = write("to", self.query, wide), write(torch.transpose, write("to", key, wide), -2, -1)
            scores = write(operator.mul, write(torch.matmul, left, right), self.scale)
            places = [self._places(write, scores, dim) for dim in range(INDICES)]
            changed = self.score.written(write, [scores, *places])
            hidden = write(torch.where, self.shown.written(write, places), changed, -torch.inf)
            weights = write("to", write(torch.softmax, hidden, -1), query.dtype)
            result = write(torch.matmul, weights, value)
        for user in list(self.node.users):
            user.replace_all_uses_with(result)
            graph.erase_node(user)
        graph.erase_node(self.node)

    def _for_each_head(self, write: Writer, heads: fx.Node) -> fx.Node:
        times = self.query.meta[EXAMPLE].shape[1] // heads.meta[EXAMPLE].shape[1]
        return heads if times == 1 else write(torch.repeat_interleave, heads, times, 1)

    def _places(self, write: Writer, scores: fx.Node, dim: int) -> fx.Node:
        """Along one dimension of the scores."""
        count = scores.meta[EXAMPLE].shape[dim]
        count = count if isinstance(count, int) else write("size", scores, dim)
        numbers = write(torch.arange, count, dtype=torch.int32, device=scores.meta[EXAMPLE].device)
        return write("reshape", numbers, [-1 if each == dim else 1 for each in range(INDICES)])


def call_of(module: fx.GraphModule, node: fx.Node) -> FlexCall | None:
    """None for all else, and for a call that is to be left alone."""
    if node.target is not FLEX or not all(map(is_result, node.users)):
        return None
    query, key, value, score_mod, mask, scale, _, score_reads, mask_reads = node.args
    examples = [each.meta[EXAMPLE] for each in (query, key, value)]  # type: ignore[union-attr]
    batches = {str(example.shape[0]) for example in examples}
    if len(batches) > 1 or not is_told_by_function(mask[2]):  # type: ignore[index,arg-type]
        return None
    score = numbers_of(module, score_mod, score_reads, 1 + INDICES)
    shown = numbers_of(module, mask[-1], mask_reads, INDICES)  # type: ignore[index]
    asked, sizes = mask[2].meta[EXAMPLE].shape[:2], examples[0].shape  # type: ignore[index,union-attr]
    if score is None or shown is None or not isinstance(scale, float):
        return None
    if any(depends and given == 1 != size for depends, given, size in zip(shown.depends, asked, sizes, strict=False)):
        return None
    return FlexCall(node=node, query=query, key=key, value=value, scale=scale, score=score, shown=shown)  # type: ignore[arg-type]


def read_otherwise(node: fx.Node) -> Refusal:
    return Refusal(
        node=node.name,
        operator="blocks of a mask",
        reason="the blocks of a mask of flex_attention must be read by flex_attention alone",
        source_line=source_line(node),
        module=module_path(node),
    )


def is_result(user: fx.Node) -> bool:
    """And neither the logarithm of the sum nor the largest score."""
    return user.target is operator.getitem and bool(user.args[1] == 0)


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """A function of numbers: its graph, the node in it that is the result, and what it reads from outside."""

    graph: fx.Graph
    result: fx.Node
    reads: Sequence[Any]

    @property
    def depends(self) -> list[bool]:
        """Of each of what it is given, whether it reads that."""
        return [bool(node.users) for node in self.graph.nodes if node.op == "placeholder"]

    def written(self, write: Writer, given: Sequence[fx.Node]) -> fx.Node:
        """The function of tensors ``given``."""
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        known = dict(zip(placeholders, [*given, *map(write.wide, self.reads)], strict=True))
        for node in self.graph.nodes:
            if node.op in ("call_function", "call_method"):
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
                made = write(node.target, *args, **kwargs)
                known[node] = write.wide(made) if node.target in NUMBERS else made
        return known[self.result]


def numbers_of(module: fx.GraphModule, function: Any, reads: Any, given: int) -> Numbers | None:
    """None where it is not known to compute a number of numbers."""
    graph: fx.Graph = module.get_submodule(str(function.target)).graph  # type: ignore[assignment]
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    inside = set(placeholders[:given])
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.op not in ("call_function", "call_method") or not takes_numbers(node, inside):
            return None
        inside.add(node)
    (result,) = [node.args[0] for node in graph.nodes if node.op == "output"]
    result = result[0] if isinstance(result, (tuple, list)) else result
    if len(placeholders) != given + len(reads) or result not in inside:
        return None
    return Numbers(graph=graph, result=result, reads=reads)


class Writer:
    """Calls functions in a graph, with what they give without numbers, as from the source of a node."""

    def __init__(self, node: fx.Node) -> None:
        self._graph, self._meta = node.graph, {name: node.meta[name] for name in OF_SOURCE if name in node.meta}

    def __call__(self, function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> fx.Node:
        """Of a method its name."""
        values, named = fx.node.map_arg((args, kwargs), lambda given: alike(given.meta[EXAMPLE]))
        if isinstance(function, str):
            made, called = self._graph.call_method(function, args, kwargs), getattr(values[0], function)
            values = values[1:]
        else:
            made = self._graph.call_function(function, args, kwargs)
            called = function
        made.meta = {**self._meta, EXAMPLE: called(*values, **named)}
        return made

    def wide(self, read: Any) -> Any:
        """A number is one of as many dimensions, so that no type is chosen by which of them have some."""
        value = read.meta[EXAMPLE] if isinstance(read, fx.Node) else None
        is_number = isinstance(value, Tensor) and value.dim() == 0
        return self("reshape", read, [1] * INDICES) if is_number else read
