"""Rotary position embedding, read off the flat graph: which elements of a head are partners, and by which tables.

What reaches an attention as ``[T, heads, D]`` is rotated heads where, by `elements`, each element of a head either is
the source's own, or the source's own times an entry of one table, plus or minus its partner's times one of another.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cache

import sympy
import torch
from torch import Tensor, fx

from selective_compile.passes.axes import size_expression
from selective_compile.passes.elements import SIGN, SOURCE, TABLE, Reader, Spelling, UnreadableError
from selective_compile.passes.flat_graph import FlatGraph
from selective_compile.passes.retrace import as_traced
from selective_compile.passes.traced_graph import DTYPES

# One number of tokens might be that of heads as well, so that a value could be taken for its own transpose.
PROBES = (2, 3)


@dataclass(frozen=True, kw_only=True)
class Table:
    """``width`` columns of ``node``, with tokens first, from ``start`` on."""

    node: fx.Node
    start: int
    width: int


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """As `selective_compile.rotary_ops` has it: elements ``first`` to ``first + rotated`` of each head."""

    first: int
    rotated: int
    interleaved: bool
    cos: Table
    sin: Table


class Rotations:
    """Those of a graph; what is spelled alike, as heads of other layers are, is read once."""

    def __init__(self, flat: FlatGraph) -> None:
        self._flat = flat
        self._known: dict[Hashable, tuple[Rotation | UnreadableError, list[fx.Node]]] = {}
        self._told = cache(as_traced)  # a node is asked for from each source in front of it

    def read(self, source: fx.Node, end: fx.Node) -> Rotation:
        """How the heads ``end`` ``[T, heads, D]`` are rotated out of ``source``, which has the same elements.

        Raises:
            UnreadableError: they are not, or by something that is not read, or computed in a narrower dtype than the
                end's.
        """
        spelling = Spelling(source, end, self._told)
        if spelling.text not in self._known:
            self._known[spelling.text] = self._read(source, end), spelling.nodes
        found, nodes = self._known[spelling.text]
        if isinstance(found, UnreadableError):
            raise UnreadableError(str(found), final=found.final)
        own = dict(zip(nodes, spelling.nodes, strict=True))
        cos, sin = (replace(table, node=own[table.node]) for table in (found.cos, found.sin))
        return replace(found, cos=cos, sin=sin)

    def _read(self, source: fx.Node, end: fx.Node) -> Rotation | UnreadableError:
        try:
            first, second = (RotationReader(self._flat, source, end, tokens).read() for tokens in PROBES)
        except UnreadableError as error:
            return error
        return first if first == second else UnreadableError("it depends on the number of tokens")


class RotationReader:
    def __init__(self, flat: FlatGraph, source: fx.Node, end: fx.Node, tokens: int) -> None:
        self.reader = Reader(source, end, token_symbol(flat), tokens)
        self.flat, self.source, self.end = flat, source, end

    def read(self) -> Rotation:
        terms = self.reader.terms(self.end)  # [terms, 3, T, heads, D]
        self.check_dtypes()
        own = self.as_rows(self.source).reshape(terms.shape[2:])
        there = terms[:, SIGN] != 0
        is_own = there & (terms[:, SOURCE] == own)
        straight, across = chosen(terms, is_own), chosen(terms, there & ~is_own)
        if not bool((straight[SIGN] == 1).all()):
            raise UnreadableError("an element without its own, or of another sign")
        places = one_of_all(straight[TABLE] >= 0).nonzero().flatten()
        if not torch.equal(across[SIGN] != 0, straight[TABLE] >= 0):
            raise UnreadableError("elements must have a partner where they have an entry of a table")
        if not len(places) or len(places) % 2 or int(places[-1] - places[0]) != len(places) - 1:
            raise UnreadableError("an even number of elements next to one another must be rotated")
        part = slice(int(places[0]), int(places[-1]) + 1)
        interleaved = self.style(across[..., part], own[..., part])
        tables = (self.table(entries[TABLE][..., part], interleaved) for entries in (straight, across))
        cos, sin = tables
        if cos.width != sin.width:
            raise UnreadableError("its tables must be of one width")
        return Rotation(first=part.start, rotated=len(places), interleaved=interleaved, cos=cos, sin=sin)

    def check_dtypes(self) -> None:
        """What is computed in float32 and rounded once is no less exact than the graph: it has no narrower step."""
        last = self.end.meta["val"].dtype
        if not self.reader.dtypes() <= {torch.float32, last}:
            raise UnreadableError(f"it is computed in another dtype than float32 and {last}")

    def as_rows(self, node: fx.Node) -> Tensor:
        """The numbers of a value's elements as ``[T, ...]``."""
        return self.reader.numbers(node).permute(rows_first(self.flat, node))

    def style(self, across: Tensor, own: Tensor) -> bool:
        """Whether partners are neighbours; ``[3, T, heads, rotated]`` and the numbers of the source's own elements."""
        d = torch.arange(own.shape[-1], device="cpu")
        for interleaved, partner in ((False, (d + len(d) // 2) % len(d)), (True, d ^ 1)):
            sign = torch.where(partner > d, -1, 1).expand_as(own)
            if torch.equal(across[SOURCE], own[..., partner]) and torch.equal(across[SIGN], sign):
                return interleaved
        raise UnreadableError("its partners are neither neighbours nor a half apart, or it turns the other way")

    def table(self, entries: Tensor, interleaved: bool) -> Table:
        """Which columns of which table ``entries`` ``[T, heads, rotated]`` are, the same for all heads."""
        node = next((n for n, begin in self.reader.tables.items() if self.holds(n, begin, int(entries[0, 0, 0]))), None)
        if node is None or node.meta["val"].dtype not in DTYPES:
            raise UnreadableError("its table must be of a dtype that kernels read")
        rows = self.as_rows(node).flatten(1)
        start, count = int(entries[0, 0, 0] - rows[0, 0]), entries.shape[-1]
        d = torch.arange(count, device="cpu")
        pair = d // 2 if interleaved else d % (count // 2)
        for width, column in ((count, d), (count // 2, pair)):
            fits = start >= 0 and start + width <= rows.shape[1]
            if fits and torch.equal(rows[:, None, start + column].expand_as(entries), entries):
                return Table(node=node, start=start, width=width)
        raise UnreadableError("its table must have a column for each rotated element, or for each pair, in their order")

    def holds(self, node: fx.Node, begin: int, number: int) -> bool:
        return begin <= number < begin + self.reader.numbers(node).numel()


def chosen(terms: Tensor, which: Tensor) -> Tensor:
    """``[3, T, heads, D]`` of the one term of each element in ``which``; zeros and -1 where none is."""
    if bool((which.sum(0) > 1).any()):
        raise UnreadableError("an element has more terms than its own and its partner's")
    found = which.any(0)
    parts = [torch.where(which, terms[:, part], 0).sum(0) for part in range(3)]
    return torch.stack([parts[SIGN], *(torch.where(found, part, -1) for part in parts[1:])])


def one_of_all(marks: Tensor) -> Tensor:
    """``[D]`` of ``[T, heads, D]``, where it is the same for each row and head."""
    if not bool((marks == marks[0, 0]).all()):
        raise UnreadableError("heads or tokens are not rotated alike")
    return marks[0, 0]


def token_symbol(flat: FlatGraph) -> sympy.Symbol:
    return flat.symbols.size("token", 0).node.expr


def rows_first(flat: FlatGraph, node: fx.Node) -> list[int]:
    """The permutation that brings the one dimension of tokens to the front."""
    sizes = [size_expression(size) for size in node.meta["val"].shape]
    tokens = [dim for dim, size in enumerate(sizes) if size.free_symbols]
    if len(tokens) != 1 or sizes[tokens[0]] != token_symbol(flat):
        raise UnreadableError(f"{node} must have one dimension of tokens")
    return [*tokens, *(dim for dim in range(len(sizes)) if dim not in tokens)]
