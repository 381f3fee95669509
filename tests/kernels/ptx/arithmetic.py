"""What instructions on numbers come to: of arrays of numbers, one for each thread.

Source: PTX ISA, "Integer Arithmetic Instructions" to "Data Movement and Conversion Instructions". Sums of a product are
rounded twice in float64's case, once or, by chance, twice in float32's and bfloat16's; approximations are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

COMPARED: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal,
    "ne": lambda a, b: (a != b) & (a == a) & (b == b),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "equ": lambda a, b: (a == b) | unordered(a, b),
    "neu": np.not_equal,
    "ltu": lambda a, b: (a < b) | unordered(a, b),
    "leu": lambda a, b: (a <= b) | unordered(a, b),
    "gtu": lambda a, b: (a > b) | unordered(a, b),
    "geu": lambda a, b: (a >= b) | unordered(a, b),
    "num": lambda a, b: ~unordered(a, b),
    "nan": lambda a, b: unordered(a, b),
}


def unordered(a: Any, b: Any) -> Any:
    return (a != a) | (b != b)


def fma(a: Any, b: Any, c: Any) -> Any:
    return (a.astype(np.float64) * b + c).astype(a.dtype)


def without_subnormals(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Of float32: what is smaller than a normal number is 0, given or found."""

    def flushed(number: Any) -> Any:
        return np.where(np.abs(number) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), number), number)

    return lambda *given: flushed(operation(*map(flushed, given)))


def whole(numbers: Any, kind: np.dtype) -> Any:
    """Rounded ones as whole numbers: the nearest that there is, and 0 for NaN."""
    limits = np.iinfo(kind)
    found = np.where(numbers == numbers, numbers, 0)
    above, below = found >= float(limits.max), found <= float(limits.min)
    inside = np.where(above | below, 0, found).astype(kind)
    return np.where(above, kind.type(limits.max), np.where(below, kind.type(limits.min), inside))


def high(a: Any, b: Any) -> Any:
    """The upper half of a product."""
    bits = 8 * a.dtype.itemsize
    if bits < 64:
        twice = np.dtype(f"{a.dtype.kind}{bits // 4}")
        return (a.astype(twice) * b.astype(twice) >> bits).astype(a.dtype)
    products = np.broadcast_arrays(a, b)
    wide = products[0].astype(object) * products[1].astype(object) >> 64
    return wide.astype(a.dtype)


def divided(a: Any, b: Any) -> Any:
    """Towards zero, where numbers are whole."""
    if a.dtype.kind == "f":
        return a / b
    quotient = a // np.where(b == 0, 1, b)
    return quotient if a.dtype.kind == "u" else quotient + ((quotient < 0) & (quotient * b != a))


def shifted_left(a: Any, by: Any) -> Any:
    bits = 8 * a.dtype.itemsize
    return np.where(by >= bits, 0, a << np.minimum(by, bits - 1).astype(a.dtype)).astype(a.dtype)


def shifted_right(a: Any, by: Any) -> Any:
    bits = 8 * a.dtype.itemsize
    moved = a >> np.minimum(by, bits - 1).astype(a.dtype)
    return moved if a.dtype.kind == "i" else np.where(by >= bits, 0, moved).astype(a.dtype)


def field(a: Any, at: Any, count: Any) -> Any:
    """Some of 32 bits; of a signed number the highest of them above, its sign where they reach beyond it."""
    at, count = (np.minimum(each & 255, 32).astype(np.int64) for each in (at, count))
    wide = a.astype(np.int64) & 0xFFFFFFFF
    found = wide >> at & (1 << count) - 1
    if a.dtype.kind == "i":
        sign = wide >> np.clip(at + count - 1, 0, 31) & (count > 0)
        found |= sign * (-1 << np.minimum(count, 32 - at))
    return (found & 0xFFFFFFFF).astype(np.uint32).view(a.dtype)


def inserted(a: Any, b: Any, at: Any, count: Any) -> Any:
    """``b`` with bits of ``a`` in place of some of its own."""
    at, count = (np.minimum(each & 255, 32).astype(np.int64) for each in (at, count))
    taken = (1 << count) - 1 << at & 0xFFFFFFFF
    found = b.astype(np.int64) & ~taken | a.astype(np.int64) << at & taken
    return (found & 0xFFFFFFFF).astype(np.uint32)


def permuted(a: Any, b: Any, selector: Any) -> Any:
    """Four bytes of eight; where a selector's highest bit is set, the byte's sign."""
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    found = np.zeros_like(both)
    for place in range(4):
        chosen = (selector.astype(np.uint64) >> np.uint64(4 * place)) & np.uint64(15)
        byte = (both >> (np.uint64(8) * (chosen & np.uint64(7)))) & np.uint64(255)
        signs = np.where(byte >= 128, np.uint64(255), np.uint64(0))
        found |= np.where(chosen >= 8, signs, byte) << np.uint64(8 * place)
    return found.astype(np.uint32)


def opposite(a: Any) -> Any:
    return ~a


def smallest(a: Any, b: Any) -> Any:
    return np.fmin(a, b) if a.dtype.kind == "f" else np.minimum(a, b)


def largest(a: Any, b: Any) -> Any:
    return np.fmax(a, b) if a.dtype.kind == "f" else np.maximum(a, b)


# By the name in front of the first dot, and what behind it tells two apart.
OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "mul.lo": lambda a, b: a * b,
    "mul.hi": high,
    "mad.lo": lambda a, b, c: a * b + c,
    "fma": fma,
    "div": divided,
    "rem": lambda a, b: a - divided(a, b) * b,
    "min": smallest,
    "max": largest,
    "max.relu": lambda a, b: np.maximum(np.maximum(a, b), 0),
    "max.NaN": np.maximum,
    "min.NaN": np.minimum,
    "abs": np.abs,
    "neg": np.negative,
    "not": opposite,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shl": shifted_left,
    "shr": shifted_right,
    "bfe": field,
    "bfi": inserted,
    "prmt": permuted,
    "popc": lambda a: np.bitwise_count(a).astype(np.uint32),
    "ex2": np.exp2,
    "lg2": np.log2,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "sqrt": np.sqrt,
    "rcp": lambda a: 1 / a,
    "mov": lambda a: a,
}
