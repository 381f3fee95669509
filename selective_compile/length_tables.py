"""Whether something holds of all of a table that is made of a request's length and of constants alone.

    causal = torch.triu(torch.full((length, length), -math.inf), diagonal=1)
    if (mask == causal).all(): ...

``nn.TransformerEncoder`` asks this of each mask.  What such a table has in a place does not depend on how long the
request is, and changes only from one side to the other of lines: a row, a column or a diagonal that a triangle begins
with, or that numbers of rows or columns are compared with.  So it is made of rows and columns near where these lines
cross, and no others; what holds there holds of a request of any length.  Numbers of rows and columns may be shifted,
subtracted and compared; anything else of them is not read.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from selective_compile.passes.lengths import LARGEST

DENSE = 64  # every row up to here is there
NEAR = range(-2, 3)  # of where lines cross
MOST_LINES = 12
OF_ALL = {torch.all, torch.any, "all", "any"}
FILLED = {"full": 0, "ones": 0, "zeros": 0, "new_full": 1, "new_ones": 1, "new_zeros": 1, "expand": 1}
TRIANGLES = {"triu": operator.ge, "tril": operator.le}
COMPARED = {"eq", "ne", "lt", "le", "gt", "ge"}
VIEWS = {"getitem", "unsqueeze", "transpose", "t", "expand", "clone", "contiguous"}
LIKE = {"zeros_like", "ones_like", "full_like"}
ELEMENTWISE = {
    *("logical_not", "logical_and", "logical_or", "logical_xor", "abs", "neg", "add", "sub", "mul", "clamp", "isinf"),
    *("and", "or", "xor", "invert", "masked_fill", "where", "float", "bool", "int", "long", "to", *COMPARED, *VIEWS),
}
NAMES = {"arange", *FILLED, *TRIANGLES, *LIKE, *ELEMENTWISE}
FUNCTIONS = {
    getattr(module, name): name.strip("_")
    for module in (torch, operator)
    for name in (*NAMES, "and_", "or_")
    if hasattr(module, name)
}


class UnreadableError(Exception):
    """It is no table of this kind."""


@dataclass(frozen=True)
class Counted:
    """Numbers of rows or columns, or differences of these, and ``shift``; ``of``: how many of them, 1 or 2."""

    of: int
    shift: int


@dataclass(frozen=True, kw_only=True)
class Table:
    """``nodes``: what the last of them, which asks something of all of a table, is made of, in order; ``lines``: where
    the table changes."""

    nodes: tuple[fx.Node, ...]
    lines: frozenset[int]

    def holds(self, length: int) -> bool:
        """What is asked, of a request of ``length`` tokens.  Raises whatever an operator raises."""
        counts = [count for count in rows_near(self.lines) if count < length]
        rows = torch.tensor(counts, dtype=torch.int64, device="cpu")
        values: dict[fx.Node, Any] = {}
        for node in self.nodes:
            values[node] = len(counts) if is_length(node) else value_of(node, values, rows)
        return bool(values[self.nodes[-1]])


def table_of(node: fx.Node) -> Table | None:
    """What ``node``, of a graph of Dynamo's, asks of all of a table; None where it is anything else."""
    if node.target not in OF_ALL or len(node.args) != 1 or node.kwargs:
        return None
    nodes, reader = made_of(node), Reader()
    if sum(isinstance(size, torch.SymInt) for size in nodes[-2].meta["example_value"].shape) > 2:
        return None
    try:
        for each in nodes[:-1]:
            reader.read(each)
        reader.only_steps(node)
    except UnreadableError:
        return None
    return Table(nodes=nodes, lines=frozenset(reader.lines)) if len(reader.lines) <= MOST_LINES else None


def made_of(node: fx.Node) -> tuple[fx.Node, ...]:
    found, left = set[fx.Node](), [node]
    while left:
        each = left.pop()
        if each not in found:
            found.add(each)
            left += () if is_length(each) else each.all_input_nodes
    return tuple(each for each in node.graph.nodes if each in found)


def is_length(node: fx.Node) -> bool:
    """Whether it is a request's number of tokens: the one size that is not static, of the trace's inputs."""
    value = node.meta.get("example_value")
    return isinstance(value, torch.SymInt) and value.node.expr.is_Symbol and not free_unbacked_symbols(value)


def name_of(node: fx.Node) -> str:
    """Raises `UnreadableError`."""
    name = str(node.target).strip("_") if node.op == "call_method" else FUNCTIONS.get(node.target, "")
    if node.op not in ("call_method", "call_function") or name not in NAMES:
        raise UnreadableError
    return name


