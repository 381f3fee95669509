"""A GPU's memory: that of tensors, at addresses far from each other, and that which the threads of a program share.

What would be an error of the device is one here: an address outside of every tensor, or one that is no multiple of
what is read there.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from tests.kernels.ptx.formats import UNSIGNED, Bits

FIRST, APART = 1 << 40, 1 << 32  # where tensors lie: the numbers of 32 bits between two of them are all outside


class Fault(AssertionError):
    """What a program must not do, or only by chance is right."""


@dataclass
class Region:
    """Bytes at an address, which are numbers of every width; `keeps` holds them in place."""

    address: int
    content: Bits
    keeps: object = None

    def covers(self, addresses: Bits, size: int) -> Bits:
        return (addresses >= self.address) & (addresses + size <= self.address + len(self.content))

    def numbers(self, size: int) -> Bits:
        return self.content[: len(self.content) // size * size].view(UNSIGNED[size])


@dataclass
class Memory:
    """Of the device: the storages of the tensors that a launch was given."""

    regions: list[Region] = field(default_factory=list)

    def address(self, tensor: Tensor) -> int:
        """Where a tensor begins; its whole storage is there from now on."""
        storage = tensor.untyped_storage()
        begin = storage.data_ptr()
        offset = tensor.storage_offset() * tensor.itemsize
        for region in self.regions:
            if region.keeps.data_ptr() == begin and len(region.content) == storage.nbytes():
                return region.address + offset
        content = (ctypes.c_uint8 * storage.nbytes()).from_address(begin) if storage.nbytes() else b""
        place = FIRST + APART * len(self.regions)
        self.regions.append(Region(place, np.frombuffer(content, np.uint8), storage))
        return place + offset

    def load(self, addresses: Bits, size: int) -> Bits:
        """[n] numbers of ``size`` bytes."""
        found = np.empty(len(addresses), UNSIGNED[size])
        for region, here in self._regions_of(addresses, size):
            found[here] = region.numbers(size)[(addresses[here] - region.address) // size]
        return found

    def store(self, addresses: Bits, numbers: Bits) -> None:
        """Of threads that write to one place, the last is seen."""
        size = numbers.dtype.itemsize
        for region, here in self._regions_of(addresses, size):
            region.numbers(size)[(addresses[here] - region.address) // size] = numbers[here]

    def _regions_of(self, addresses: Bits, size: int):
        aligned(addresses, size)
        left = np.ones(len(addresses), bool)
        for region in self.regions:
            here = region.covers(addresses, size)
            if here.any():
                yield region, here
                left &= ~here
        if left.any():
            raise Fault(f"{int(left.sum())} threads reach outside of every tensor, as at {hex(addresses[left][0])}")


class Shared:
    """What the threads of each program share, [programs, bytes], which begins at an address that no pointer to nothing
    is; in the beginning it is full of NaN.

    ``fresh``: bytes that threads have written and that copies and products beside them need not see yet, before a
    fence.
    """

    BEGIN = 1024

    def __init__(self, programs: int, size: int) -> None:
        self.stride = -(-(self.BEGIN + size) // 1024) * 1024
        self.size = size
        self.content = np.full(programs * self.stride, 0xFF, np.uint8)
        self.fresh = np.zeros(programs * self.stride, bool)

    def places(self, program: Bits, addresses: Bits, size: int) -> Bits:
        """Of bytes in `content`."""
        aligned(addresses, size)
        inside = (addresses >= self.BEGIN) & (addresses + np.uint64(size) <= self.BEGIN + self.size)
        if not inside.all():
            raise Fault(f"{int((~inside).sum())} threads reach outside of shared memory")
        return program * self.stride + addresses.astype(np.int64)

    def load(self, program: Bits, addresses: Bits, size: int) -> Bits:
        return self.content.view(UNSIGNED[size])[self.places(program, addresses, size) // size]

    def store(self, program: Bits, addresses: Bits, numbers: Bits, *, fenced: bool = False) -> None:
        """``fenced``: seen by all."""
        size = numbers.dtype.itemsize
        places = self.places(program, addresses, size)
        self.content.view(UNSIGNED[size])[places // size] = numbers
        self.fresh[places[:, None] + np.arange(size)] = not fenced

    def load_beside(self, program: Bits, addresses: Bits, size: int) -> Bits:
        """As the products do that run beside threads."""
        places = self.places(program, addresses, size)
        if self.fresh[places].any():
            raise Fault("a product reads what threads have written without a fence behind it")
        return self.content.view(UNSIGNED[size])[places // size]


def aligned(addresses: Bits, size: int) -> None:
    if (addresses % addresses.dtype.type(size)).any():
        raise Fault(f"what is read or written as {size} bytes does not begin at a multiple of them")
