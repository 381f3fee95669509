"""Before tails: the last token is taken out behind what is computed of it, and not in front.

Before::  index(x [B, S, h], [None, [-1]]) [B, 1, h] -> linear [B, 1, V] -> output      (a head for it alone)
After::   x [B, S, h] -> linear [B, S, V] -> slice(1, -1, end) [B, 1, V] -> output

The two are one wherever all in between treats tokens independently, which pass 2 proves of what now goes over all of
them, and computes the same whatever the number of a token is; so these are operators of single tokens alone (`ROWS`),
and none that counts tokens or looks at others, as a causal attention or a running sum, which later passes know how to
batch, but which of one token are something else.  The slice is a tail (`output_tails`), and `sampled_rows` has the head
run on the rows asked for.  Declines where something in between also reads what has a row for each request or token, or
where a size does not follow.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from selective_compile.passes.axes import is_symbolic, size_expression
from selective_compile.passes.evaluate import traced_value
from selective_compile.passes.output_tails import EVERYTHING, constant_slice
from selective_compile.passes.traced_graph import TracedGraph

aten = torch.ops.aten
# Beside pointwise operators, those that compute something of each row, or that move its numbers.
ROWS = (
    *(aten.linear, aten.matmul, aten.mm, aten.addmm, aten.layer_norm, aten.rms_norm),
    *(aten.softmax, aten._softmax, aten.log_softmax, aten._log_softmax),
    *(aten.mean, aten.sum, aten.var, aten.amax, aten.amin, aten.linalg_vector_norm),
    *(aten.to, aten._to_copy, aten.type_as, aten.clone, aten.contiguous, aten.alias, aten.detach, aten.dropout),
    *(aten.view, aten.reshape, aten._unsafe_view, aten.unsqueeze, aten.squeeze, aten.transpose, aten.permute),
    *(aten.expand, aten.slice, aten.select, aten.cat, aten.index_select, aten.flatten, aten.unflatten),
)
# What may only drop a dimension of one token.
DROPS = (aten.squeeze, aten.view, aten.reshape, aten._unsafe_view, aten.flatten)


@dataclass(kw_only=True)
class LastToken:
    """``node [B, 1, ...]`` is the last token of ``tokens [B, S, ...]`` along ``dim``; ``dropped``: it is [B, h]."""

    node: fx.Node
    tokens: fx.Node
    dim: int
    dropped: bool


def take_last_behind(traced: TracedGraph) -> int:
    """Moves what takes out the last token to the graph's outputs; how many there were."""
    found = [last for node in traced.graph.nodes if (last := last_token(traced, node)) is not None]
    for together in [found, *([last] for last in found)]:  # they may meet, and one of them may be used otherwise
        if together and Behind(traced=traced, found=together).move():
            traced.graph.eliminate_dead_code()
            traced.module.recompile()
            return len(together)
    return 0


def last_token(traced: TracedGraph, node: fx.Node) -> LastToken | None:
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    dim = TAKEN[node.target](traced, node) if node.target in TAKEN else None
    if dim is None:
        return None
    tokens: Any = node.args[0]
    shape, dropped = tokens.meta["val"].shape, node.target is aten.select.int
    if size_expression(shape[dim]) != traced.sizes.token or (dropped and (len(shape), dim) != (3, 1)):
        return None
    return LastToken(node=node, tokens=tokens, dim=dim, dropped=dropped)


def sliced_at(traced: TracedGraph, node: fx.Node) -> int | None:
    bounds = constant_slice(node)
    return bounds[0] % rank(node.args[0]) if bounds is not None and bounds[1:] == (-1, EVERYTHING, 1) else None


def selected_at(traced: TracedGraph, node: fx.Node) -> int | None:
    _, dim, place = node.args
    return dim % rank(node.args[0]) if place == -1 and isinstance(dim, int) else None


def indexed_at(traced: TracedGraph, node: fx.Node) -> int | None:
    indices: Any = node.args[1]
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    return given[0][0] if len(given) == 1 and is_last(traced, given[0][1]) else None


def index_selected_at(traced: TracedGraph, node: fx.Node) -> int | None:
    _, dim, index = node.args
    return dim % rank(node.args[0]) if isinstance(dim, int) and is_last(traced, index) else None


TAKEN = {
    aten.slice.Tensor: sliced_at,
    aten.select.int: selected_at,
    aten.index.Tensor: indexed_at,
    aten.index_select.default: index_selected_at,
}


def rank(node: Any) -> int:
    return int(node.meta["val"].dim())


def is_last(traced: TracedGraph, index: Any) -> bool:
    """Whether it is the constant ``[-1]``."""
    if not (isinstance(index, fx.Node) and index.op == "get_attr"):
        return False
    value = getattr(traced.module, str(index.target))
    return value.dtype == torch.int64 and value.tolist() == [-1]


class Declined(Exception):
    """What is computed of the last token is not the same of all."""


