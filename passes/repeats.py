"""Pieces of a graph that come again, one behind the other, as the layers of a model do: an analysis.

Two nodes are alike if they call the same on equal constants; two pieces, if their nodes are alike one by one and read
what stands in the same place: in the piece itself, in the one before it, or in front of them all; or inputs of a kind.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

KEPT = 5  # pieces that `fold` leaves: the first four and the last
LEAST_SAVED = 50  # nodes, for fewer it does not pay
PATTERN = 8  # layers, as one that sees all after some that see a window
MOST = 4  # such runs of pieces: layers of one kind, and of another

Kinds = Mapping[fx.Node, Hashable]


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """``pieces`` are lists of as many nodes; ``inputs``, in the same order for each, are the placeholders they read."""

    pieces: list[list[fx.Node]]
    inputs: list[list[fx.Node]]

    @property
    def saved(self) -> int:
        """Nodes that folding leaves out."""
        return sum(map(len, self.folded))

    @property
    def folded(self) -> list[list[fx.Node]]:
        return self.pieces[KEPT - 1 : -1]

    def input_map(self, one: int, other: int) -> dict[fx.Node, fx.Node]:
        """What a piece reads in the place of an input that another one reads."""
        return dict(zip(self.inputs[one], self.inputs[other], strict=True))


def repeats(graph: fx.Graph, kinds: Kinds) -> list[Repeat]:
    """The runs of pieces worth folding, at most `MOST`.

    Args:
        kinds: of each placeholder what operators on it can tell of it.
    """
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    numbers: dict[Hashable, int] = {}
    symbols = torch.tensor([numbers.setdefault(spelled(node), len(numbers)) for node in nodes], device="cpu")
    found: list[Repeat] = []
    while len(found) < MOST:
        run = longest_run(symbols)
        if run is None:
            break
        start, length, count = run
        end = start + length * count
        repeat = proved_run(nodes[start:end], length, kinds)
        symbols[start:end] = -1 - torch.arange(start, end, device="cpu")  # like no other any more
        if repeat is not None:
            found.append(repeat)
    return found


def spelled(node: fx.Node) -> Hashable:
    """What is called on which constants; nodes among the arguments are left out."""
    if node.op == "get_attr":
        return node.op, constant_of(node)
    return node.op, node.target, skeleton(node.args), skeleton(node.kwargs)


def constant_of(node: fx.Node) -> Hashable:
    """A tensor that is no input by its values, anything else by its name."""
    value = getattr(node.graph.owning_module, str(node.target), None) if "." not in str(node.target) else None
    if type(value) is not torch.Tensor or value.device.type != "cpu" or value.numel() > 1000:
        return str(node.target)
    return value.dtype, tuple(value.shape), str(value.flatten().tolist())


def skeleton(given: Any) -> Hashable:
    if isinstance(given, fx.Node):
        return fx.Node
    if isinstance(given, (tuple, list)):
        return type(given).__name__, tuple(map(skeleton, given))
    if isinstance(given, Mapping):
        return tuple((name, skeleton(value)) for name, value in given.items())
    if isinstance(given, slice):
        return slice, skeleton((given.start, given.stop, given.step))
    if isinstance(given, float):
        return repr(given)  # 0.0 is not -0.0
    return type(given), given if isinstance(given, Hashable) else id(given)


def longest_run(symbols: torch.Tensor) -> tuple[int, int, int] | None:
    """Start, length and count of the pieces that save the most nodes, as far as symbols tell."""
    best, run = LEAST_SAVED - 1, None
    for length in range(1, len(symbols) // (KEPT + 1) + 1):
        differs = (symbols[:-length] != symbols[length:]).nonzero().flatten()
        ends = torch.cat(
            [torch.tensor([-1], device="cpu"), differs, torch.tensor([len(symbols) - length], device="cpu")]
        )
        gaps = ends.diff() - 1
        widest = int(gaps.argmax())
        count = int(gaps[widest]) // length + 1
        saved = (count - KEPT) * length
        if saved > best:
            best, run = saved, (int(ends[widest]) + 1, length, count)
    return run


def proved_run(nodes: Sequence[fx.Node], length: int, kinds: Kinds) -> Repeat | None:
    """What saves the most of ``nodes``: of pieces of ``length``, or of as many together as a pattern of layers has."""
    best: Repeat | None = None
    for pattern in range(1, PATTERN + 1):
        size = length * pattern
        pieces = [list(nodes[i : i + size]) for i in range(0, len(nodes) - size + 1, size)]
        while len(pieces) > KEPT:
            repeat = alike_from(pieces, kinds)
            pieces = pieces[len(repeat.pieces) :]
            if repeat.saved >= max(LEAST_SAVED, best.saved + 1 if best else 0) and is_left_by_last(repeat):
                best = repeat
    return best


def alike_from(pieces: list[list[fx.Node]], kinds: Kinds) -> Repeat:
    """As many pieces as are like the first."""
    places = {node: (i, j) for i, piece in enumerate(pieces) for j, node in enumerate(piece)}
    inputs = [[given for given in reads(pieces[0]) if given.op == "placeholder"]]
    for i in range(1, len(pieces)):
        now: dict[fx.Node, fx.Node] = {}
        pairs = zip(reads(pieces[i - 1]), reads(pieces[i]), strict=True)
        if not all(in_same_place(before, after, i, places, kinds, now) for before, after in pairs):
            return Repeat(pieces=pieces[:i], inputs=inputs)
        inputs.append([now[given] for given in inputs[-1]])
    return Repeat(pieces=pieces, inputs=inputs)


def reads(piece: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """Every argument that is a node, in order, as often as it is one."""
    found: list[fx.Node] = []
    for node in piece:
        fx.node.map_arg((node.args, node.kwargs), found.append)
    return iter(found)


def in_same_place(
    before: fx.Node,
    after: fx.Node,
    piece: int,
    places: Mapping[fx.Node, tuple[int, int]],
    kinds: Kinds,
    inputs: dict[fx.Node, fx.Node],
) -> bool:
    """Whether ``after`` is to a piece what ``before`` is to the one in front of it; ``inputs`` fills with both."""
    if after in places:
        own, place = places[after]
        if own == piece - 1 and piece == 1:  # what the first one begins with stands before them all
            return before not in places and before.op != "placeholder"
        return own >= piece - 1 and places.get(before) == (own - 1, place)
    if after.op == "placeholder":
        return inputs.setdefault(before, after) is after and kinds.get(before, before) == kinds.get(after, after)
    return after is before


def is_left_by_last(repeat: Repeat) -> bool:
    """Whether nothing behind them reads a piece but the last."""
    inside = {node for piece in repeat.pieces for node in piece}
    return all(user in inside for piece in repeat.pieces[:-1] for node in piece for user in node.users)
