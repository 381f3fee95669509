"""Products of four warps, of matrices in shared memory that a descriptor tells of (`wgmma`).

Source: PTX ISA, "Asynchronous wgmma Instructions", "Strides" and "Matrix Descriptor Format": where elements lie is
counted in rows of as many bytes as the swizzle is wide, eight of which are a pattern.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.kernels.ptx.accesses import Fault
from tests.kernels.ptx.formats import Bits, decoded
from tests.kernels.ptx.shared import Shared

SWIZZLED = {0: 16, 1: 128, 2: 64, 3: 32}  # bytes of a row, by a descriptor's mode; 16: nothing is
DEPTH = 16  # numbers of 16 bits that are multiplied at a time


def swizzled(addresses: Bits, row: int) -> Bits:
    """Pieces of 16 bytes change places within their row, by the row's number in its pattern."""
    return addresses ^ (((addresses >> 7) & (row // 16 - 1)) << 4)


@dataclass(frozen=True)
class Descriptor:
    """``leading`` and ``stride``: bytes between patterns; ``row``: of a pattern, in bytes."""

    start: int
    leading: int
    stride: int
    row: int

    @classmethod
    def of(cls, bits: int) -> Descriptor:
        if bits >> 49 & 7:
            raise Fault("a matrix that does not begin with a pattern is not known here")
        start, leading, stride = ((bits >> at & 0x3FFF) << 4 for at in (0, 16, 32))
        return cls(start, leading, stride, SWIZZLED[bits >> 62])

    def addresses(self, count: int, *, transposed: bool) -> Bits:
        """Of [count, DEPTH] numbers of 16 bits. ``transposed``: what is beside each other is not multiplied."""
        n, k = np.arange(count)[:, None], np.arange(DEPTH)[None, :]
        if not transposed and self.row == 16:
            places = n % 8 * 16 + n // 8 * self.stride + k // 8 * self.leading + k % 8 * 2
        elif not transposed:
            places = n % 8 * self.row + n // 8 * self.stride + k * 2
        elif self.row == 16:
            places = n % 8 * 2 + n // 8 * self.stride + k % 8 * 16 + k // 8 * self.leading
        else:
            width = self.row // 2
            places = n % width * 2 + n // width * self.leading + k % 8 * self.row + k // 8 * self.stride
        return swizzled(self.start + places, self.row)


def loaded(
    shared: Shared, lanes: Bits, descriptors: Bits, count: int, kind: str, *, transposed: bool
) -> tuple[Bits, list[Bits]]:
    """[warps, count, DEPTH] float32, for the first thread and the descriptor of each warp, of four together; and for
    each four the places of all bytes."""
    found, places = [], []
    for four, bits in zip(lanes.reshape(-1, 4), descriptors[::4].tolist(), strict=True):
        addresses = Descriptor.of(bits).addresses(count, transposed=transposed).ravel().astype(np.uint64)
        numbers, of_bytes = shared.multiply(four, addresses)
        found.append(decoded(numbers, kind).astype(np.float32).reshape(count, DEPTH))
        places.append(of_bytes)
    return np.repeat(np.stack(found), 4, axis=0), places