@dataclass(kw_only=True)
class Behind:
    """Goes from what was found to the outputs; the graph is changed when that went well.

    ``values`` are those of nodes when all tokens go through them, ``moved`` those that only drop the dimension of the
    last token, or put back one that was dropped.
    """

    traced: TracedGraph
    found: list[LastToken]
    values: dict[fx.Node, Any] = field(default_factory=dict)
    dropped: set[fx.Node] = field(default_factory=set)
    moved: list[fx.Node] = field(default_factory=list)

    def move(self) -> bool:
        before = len(self.guards)
        try:
            self.follow()
            places = self.places()
        except Declined:
            return False
        finally:
            del self.guards[before:]
        self.change(places)
        return True

    @property
    def guards(self) -> list[Any]:
        return self.mode.shape_env.guards

    @property
    def mode(self) -> Any:
        return self.found[0].tokens.meta["val"].fake_mode

    def follow(self) -> None:
        self.values = {last.node: last.tokens.meta["val"] for last in self.found}
        self.dropped = {last.node for last in self.found if last.dropped}
        for node in self.traced.graph.nodes:
            if node in self.values or node.op == "output" or self.values.keys().isdisjoint(node.all_input_nodes):
                continue
            self.require_no_rows(node)
            if self.is_restoring(node) or self.is_dropping(node):
                self.moved.append(node)
                self.values[node] = self.values[node.args[0]]
            else:
                self.compute(node)

    def require_no_rows(self, node: fx.Node) -> None:
        """Beside the last token nothing has rows: they would meet other rows, or those that it spreads over."""
        for given in node.all_input_nodes:
            if given not in self.values and has_rows(given.meta.get("val")):
                raise Declined

    def is_restoring(self, node: fx.Node) -> bool:
        return node.target is aten.unsqueeze.default and node.args[0] in self.dropped and node.args[1] in (1, -2)

    def is_dropping(self, node: fx.Node) -> bool:
        """As ``x[:, -1:].squeeze(1)``, behind which it is as selected."""
        given: Any = node.args[0]
        if getattr(node.target, "overloadpacket", None) not in DROPS or given in self.dropped or rank(given) != 3:
            return False
        requests, _, numbers = sizes(given.meta["val"])
        if given not in self.values or self.place_of(given, self.values[given]) != 1:
            return False
        if sizes(node.meta["val"]) != [requests, numbers]:
            return False
        self.dropped.add(node)
        return True

    def compute(self, node: fx.Node) -> None:
        if not is_of_rows(node.target) or not isinstance(node.meta.get("val"), torch.Tensor):
            raise Declined
        if not self.dropped.isdisjoint(node.all_input_nodes):
            self.dropped.add(node)
        count = len(self.guards)
        try:
            value = self.value_of(node)
        except Exception as error:  # an operator that does not take as many tokens
            raise Declined from error
        if len(self.guards) > count or not isinstance(value, torch.Tensor) or self.place_of(node, value) is None:
            raise Declined
        self.values[node] = value

    def value_of(self, node: fx.Node) -> Any:
        return traced_value(node, self.mode, lambda given: self.values.get(given, given.meta.get("val")))

    def place_of(self, node: fx.Node, value: torch.Tensor) -> int | None:
        """The dimension of tokens in ``value``, which is in all others as before; None where it is not so."""
        before, after = sizes(node.meta["val"]), sizes(value)
        if node in self.dropped:  # of more dimensions a number might name another one than before
            return 1 if len(before) == 2 and after == [before[0], self.traced.sizes.token, before[1]] else None
        changed = [dim for dim, (old, new) in enumerate(zip(before, after, strict=False)) if old != new]
        same = len(before) == len(after) and len(changed) == 1 and (before[changed[0]], after[changed[0]])
        return changed[0] if same == (1, self.traced.sizes.token) else None

    def places(self) -> dict[fx.Node, int]:
        """The outputs that are computed of the last token, with their dimensions of tokens."""
        results: Any = self.traced.output_node.args[0]
        found = {}
        for result in results:
            if result in self.values:
                place = None if result in self.dropped else self.place_of(result, self.values[result])
                if place is None:
                    raise Declined
                found[result] = place
        if not found:
            raise Declined
        return found

    def change(self, places: dict[fx.Node, int]) -> None:
        output, graph = self.traced.output_node, self.traced.graph
        for result, dim in places.items():
            value = result.meta["val"]
            with graph.inserting_before(output):
                cut = graph.call_function(aten.slice.Tensor, (result, dim, -1, EVERYTHING))
            cut.meta.update(result.meta, val=value)
            output.replace_input_with(result, cut)
        for node, value in self.values.items():
            node.meta["val"] = value
        for node in (*(last.node for last in self.found), *self.moved):
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            graph.erase_node(node)


def is_of_rows(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or target.overloadpacket in ROWS


def has_rows(value: Any) -> bool:
    return any(map(is_symbolic, value.shape)) if isinstance(value, torch.Tensor) else is_symbolic(value)


def sizes(value: torch.Tensor) -> list[Any]:
    return list(map(size_expression, value.shape))
