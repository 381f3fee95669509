"""Numbers of PTX's types, [n] at once, as numpy has them; registers hold bits, unsigned numbers of their width."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

Bits = NDArray[np.generic]
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# By a letter for the kind and the width in bits; what numpy has no type of is widened to float32.
KINDS = {"b": "u", "u": "u", "s": "i", "f": "f"}
WIDENED = {"bf16", "e4m3"}
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


@cache
def width(name: str) -> int:
    """Bytes of a number of a type, as `s32` or `bf16`."""
    return 1 if name == "e4m3" else int("".join(filter(str.isdigit, name.removeprefix("bf")))) // 8


@cache
def numpy_type(name: str) -> np.dtype:
    if name == "pred":
        return np.dtype(bool)
    return np.dtype(np.float32) if name in WIDENED else np.dtype(f"{KINDS[name[0]]}{width(name)}")


def decoded(bits: Bits, name: str) -> Bits:
    """The numbers that bits of at least as many mean; higher bits are left out."""
    if name == "pred":
        return bits
    bits = resized(bits, width(name))
    if name == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if name == "e4m3":
        return E4M3[bits]
    return bits.view(numpy_type(name))


def encoded(numbers: Bits, name: str) -> Bits:
    """As bits; to bfloat16 and float16 rounded to the nearest, ties to even."""
    if name == "pred":
        return numbers.astype(bool, copy=False)
    if name == "bf16":
        bits = numbers.astype(np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return np.where(numbers != numbers, 0x7FFF, rounded).astype(np.uint16)
    return numbers.astype(numpy_type(name), copy=False).view(UNSIGNED[width(name)])


def resized(bits: Bits, size: int) -> Bits:
    """Unsigned numbers of another width: what is above is cut, or 0."""
    return bits if bits.dtype.itemsize == size else bits.astype(UNSIGNED[size])