@dataclass
class Reader:
    """Takes the nodes in order; what counts is in ``counted``, all else that is known has steps at ``lines`` alone."""

    lines: set[int] = field(default_factory=set)
    counted: dict[fx.Node, Counted] = field(default_factory=dict)

    def read(self, node: fx.Node) -> None:
        """Raises `UnreadableError`."""
        if is_length(node):
            return
        name = name_of(node)
        if name == "arange":
            self.counted[node] = numbers_of_rows(node)
        elif name in FILLED:
            self._fill(node, name)
        elif name in TRIANGLES:
            self._cut(node)
        elif name in VIEWS and node.args[0] in self.counted:
            of_one_tensor(node)
            self.counted[node] = self.counted[node.args[0]]  # type: ignore[index]
        elif name in ("add", "sub") and self._counts(node):
            self.counted[node] = self._shifted(node, name)
        elif name in COMPARED and self._counts(node):
            self._compare(node)
        elif name in LIKE:
            of_one_tensor(node)
        else:
            self.only_steps(node)
        if name == "getitem":
            whole_dimensions(node)

    def only_steps(self, node: fx.Node) -> None:
        if any(is_length(each) or each in self.counted for each in node.all_input_nodes):
            raise UnreadableError

    def _counts(self, node: fx.Node) -> bool:
        return any(each in self.counted for each in node.all_input_nodes)

    def _fill(self, node: fx.Node, name: str) -> None:
        """Sizes may be the length, and what is filled in may not."""
        place = FILLED[name]
        sizes, rest = node.args[place:], list(node.args[:place])
        if name in ("full", "new_full"):
            sizes, rest = sizes[:1], [*rest, *sizes[1:]]
        rest += [value for key, value in node.kwargs.items() if key != "size"]
        if any(is_length(each) for each in nodes_in(rest)):
            raise UnreadableError
        if any(not is_length(each) for each in nodes_in([sizes, node.kwargs.get("size")])):
            raise UnreadableError
        first = node.args[0] if place else None
        if name == "expand" and first in self.counted:
            self.counted[node] = self.counted[first]  # type: ignore[index]

    def _cut(self, node: fx.Node) -> None:
        self.only_steps(node)
        sizes = node.all_input_nodes[0].meta["example_value"].shape[-2:]
        diagonal = node.kwargs.get("diagonal", node.args[1] if len(node.args) > 1 else 0)
        of_tokens = len(sizes) == 2 and all(isinstance(size, torch.SymInt) for size in sizes)
        if is_in_place(node) or type(diagonal) is not int or not of_tokens:
            raise UnreadableError
        self.lines.add(diagonal)

    def _shifted(self, node: fx.Node, name: str) -> Counted:
        first, second = two_of(node)
        one, other = self.counted.get(first), self.counted.get(second)
        if one is not None and other is not None and name == "sub" and one.of == other.of == 1:
            return Counted(2, one.shift - other.shift)
        if one is None and type(first) is int and name == "add":
            one, second = other, first
        if one is None or type(second) is not int:
            raise UnreadableError
        return Counted(one.of, one.shift + (second if name == "add" else -second))

    def _compare(self, node: fx.Node) -> None:
        sides = [self.counted.get(each, each) for each in two_of(node)]
        counted = [side for side in sides if isinstance(side, Counted)]
        numbers = [side for side in sides if type(side) in (int, float) and math.isfinite(side)]
        if len(counted) + len(numbers) != 2 or sum(side.of for side in counted) > 2:
            raise UnreadableError
        at = numbers[0] if numbers else counted[1].shift
        self.lines |= {math.floor(at - counted[0].shift), math.ceil(at - counted[0].shift)}


def numbers_of_rows(node: fx.Node) -> Counted:
    whole = node.kwargs.get("dtype") in (None, torch.int64)  # others may have no such number
    if len(node.args) != 1 or not node.all_input_nodes or not whole or node.kwargs.keys() - {"dtype", "device"}:
        raise UnreadableError
    return Counted(1, 0)


def of_one_tensor(node: fx.Node) -> None:
    if any(each is not node.args[0] for each in node.all_input_nodes):
        raise UnreadableError


def whole_dimensions(node: fx.Node) -> None:
    """An index must leave all that there is."""
    index = node.args[1]
    if not all(each in (None, slice(None)) for each in (index if isinstance(index, tuple) else (index,))):
        raise UnreadableError


def two_of(node: fx.Node) -> tuple[Any, Any]:
    if len(node.args) != 2 or node.kwargs or is_in_place(node):
        raise UnreadableError
    return node.args


def is_in_place(node: fx.Node) -> bool:
    return str(node.target).strip("_") + "_" == node.target


def nodes_in(values: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(values, found.append)
    return found


def rows_near(lines: Iterable[int]) -> list[int]:
    """Of all rows and columns near where any two of the lines cross, and of the first and last ones, their numbers."""
    either = {0, *lines, *(-line for line in lines)}
    near = {one + other + distance for one in either for other in either for distance in NEAR}
    return sorted(row for row in {*range(DENSE), *near, *range(LARGEST - 4, LARGEST)} if 0 <= row < LARGEST)


def value_of(node: fx.Node, values: Mapping[fx.Node, Any], rows: Tensor) -> Any:
    given: Any = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    args, kwargs = given
    if "device" in kwargs or node.target in (torch.full, torch.ones, torch.zeros):
        kwargs = {**kwargs, "device": "cpu"}
    args = tuple("cpu" if isinstance(arg, torch.device) else arg for arg in args)
    name = "" if node.target in OF_ALL else name_of(node)
    if name == "arange":
        return rows.clone()
    if name in TRIANGLES:
        table, diagonal = args[0], kwargs.get("diagonal", args[1] if len(args) > 1 else 0)
        return torch.where(TRIANGLES[name](rows - rows[:, None], diagonal), table, torch.zeros_like(table))
    call: Any = getattr(type(args[0]), str(node.target)) if node.op == "call_method" else node.target
    return call(*args, **kwargs)
