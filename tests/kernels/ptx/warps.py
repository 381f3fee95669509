"""What the 32 threads of a warp do together: exchange numbers, and move and multiply small matrices.

Registers are [warps, 32] bits. Source of which thread has which elements: PTX ISA, "Matrix Fragments for mma.m16n8k16
with floating point type", "ldmatrix" and "stmatrix".
"""

from __future__ import annotations

import numpy as np

from tests.kernels.ptx.accesses import LANES
from tests.kernels.ptx.formats import Bits, decoded

LANE = np.arange(LANES)


def exchanged(numbers: Bits, by: Bits, clamp: Bits, how: str) -> tuple[Bits, Bits]:
    """What each thread gets from another one of its part of the warp; its own, if that one is outside. And whether it
    is not."""
    segment = (clamp >> 8) & 31
    end = (LANE & segment) | (clamp & 31 & ~segment)
    other = {
        "bfly": lambda: LANE ^ by,
        "up": lambda: LANE - by,
        "down": lambda: LANE + by,
        "idx": lambda: (LANE & segment) | (by & 31 & ~segment),
    }[how]()
    there = other >= end if how == "up" else other <= end
    return np.take_along_axis(numbers, np.where(there, other, LANE) % LANES, axis=1), there


def reduced(numbers: Bits, how: str) -> Bits:
    combine = {"add": np.add, "max": np.maximum, "min": np.minimum}[how]
    return np.repeat(combine.reduce(numbers, axis=1, keepdims=True, dtype=numbers.dtype), LANES, axis=1)


def fragment(matrix: Bits) -> Bits:
    """[..., 8, 8] of 16 bits, two beside each other in a thread's register. [..., 32] of 32."""
    return np.ascontiguousarray(matrix).view(np.uint32).reshape(*matrix.shape[:-2], LANES)


def matrix(fragments: Bits) -> Bits:
    """The reverse."""
    return np.ascontiguousarray(fragments).view(np.uint16).reshape(*fragments.shape[:-1], 8, 8)


def rows_and_columns(registers: list[Bits], kind: str) -> Bits:
    """Four registers of a thread as [warps, 16, 16], which is what is multiplied from the left."""
    upper, lower, upper_right, lower_right = (decoded(matrix(each), kind) for each in registers)
    return np.block([[upper, upper_right], [lower, lower_right]])


def sums(registers: list[Bits]) -> Bits:
    """[warps, 16, columns] float32; a thread has two of each eight columns, in two rows."""
    pairs = np.stack(registers, axis=-1).view(np.float32)
    warps, _, count = pairs.shape
    # [warps, row of 8, pair of columns, group of columns, half of the rows, column of the pair]
    parts = pairs.reshape(warps, 8, 4, count // 4, 2, 2)
    return parts.transpose(0, 4, 1, 3, 2, 5).reshape(warps, 16, count * 2)


def sums_apart(product: Bits) -> list[Bits]:
    """The reverse of `sums`."""
    warps, _, columns = product.shape
    parts = np.ascontiguousarray(product, np.float32).reshape(warps, 2, 8, columns // 8, 4, 2)
    registers = parts.transpose(0, 2, 4, 3, 1, 5).reshape(warps, LANES, columns // 2)
    return [np.ascontiguousarray(registers[..., n]).view(np.uint32) for n in range(columns // 2)]


def multiplied(left: list[Bits], right: list[Bits], added: list[Bits], kind: str) -> list[Bits]:
    """`mma.m16n8k16`."""
    columns = np.concatenate([decoded(matrix(each), kind) for each in right], axis=-1)  # [warps, 8, 16]
    rows = rows_and_columns(left, kind).astype(np.float32)
    return sums_apart(sums(added) + rows @ columns.astype(np.float32).transpose(0, 2, 1))
