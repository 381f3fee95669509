"""Two graphs of one model, which took other sides of branches for longer requests, joined to one that chooses.

Before::  inv_freq = original_inv_freq          and     inv_freq = 1 / (long_factor * powers)
After::   inv_freq = where(seq_len > 4096, 1 / (long_factor * powers), original_inv_freq)

The code around a branch is the same, so that its nodes come in the same order: what both graphs have is there once,
what one has alone is computed for all requests, and of values of the two sides one is chosen where a node of both reads
them.  So the joined graph gives what the model gives, whatever the condition is: what is chosen is a new tensor, of the
same layout, and nobody writes to what it is chosen from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import Tensor, fx

from selective_compile.graph_writes import GraphWrites
from selective_compile.passes.normalise import place_of, source_name
from selective_compile.tensor_branches import nodes_read

TOLD = 4096  # constants of so many numbers are told by them; larger ones by which they are


class ApartError(Exception):
    """The two graphs cannot be told to be of one code with other sides of its branches."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the graphs, and what it writes to."""

    module: fx.GraphModule
    writes: GraphWrites


class JoinedGraphs:
    """``graph``: of both; ``of_short`` and ``of_long`` give its node for each of the two graphs'.

    ``added`` has the inputs of ``long`` alone, by their places there, which come behind those of ``short``.  Results
    beside the logits are those of ``short``.
    """

    def __init__(self, short: Side, long: Side, condition: str, *, holds: bool) -> None:
        """
        Args:
            condition: a node's name in ``short``: it is ``holds`` for requests that this is of, and not for others.

        Raises:
            ApartError: what both have cannot be told, or what one has alone writes to something.
        """
        self.graph = fx.Graph()
        self.added: list[int] = []
        self.of_short: dict[fx.Node, fx.Node] = {}
        self.of_long: dict[fx.Node, fx.Node] = {}
        self._sides = short, long
        self._attributes: dict[str, Any] = {}
        self._holds = holds
        self._condition: fx.Node | None = None
        self._chosen: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
        self._inputs(short.module, long.module)
        for one, other in pairs(operations(short.module), operations(long.module)):
            if one is None or other is None:
                self._of_one(one, other)
            else:
                self._of_both(one, other)
                if one.name == condition:
                    self._condition = self._as_condition(one)
        logits, *rest = results_of(short.module)
        chosen = self._choice(logits, results_of(long.module)[0])
        self.graph.output((chosen, *(self.of_short[each] for each in rest)))

    def module(self) -> fx.GraphModule:
        return fx.GraphModule(self._attributes, self.graph)

    def _inputs(self, short: fx.GraphModule, long: fx.GraphModule) -> None:
        by_source = {}
        for node in inputs_of(short):
            by_source[source_name(node)] = self.of_short[node] = self.graph.node_copy(node)
        for place, node in enumerate(inputs_of(long)):
            if (known := by_source.get(source_name(node))) is None:
                if place_of(node) != "weight":
                    raise ApartError(f"{node.name} is an input for long requests alone")
                self.added.append(place)
                known = self.graph.node_copy(node)
            self.of_long[node] = known

    def _of_one(self, one: fx.Node | None, other: fx.Node | None) -> None:
        """What the one graph has, or the other, is computed for all."""
        node, known, side = (
            (one, self.of_short, self._sides[0]) if one is not None else (other, self.of_long, self._sides[1])
        )
        assert node is not None
        if node in side.writes.writing or node.op == "call_module":
            raise ApartError(f"{node.name} writes, or may write, for requests of some lengths alone")
        known[node] = self._kept(node, self.graph.node_copy(node, lambda given: known[given]))

    def _of_both(self, one: fx.Node, other: fx.Node) -> None:
        read = zip(nodes_read(one), nodes_read(other), strict=True)
        given = iter([self._choice(*each) for each in read])  # in front of the node
        copy = self.graph.node_copy(one, lambda node: next(given))
        self.of_short[one] = self.of_long[other] = self._kept(one, copy)

    def _kept(self, node: fx.Node, copy: fx.Node) -> fx.Node:
        """``copy``, which reads what the module of ``node`` has by a name that no other of its kind has here."""
        if node.op in ("get_attr", "call_module"):
            copy.target = f"{node.op}_{len(self._attributes)}"
            self._attributes[copy.target] = attribute(node)
        return copy

    def _choice(self, short: fx.Node, long: fx.Node) -> fx.Node:
        one, other = self.of_short[short], self.of_long[long]
        if one is other:
            return one
        if (one, other) not in self._chosen:
            value = short.meta.get("example_value")
            written = [side.writes.is_written(node) for side, node in zip(self._sides, (short, long), strict=True)]
            if self._condition is None or any(written) or not alike(value, long.meta.get("example_value")):
                raise ApartError(f"of {short.name} and {long.name} none can be chosen")
            sides = (one, other) if self._holds else (other, one)
            chosen = self.graph.call_function(torch.where, (self._condition, *sides))
            chosen.meta = dict(short.meta)
            self._chosen[one, other] = chosen
        return self._chosen[one, other]

    def _as_condition(self, node: fx.Node) -> fx.Node:
        """Of one number: whether it is not 0."""
        value = node.meta["example_value"]
        if value.dim():
            raise ApartError(f"{node.name} has dimensions")
        known = self.of_short[node]
        return known if value.dtype == torch.bool else self.graph.call_function(torch.ne, (known, 0))


def inputs_of(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def operations(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]


def results_of(module: fx.GraphModule) -> list[fx.Node]:
    """The logits, and behind these what a call of the model sets in it."""
    output: Any = next(node for node in reversed(module.graph.nodes) if node.op == "output")
    found = list(output.args[0])
    if not all(isinstance(each, fx.Node) for each in found):
        raise ApartError("no logits are computed")
    return found


def alike(one: Any, other: Any) -> bool:
    """Whether they are tensors of one kind, that lie in order; the sizes of two traces are told by their names."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return False
    kinds = [(str(list(each.shape)), each.dtype, each.device, each.layout) for each in (one, other)]
    return kinds[0] == kinds[1] and one.is_contiguous() and other.is_contiguous()


def attribute(node: fx.Node) -> Any:
    found: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        found = getattr(found, name)
    return found


def pairs(ones: Sequence[fx.Node], others: Sequence[fx.Node]) -> Iterator[tuple[fx.Node | None, fx.Node | None]]:
    """Those that call the same with the same constants, in both's order, and each that is in one of the lists alone."""
    told, other = ([told_of(node) for node in nodes] for nodes in (ones, others))
    for kind, begin, end, first, last in SequenceMatcher(None, told, other, autojunk=False).get_opcodes():
        if kind == "equal":
            yield from zip(ones[begin:end], others[first:last], strict=True)
            continue
        yield from ((one, None) for one in ones[begin:end])
        yield from ((None, other) for other in others[first:last])


def told_of(node: fx.Node) -> tuple[Any, ...]:
    """What it calls, and with which constants."""
    if node.op in ("get_attr", "call_module"):
        value = attribute(node)
        few = isinstance(value, Tensor) and value.numel() <= TOLD
        called: Any = (value.dtype, value.device, repr(value.tolist())) if few else id(value)
    else:
        called = node.target
    given = fx.node.map_aggregate(
        (node.args, node.kwargs), lambda each: "a node" if isinstance(each, fx.Node) else each
    )
    return node.op, called, repr(given)
