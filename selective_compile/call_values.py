"""What stands for sizes, addresses and tensors while the calls of a compiled step are looked for.

Size      an integer that is known when the step runs: a constant and multiples of symbols
Storage   memory: an argument's, or what generated code allocates
Pointer   so many bytes behind the beginning of a storage
Memory    a tensor without its numbers
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


class NotFollowed(Exception):
    """The generated code does what is not followed here; the message says what."""


@dataclass(frozen=True, eq=False)
class Size:
    """``constant`` and, for each ``(symbol, factor)`` in order of the symbols, their product; one at least."""

    constant: int
    terms: tuple[tuple[int, int], ...]

    @classmethod
    def symbol(cls, number: int) -> Size:
        return cls(0, ((number, 1),))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Size):
            return (self.constant, self.terms) == (other.constant, other.terms)
        raise NotFollowed(f"a size compared with {other!r}")

    def __hash__(self) -> int:
        return hash((self.constant, self.terms))

    def __add__(self, other: int | Size) -> int | Size:
        if isinstance(other, int):
            return Size(self.constant + other, self.terms)
        factors = dict(self.terms)
        for symbol, factor in other.terms:
            factors[symbol] = factors.get(symbol, 0) + factor
        return _size(self.constant + other.constant, factors.items())

    def __mul__(self, other: int | Size) -> int | Size:
        if isinstance(other, Size):
            raise NotFollowed("a product of two sizes")
        return _size(self.constant * other, ((symbol, factor * other) for symbol, factor in self.terms))

    def __floordiv__(self, other: int) -> int | Size:
        if any(number % other for number in (self.constant, *(factor for _, factor in self.terms))):
            raise NotFollowed(f"a quotient of a size by {other} with a rest")
        return _size(self.constant // other, ((symbol, factor // other) for symbol, factor in self.terms))

    def covers(self, other: Size) -> bool:
        """Whether it is at least as large, whatever the symbols are, which are not negative."""
        own, others = dict(self.terms), dict(other.terms)
        more = all(own.get(symbol, 0) >= others.get(symbol, 0) for symbol in own | others)
        return self.constant >= other.constant and more

    def at(self, symbols: Sequence[int]) -> int:
        return self.constant + sum(factor * symbols[symbol] for symbol, factor in self.terms)

    def __bool__(self) -> bool:
        raise NotFollowed("a branch on a size")

    __radd__ = __add__
    __rmul__ = __mul__


def _size(constant: int, terms: object) -> int | Size:
    kept = tuple(sorted((symbol, factor) for symbol, factor in terms if factor))  # type: ignore[attr-defined]
    return Size(constant, kept) if kept else constant


class Storage:
    """``num_bytes`` of memory; None: an argument's, whose place among them is ``argument``."""

    def __init__(self, *, num_bytes: int | Size | None = None, argument: int = -1) -> None:
        self.num_bytes = num_bytes
        self.argument = argument


@dataclass(frozen=True)
class Pointer:
    storage: Storage
    offset: int | Size


class Memory:
    """A tensor as far as launchers and generated code look at it: dtype, sizes, strides, and where it lies."""

    def __init__(
        self,
        storage: Storage,
        dtype: torch.dtype,
        shape: Sequence[int | Size],
        strides: Sequence[int | Size],
        offset: int | Size = 0,
    ) -> None:
        self.storage, self.dtype = storage, dtype
        self.shape, self.strides, self.offset = tuple(shape), tuple(strides), offset

    @classmethod
    def empty(cls, shape: Sequence[int | Size], strides: Sequence[int | Size], dtype: torch.dtype) -> Memory:
        """Memory of its own, up to the last element."""
        extent: int | Size = 1
        for size, stride in zip(shape, strides, strict=True):
            extent = extent + (size + -1) * stride
        return cls(Storage(num_bytes=extent * dtype.itemsize), dtype, shape, strides)

    def view(self, shape: Sequence[int | Size], strides: Sequence[int | Size], offset: int | Size) -> Memory:
        return Memory(self.storage, self.dtype, shape, strides, self.offset + offset)

    def new_empty(self, shape: Sequence[int | Size], dtype: torch.dtype | None = None) -> Memory:
        return Memory.empty(shape, contiguous_strides(shape), dtype or self.dtype)

    def transpose(self, one: int, other: int) -> Memory:
        places = list(range(len(self.shape)))
        places[one], places[other] = places[other], places[one]
        shape, strides = ([sizes[place] for place in places] for sizes in (self.shape, self.strides))
        return self.view(shape, strides, 0)

    def data_ptr(self) -> Pointer:
        return Pointer(self.storage, self.offset * self.dtype.itemsize)

    def size(self) -> tuple[int | Size, ...]:
        return self.shape

    def stride(self, dim: int | None = None) -> object:
        return self.strides if dim is None else self.strides[dim]

    def numel(self) -> int | Size:
        return math.prod(self.shape, start=1)

    def is_contiguous(self) -> bool:
        wanted = contiguous_strides(self.shape)
        rows = zip(self.strides, wanted, self.shape, strict=True)
        return all(same(size, 1) or same(stride, other) for stride, other, size in rows)

    def contiguous(self) -> Memory:
        if not self.is_contiguous():
            raise NotFollowed("a copy of what is not contiguous")
        return self


def same(one: int | Size | None, other: int | Size | None) -> bool:
    """Whether they are equal whatever the symbols are."""
    return type(one) is type(other) and one == other


def contiguous_strides(shape: Sequence[int | Size]) -> tuple[int | Size, ...]:
    found: list[int | Size] = []
    stride: int | Size = 1
    for size in reversed(shape):
        found.insert(0, stride)
        stride = stride * size
    return tuple(found)
