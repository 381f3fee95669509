"""Before pass 2 of a padded call that was refused: what a model makes of whole rows at its end is taken off.

Before::  logits [B, S, V] -> slice, cross_entropy(., labels) -> output          (a loss)
          scores [B, S, 1] -> index(., [arange(B), argmax(ids != pad)]) -> output  (a reward)
After::   output(logits), output(scores), and the rest as a graph of its own, which is run on the padded result

What was refused has no meaning on the ragged batch; behind the last layer it needs none, as it costs little.  It may
read padding, which in the padded result is not what the model computes there: whoever runs it has to find out
(`selective_compile.padding_reads`), and so it must compute floating numbers of floating ones, with no comparison
between.  Declines where a layer or an attention is behind what was refused, and where it draws random numbers or writes
to a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from selective_compile.passes.axes import size_expression
from selective_compile.passes.refusals import Refusal
from selective_compile.passes.token_axes import has_tensor
from selective_compile.passes.traced_graph import TracedGraph, is_mutable, is_random

aten = torch.ops.aten
PRODUCTS = (aten.scaled_dot_product_attention, aten.matmul, aten.bmm, aten.baddbmm, aten.mm, aten.addmm)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """``module(*inputs, *rows)`` gives what was taken off.

    Attributes:
        inputs: their places among the arguments of the call.
        rows: their places among the outputs of what is left.
        results: for each output of the call, its place among the outputs of what is left and, behind them, those of
            ``module``.
    """

    module: fx.GraphModule
    inputs: tuple[int, ...]
    rows: tuple[int, ...]
    results: tuple[int, ...]

    @property
    def num_operations(self) -> int:
        return sum(node.op == "call_function" for node in self.module.graph.nodes)


def behind_layers(traced: TracedGraph, refusals: Iterable[Refusal]) -> set[str]:
    """The names of refused nodes that no layer or attention needs."""
    named = {refusal.node for refusal in refusals}
    needed = Parts.of(traced).needed
    return {node.name for node in traced.graph.nodes if node.name in named and is_tensors(node) and node not in needed}


def take_off_summary(traced: TracedGraph, refused: Collection[str]) -> Summary | None:
    """Changes the graph, which gives rows in place of what is made of them; None, and nothing, where that cannot be.

    Args:
        refused: names of nodes that are to be taken off, with all that is computed of them.
    """
    begin = {node for node in traced.graph.nodes if node.name in refused}
    return Taking.of(traced, begin).take() if begin else None


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Of a graph, what its layers ``needed``, and ``rows``: values of weights and of tokens."""

    needed: set[fx.Node]
    rows: set[fx.Node]

    @classmethod
    def of(cls, traced: TracedGraph) -> Parts:
        weights = (given.node for given in traced.inputs if given.place == "weight" and is_floating(given.node))
        weighty, tokens = closure(weights), closure(given.node for given in traced.tokens())
        layers = {node for node in weighty & tokens if is_layer(traced, node, weighty - tokens)}
        return cls(needed=closure(layers, lambda node: node.all_input_nodes), rows=weighty & tokens)

    def may_be_taken(self, node: fx.Node) -> bool:
        """Whether two runs of it give the same, and what comes of floating rows is floating itself."""
        if is_mutable(node) or is_random(node) or isinstance(node.target, torch._ops.HigherOrderOperator):
            return False
        return node not in self.rows or not is_tensor(node) or is_floating(node)


def closure(nodes: Iterable[fx.Node], following: Callable[[fx.Node], Iterable[fx.Node]] | None = None) -> set[fx.Node]:
    """They and all that is computed of them, or what else ``following`` leads to."""
    found: set[fx.Node] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.users if following is None else following(node)
    return found


def is_layer(traced: TracedGraph, node: fx.Node, weights: set[fx.Node]) -> bool:
    """Whether it computes something for each token with a weight, or of several tokens by a product."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    by_token = any(traced.sizes.token in size_expression(size).free_symbols for size in value.shape)
    product = getattr(node.target, "overloadpacket", None) in PRODUCTS
    return by_token and (product or not weights.isdisjoint(node.all_input_nodes))


def late_readers(traced: TracedGraph, needed: set[fx.Node]) -> Iterator[fx.Node]:
    """What reads ids, labels or masks behind the layers: the last would be refused on the ragged batch."""
    for given in traced.tokens():
        if not is_floating(given.node):
            yield from (user for user in given.node.users if user not in needed and is_tensor(user))


def is_tensors(node: fx.Node) -> bool:
    return node.op == "call_function" and has_tensor(node.meta.get("val"))


def is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def is_floating(node: fx.Node) -> bool:
    return is_tensor(node) and node.meta["val"].is_floating_point()


@dataclass(frozen=True, kw_only=True)
class Taking:
    """Takes nodes ``behind`` off the end."""

    traced: TracedGraph
    parts: Parts
    behind: set[fx.Node]

    @classmethod
    def of(cls, traced: TracedGraph, begin: set[fx.Node]) -> Taking:
        parts = Parts.of(traced)
        behind = closure(begin.union(late_readers(traced, parts.needed))) - {traced.output_node}
        return cls(traced=traced, parts=parts, behind=behind)

    def take(self) -> Summary | None:
        output = self.traced.output_node
        results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        taken = [result for result in results if result in self.behind]
        found = closure(taken, self.read_by)
        rows = [node for node in self.traced.graph.nodes if node in found and self.is_row(node)]
        copied = [node for node in self.traced.graph.nodes if node in found and node not in rows]
        if not rows or not self.parts.needed.isdisjoint(self.behind) or not self.may_take(rows, copied):
            return None
        inputs = [given for given in self.traced.inputs if given.node in found]
        module = self.module([given.node for given in inputs], rows, copied, taken)
        left = [result for result in results if result not in self.behind]
        left += [row for row in rows if row not in left]
        output.args = (tuple(left),)
        self.traced.graph.eliminate_dead_code()
        self.traced.module.recompile()
        return Summary(
            module=module,
            inputs=tuple(given.index for given in inputs),
            rows=tuple(map(left.index, rows)),
            results=tuple(map([*left, *taken].index, results)),
        )

    def may_take(self, rows: list[fx.Node], copied: list[fx.Node]) -> bool:
        dead = self.behind.difference(copied)  # what no output reads goes with the rest, unless it changes something
        return all(map(is_floating, rows)) and all(map(self.parts.may_be_taken, [*copied, *dead]))

    def is_row(self, node: fx.Node) -> bool:
        return node in self.parts.rows and node not in self.behind and is_tensor(node)

    def read_by(self, node: fx.Node) -> list[fx.Node]:
        return [] if self.is_row(node) else node.all_input_nodes

    def module(
        self, inputs: list[fx.Node], rows: list[fx.Node], copied: list[fx.Node], taken: list[fx.Node]
    ) -> fx.GraphModule:
        graph = fx.Graph()
        known = {node: graph.placeholder(node.name) for node in (*inputs, *rows)}
        for node in copied:
            if node not in known:
                known[node] = graph.node_copy(node, known.__getitem__)
        graph.output(tuple(known[node] for node in taken))
        return fx.GraphModule(self.traced.module, graph)
