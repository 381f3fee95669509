"""Follow a value of the flat graph element by element: each as a sum of products, in numbers of elements.

Where all that lies between a source and a value moves elements, changes signs, multiplies by other values, or adds,
each element of the value is a sum of terms ``sign * source[i] * table[j]``.  Running the movements on the numbers i and
j tells which, however the code is spelt: halves that are concatenated, pairs that are stacked, a ``chunk``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from selective_compile.passes.heads import CASTS, MOVES
from selective_compile.passes.repeats import reads
from selective_compile.passes.retrace import results_of

aten = torch.ops.aten
SPLITS = (aten.split, aten.split_with_sizes, aten.chunk, aten.unbind)
MOVEMENTS = (*MOVES, *SPLITS)
JOINS = (aten.cat.default, aten.stack.default)
SIGN, SOURCE, TABLE = range(3)
# Terms of a value, [terms, 3, *shape]: the sign, 0 of a term that is not there, and the numbers of an element of the
# source and of a table, -1 where the term has no such factor.
Terms = Tensor
ABSENT = (0, -1, -1)


class UnreadableError(Exception):
    """A value is no such sum; ``final``: nor is it one of any source further back."""

    def __init__(self, reason: str, *, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


class Reader:
    """Reads values between ``source`` and ``end``, at sizes where the symbol ``token`` is ``tokens``.

    What does not depend on the source is a table, whose elements are numbered on from those before it: ``tables`` has
    the first number of each.
    """

    def __init__(self, source: fx.Node, end: fx.Node, token: sympy.Symbol, tokens: int) -> None:
        self.source, self._token, self._tokens = source, token, tokens
        self.dependent = dependents(source, end)
        self.tables: dict[fx.Node, int] = {}
        self._read: dict[fx.Node, Any] = {}

    def terms(self, node: fx.Node) -> Terms:
        """Raises `UnreadableError`."""
        found = self._value(node)
        if not isinstance(found, Tensor):
            raise UnreadableError(f"{node} is several values")
        return found

    def numbers(self, node: fx.Node) -> Tensor:
        """The numbers of a value's elements, in its shape; those of a table from its first one on."""
        shape = [self._size(size) for size in node.meta["val"].shape]
        return torch.arange(math.prod(shape), device="cpu").reshape(shape) + self.tables.get(node, 0)

    def dtypes(self) -> set[torch.dtype]:
        """Of all that was read between the source and the end."""
        values = (node.meta["val"] for node in self._read if node in self.dependent)
        return {value.dtype for value in values if isinstance(value, Tensor)}

    def _value(self, node: Any) -> Any:
        """Terms, or a list of them for what gives several values."""
        if not isinstance(node, fx.Node):
            raise UnreadableError(f"a term {node}, which is no element")
        if node not in self._read:
            self._read[node] = self._made(node)
        return self._read[node]

    def _made(self, node: fx.Node) -> Any:
        packet = getattr(node.target, "overloadpacket", None)
        if node is self.source:
            numbers = self.numbers(node)
            return torch.stack([torch.ones_like(numbers), numbers, torch.full_like(numbers, -1)])[None]
        if packet in MOVEMENTS:
            rest = [self._concrete(argument) for argument in node.args[1:]]
            named = {name: self._concrete(argument) for name, argument in node.kwargs.items()}
            return moved(self._value(node.args[0]), lambda part: node.target(part, *rest, **named))  # type: ignore[operator]
        if node.target is operator.getitem:
            return self._value(node.args[0])[node.args[1]]
        if node not in self.dependent:
            return self._table(node)
        return self._computed(node, packet)

    def _table(self, node: fx.Node) -> Terms:
        if not isinstance(node.meta.get("val"), Tensor):
            raise UnreadableError(f"{node} is no tensor")
        self.tables[node] = sum(self.numbers(table).numel() for table in self.tables)
        numbers = self.numbers(node)
        return torch.stack([torch.ones_like(numbers), torch.full_like(numbers, -1), numbers])[None]

    def _computed(self, node: fx.Node, packet: Any) -> Terms:
        if packet in CASTS and node.meta["val"].is_floating_point():
            return self._value(node.args[0])
        if node.target is aten.neg.default:
            return negated(self._value(node.args[0]))
        if node.target in JOINS:
            pieces = [self._value(piece) for piece in node.args[0]]  # type: ignore[union-attr]
            return joined(pieces, lambda parts: node.target(parts, *node.args[1:]))  # type: ignore[operator]
        if node.target is aten.mul.Tensor and not node.kwargs:
            return product(*map(self._value, node.args))
        if node.target in (aten.add.Tensor, aten.sub.Tensor) and not node.kwargs:
            left, right = map(self._value, node.args)
            return total(left, right if node.target is aten.add.Tensor else negated(right))
        raise UnreadableError(f"{node.target} is not read", final=True)

    def _concrete(self, argument: Any) -> Any:
        def number(node: fx.Node) -> int:
            return self._size(node.meta.get("val"))

        return fx.node.map_arg(argument, number)

    def _size(self, size: Any) -> int:
        if isinstance(size, int):
            return size
        found = size.node.expr.subs({self._token: self._tokens}) if isinstance(size, torch.SymInt) else None
        if found is None or not found.is_Integer:
            raise UnreadableError(f"a size must be made of tokens, got {size}", final=True)
        return int(found)


