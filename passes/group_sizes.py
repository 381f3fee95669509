"""Within `group_loops`: sizes of groups that the host reads, and the rows that it slices sorted ones into by them.

Traced::  sizes = torch.bincount(groups, minlength=E).tolist(); start = 0
          for i, size in enumerate(sizes): parts.append(compute(rows[start : start + size])); start += size
          torch.cat(parts)
As::      sizes = one_hot(groups, E).sum(0)
          for i: parts.append(compute(group_part(rows, sizes, i)))
          joined_parts(parts)

That ``rows`` are sorted by what ``sizes`` counts is left to the rule of `group_part`.  Sizes are numbers that the trace
does not know; where it is told that a group has no tokens, bounds are those without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import sympy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from selective_compile.part_ops import group_part, joined_parts
from selective_compile.passes.axes import size_expression

BINCOUNTS = (torch.bincount, Tensor.bincount)
UNBINDS = (Tensor.unbind, torch.unbind)
SPLITS = (torch.split, Tensor.split, torch.functional.split)
CATS = (torch.cat, torch.concat, torch.concatenate)
INDEX_MAKERS = {"topk": 2, "sort": 1, "argsort": 1, "argmax": 1, "max": 1}  # and which argument says along what
LAST = {"topk": -1, "sort": -1, "argsort": -1}  # if nothing says it
# What an index is still itself, and a number of classes that of the same indices, behind.
KEEPING = (
    *("view", "reshape", "flatten", "ravel", "squeeze", "unsqueeze", "transpose", "permute", "t", "__getitem__"),
    *("contiguous", "clone", "detach", "cpu", "to", "long", "int", "type"),
)


class Read:
    """``sizes [E]``, as the host has read them."""

    def __init__(self, sizes: Tensor) -> None:
        self.sizes, self.version = sizes, sizes._version
        self.each: list[Any] = [sizes[group].item() for group in range(sizes.shape[0])]
        self.symbols: list[sympy.Symbol] = [size_expression(size) for size in self.each]
        for size in self.each:
            torch._check(size >= 0)
        self.total: Any = None  # rows that are sliced by them

    def is_of(self, vector: Tensor) -> bool:
        """Whether these are what ``vector`` holds, as it is now."""
        return self.sizes is vector and self.version == vector._version

    def takes(self, rows: Tensor) -> bool:
        """Whether ``rows`` are as many as those that were sliced before, if there were any."""
        if self.total is None:
            self.total = rows.shape[0]
        return size_expression(rows.shape[0]) == size_expression(self.total)


@dataclass(frozen=True)
class Element:
    """``number`` is the one at ``place`` in ``vector``, of which it is a view."""

    number: Tensor
    vector: Tensor
    place: int
    version: int

    def is_as_taken(self) -> bool:
        return self.vector._version == self.version


@dataclass(frozen=True)
class Classes:
    """``indices`` are those of ``count`` classes, as they were at this version."""

    indices: Tensor
    count: int
    version: int


class GroupSizes:
    """The sizes that were read in one trace.

    Args:
        is_told_empty: whether the code was told that a size, by its symbol, is 0.
        ask: the same, where it is asked for the first time.
    """

    def __init__(self, is_told_empty: Callable[[Any], bool], ask: Callable[[Any], bool]) -> None:
        self._is_told_empty, self._ask = is_told_empty, ask
        self._classes: dict[int, Classes] = {}  # by the identity of indices
        self._ending: dict[int, Tensor] = {}  # counts that end with the last group that has any, by identity
        self._elements: dict[int, Element] = {}  # by identity
        self.read: list[Read] = []

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What ``func`` gives, if it is about sizes of groups; else None."""
        given: Any = args[0] if args else None
        if func in BINCOUNTS:
            return self.counted(*args, **kwargs)
        if func is Tensor.item and (element := self._elements.get(id(given))) is not None and element.is_as_taken():
            return self.read_of(element.vector).each[element.place]
        if func in UNBINDS and is_vector_of_numbers(given):  # `tolist` goes over them, too
            return self.elements(given)
        if func is Tensor.numpy and is_vector_of_numbers(given):
            sizes = [self.call(Tensor.item, (element,), {}) for element in self.elements(given)]
            return numpy.array(sizes, dtype=object)
        if func is Tensor.__getitem__ and isinstance(first_of(args[1]), slice):
            return self.sliced(given, args[1])
        if func in SPLITS and isinstance(args[1], (list, tuple)) and along_rows(args[2:], kwargs):
            return self.split(given, args[1])
        if func in CATS and isinstance(given, (list, tuple)) and along_rows(args[1:], kwargs):
            return self.joined(given)
        return None

    def note(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Remember among how many classes indices are, and which counts end with the last that there is."""
        name, given = getattr(func, "__name__", ""), args[0] if args else None
        if not isinstance(given, Tensor):
            return
        if func is Tensor.__getitem__ and is_vector_of_numbers(given) and type(args[1]) is int:
            self._elements[id(result)] = Element(result, given, args[1] % given.shape[0], given._version)
        elif name in INDEX_MAKERS and given.dim():
            dim = args[INDEX_MAKERS[name]] if len(args) > INDEX_MAKERS[name] else kwargs.get("dim", LAST.get(name))
            indices = result if isinstance(result, Tensor) else result[1]
            if type(dim) is int and dim in (-1, given.dim() - 1) and type(given.shape[-1]) is int:
                self._classes[id(indices)] = Classes(indices, given.shape[-1], indices._version)
        elif name in KEEPING and isinstance(result, Tensor):
            if (count := self.groups_of(given)) is not None:
                self._classes[id(result)] = Classes(result, count, result._version)
            if id(given) in self._ending:
                self._ending[id(result)] = result

    def groups_of(self, indices: Tensor) -> int | None:
        """Among how many classes they are; None: that is not known."""
        known = self._classes.get(id(indices))
        return None if known is None or indices._version != known.version else known.count

    def counted(self, groups: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor | None:
        known = self.groups_of(groups)
        if weights is not None or known is None:
            return None
        counts = torch.nn.functional.one_hot(groups, max(known, minlength)).sum(0)
        if known > minlength:
            self._ending[id(counts)] = counts
        return counts

    def elements(self, vector: Tensor) -> list[Tensor]:
        elements = [vector[place] for place in range(vector.shape[0])]
        for place, element in enumerate(elements):
            self._elements[id(element)] = Element(element, vector, place, vector._version)
        if id(vector) in self._ending:
            empty = [self._ask(symbol) for symbol in reversed(self.read_of(vector).symbols)]
            while empty and empty.pop(0):
                elements.pop()
        return elements

    def read_of(self, vector: Tensor) -> Read:
        for read in self.read:
            if read.is_of(vector):
                return read
        self.read.append(Read(vector))
        return self.read[-1]

    def sliced(self, rows: Tensor, index: Any) -> Tensor | None:
        bounds = first_of(index)
        if bounds.step is not None or not (is_read(bounds.start) or is_read(bounds.stop)):
            return None
        start, stop = (self.told(0 if bound is None else bound) for bound in (bounds.start, bounds.stop))
        for read in self.read:
            at = sympy.Integer(0)
            for group, symbol in enumerate(read.symbols):
                if at == start and at + symbol == stop and read.takes(rows):
                    part = group_part(rows, read.sizes, group, read.each[group])
                    return part[(slice(None), *index[1:])] if isinstance(index, tuple) else part
                at += self.told(symbol)
        return None

    def split(self, rows: Tensor, sizes: Sequence[Any]) -> list[Tensor] | None:
        for read in self.read:
            if [size_expression(size) for size in sizes] == read.symbols and read.takes(rows):
                return [group_part(rows, read.sizes, group, size) for group, size in enumerate(read.each)]
        return None

    def joined(self, parts: Sequence[Any]) -> Tensor | None:
        sizes = [size_expression(part.shape[0]) if part.dim() else None for part in parts]
        for read in self.read:
            if read.total is not None and sizes == [
                symbol for symbol in read.symbols if not self._is_told_empty(symbol)
            ]:
                return joined_parts(list(parts), read.total)
        return None

    def told(self, size: Any) -> sympy.Expr:
        """Without the sizes of groups that are told to have no tokens."""
        expression = size_expression(size)
        return expression.subs({symbol: 0 for symbol in expression.free_symbols if self._is_told_empty(symbol)})


def along_rows(dim: Any, kwargs: dict[str, Any]) -> bool:
    return (list(dim) or [kwargs.get("dim", 0)]) == [0]


def first_of(index: Any) -> Any:
    return index[0] if isinstance(index, tuple) and index else index


def is_read(bound: Any) -> bool:
    return isinstance(bound, torch.SymInt) and bool(free_unbacked_symbols(bound))


def is_vector_of_numbers(value: Any) -> bool:
    """Whether it holds as many whole numbers as the code says, of values that the trace does not know."""
    known = not isinstance(value, FakeTensor) or value.constant is not None
    if known or value.dim() != 1 or not isinstance(value.shape[0], int):
        return False
    return not (value.is_floating_point() or value.is_complex() or value.dtype is torch.bool)
