"""A flat graph cut into what comes before its layers, one layer, and what comes behind them.

Before::  embedding; layer 0; layer 1; ...; layer 31; head
After::   first: embedding and norm; layer, to be called 31 times; last: the rest of layer 31 and the head

So the layers are compiled once.  Cuts lie in front of a product of matrices, which is a kernel of its own in any case,
where the fewest values cross: no fusion is lost.  Declines where fewer than a few pieces of the graph are alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from selective_compile.passes.batch_dependence import is_kernel
from selective_compile.passes.flat_graph import FlatGraph
from selective_compile.passes.repeats import Kinds, Repeat, alike_from, is_left_by_last, reads, repeats
from selective_compile.passes.retrace import as_traced, kind_of, results_of

FEWEST = 4  # pieces
Call = tuple[list[fx.Node], list[fx.Node]]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A graph of its own: ``inputs`` and ``outputs`` are the nodes of the whole graph that its own stand for."""

    module: fx.GraphModule
    inputs: list[fx.Node]
    outputs: list[fx.Node]


@dataclass(frozen=True, kw_only=True)
class LayerCut:
    """``calls``: of each layer, what it reads and what others read of it, in the order of ``layer``'s."""

    first: Part
    layer: Part
    last: Part
    calls: list[Call]


def cut(flat: FlatGraph) -> LayerCut | None:
    graph = flat.module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    kinds: Kinds = dict(zip(placeholders, map(kind_of, flat.example_inputs), strict=True))
    found = max(repeats(graph, kinds), key=lambda repeat: repeat.saved, default=None)
    pieces = called_alike(in_front_of_product(found, kinds), kinds) if found is not None else []
    calls = calls_of(pieces)
    # The first one may be given one value in two places where the others are given two.
    typical = next((i for i, (given, _) in enumerate(calls) if len(set(given)) == len(given)), None)
    if len(pieces) < FEWEST or typical is None:
        return None
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    before, behind = nodes[: nodes.index(pieces[0][0])], nodes[nodes.index(pieces[-1][-1]) + 1 :]
    results: Any = next(iter(reversed(graph.nodes))).args[0]
    given, left = calls[typical]
    return LayerCut(
        first=part(flat, before, read_behind(before)),
        layer=part(flat, pieces[typical], left, given),
        last=part(flat, behind, results),
        calls=calls,
    )


def in_front_of_product(repeat: Repeat, kinds: Kinds) -> list[list[fx.Node]]:
    """The same pieces, cut where the fewest values cross; none where they are not alike then."""
    nodes, length = [node for piece in repeat.pieces for node in piece], len(repeat.pieces[0])
    places = [place for place in range(length) if is_kernel(nodes[place])]
    if not places:
        return []
    place = min(places, key=lambda place: len(read_behind(nodes[place : place + length])))
    moved = nodes[place : len(nodes) - (length - place) % length]
    found = alike_from([moved[i : i + length] for i in range(0, len(moved), length)], kinds)
    results = [[as_traced(node) for node in piece] for piece in found.pieces]
    return found.pieces if all(each == results[0] for each in results) and is_left_by_last(found) else []


def called_alike(pieces: list[list[fx.Node]], kinds: Kinds) -> list[list[fx.Node]]:
    """Without the first ones, as long as these are given what has other sizes, strides or dtypes."""
    while pieces:
        given = [[kinds.get(node) or results_of(node) for node in inputs] for inputs, _ in calls_of(pieces)]
        if all(each == given[0] for each in given):
            break
        pieces = pieces[1:]
    return pieces


def read_behind(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """What of ``nodes`` is read by others."""
    own = set(nodes)
    return [node for node in nodes if any(user not in own for user in node.users)]


def calls_of(pieces: Sequence[list[fx.Node]]) -> list[Call]:
    from_outside = []
    for piece in pieces:
        inside = set(piece)
        from_outside.append([given for given in reads(piece) if given not in inside])
    # What all read in the same way is one input of the layer, however often it is read.
    slots = list(dict.fromkeys(zip(*from_outside, strict=True)))
    read = {node for piece in pieces for node in read_behind(piece)}
    left = [place for place, same in enumerate(zip(*pieces, strict=True)) if not read.isdisjoint(same)]
    return [([slot[i] for slot in slots], [piece[place] for place in left]) for i, piece in enumerate(pieces)]


def part(
    flat: FlatGraph, nodes: Iterable[fx.Node], outputs: Sequence[fx.Node], inputs: Sequence[fx.Node] | None = None
) -> Part:
    """``nodes`` as a graph of their own, from ``inputs``, by default all that they read of others."""
    inside = list(nodes)
    if inputs is None:
        own = set(inside)
        inputs = list(dict.fromkeys(given for given in (*reads(inside), *outputs) if given not in own))
    graph = fx.Graph()
    copies = {given: graph.placeholder(given.name) for given in inputs}
    for node in inside:
        copies[node] = graph.node_copy(node, lambda given: copies[given])
    graph.output(tuple(copies[node] for node in outputs))
    return Part(module=fx.GraphModule(flat.module, graph), inputs=list(inputs), outputs=list(outputs))