class Spelling:
    """All that a `Reader` can tell of ``end``: where two are equal it reads the same, ``nodes`` of one in the place of
    those of the other."""

    def __init__(self, source: fx.Node, end: fx.Node, told: Callable[[fx.Node], Hashable]) -> None:
        """
        Args:
            told: `as_traced` of a node.
        """
        self._source, self._dependent, self._told = source, dependents(source, end), told
        self._numbers: dict[fx.Node, int] = {}
        self.text = self._of(end)
        self.nodes = list(self._numbers)

    def _of(self, node: fx.Node) -> Hashable:
        if node in self._numbers:
            return self._numbers[node]
        self._numbers[node] = len(self._numbers)
        if node is self._source or not self._is_followed(node):
            return node is self._source, results_of(node)
        return self._told(node), tuple(map(self._of, reads([node])))

    def _is_followed(self, node: fx.Node) -> bool:
        moves = getattr(node.target, "overloadpacket", None) in MOVEMENTS or node.target is operator.getitem
        return moves or node in self._dependent


def dependents(source: fx.Node, end: fx.Node) -> set[fx.Node]:
    """The source and all nodes up to the end that are computed from it."""
    found, node = {source}, source
    while node is not end:
        node = node.next
        if any(parent in found for parent in node.all_input_nodes):
            found.add(node)
    return found


def moved(terms: Terms, run: Callable[[Tensor], Any]) -> Any:
    parts = [[run(part) for part in term] for term in terms]
    if isinstance(parts[0][0], Tensor):
        return torch.stack([torch.stack(term) for term in parts])
    count = len(parts[0][0])
    return [torch.stack([torch.stack([part[i] for part in term]) for term in parts]) for i in range(count)]


def joined(pieces: Sequence[Terms], run: Callable[[list[Tensor]], Tensor]) -> Terms:
    most = max(map(len, pieces))
    full = [padded(piece, most) for piece in pieces]
    return torch.stack(
        [torch.stack([run([piece[i, part] for piece in full]) for part in range(3)]) for i in range(most)]
    )


def padded(terms: Terms, count: int) -> Terms:
    absent = torch.tensor(ABSENT, device="cpu").reshape(1, 3, *[1] * (terms.dim() - 2))
    return torch.cat([terms, absent.expand(count - len(terms), *terms.shape[1:])])


def negated(terms: Terms) -> Terms:
    return torch.cat([-terms[:, :1], terms[:, 1:]], dim=1)


def total(left: Terms, right: Terms) -> Terms:
    shape = torch.broadcast_shapes(left.shape[2:], right.shape[2:])
    return torch.cat([spread(left, shape), spread(right, shape)])


def product(left: Terms, right: Terms) -> Terms:
    shape = torch.broadcast_shapes(left.shape[2:], right.shape[2:])
    terms = []
    for one in spread(left, shape):
        for other in spread(right, shape):
            if bool(((one[1:] >= 0) & (other[1:] >= 0)).any()):
                raise UnreadableError("a product of two elements of the source, or of two of tables")
            terms.append(torch.cat([one[:1] * other[:1], torch.maximum(one[1:], other[1:])]))
    return torch.stack(terms)


def spread(terms: Terms, shape: torch.Size) -> Terms:
    """Broadcast to ``shape``."""
    own = terms.shape[2:]
    return terms.reshape(*terms.shape[:2], *[1] * (len(shape) - len(own)), *own).expand(*terms.shape[:2], *shape)
