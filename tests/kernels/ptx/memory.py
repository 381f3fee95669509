"""A GPU's memory: that of tensors, at addresses far from each other.

What would be an error of the device is one here: an address outside of every tensor, or one that is no multiple of
what is read there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from tests.kernels.ptx.accesses import Accesses, Fault, Threads
from tests.kernels.ptx.formats import UNSIGNED, Bits

Name = tuple[int, int]  # of a storage: where it is, and how many bytes
FIRST, APART = 1 << 40, 1 << 32  # where tensors lie: the numbers of 32 bits between two of them are all outside


@dataclass
class Region:
    """Bytes at an address, which are numbers of every width; `keeps` holds them in place.

    ``in_front``: which of them the kernel in front has written; None: none.
    """

    address: int
    content: Bits
    keeps: Any
    accesses: Accesses | None = None
    in_front: Bits | None = None

    @property
    def name(self) -> Name:
        """By which another launch knows it."""
        return self.keeps.data_ptr(), len(self.content)

    def covers(self, addresses: Bits, size: int) -> Bits:
        return (addresses >= self.address) & (addresses + size <= self.address + len(self.content))

    def numbers(self, size: int) -> Bits:
        return self.content[: len(self.content) // size * size].view(UNSIGNED[size])


@dataclass
class Memory:
    """Of the device: the storages of the tensors that a launch was given.

    ``in_front``: bytes that the kernel in front has written, of each storage.
    ``prefetched``: what somebody asked for, a storage, where in it, and how many bytes.
    ``ahead``: of each thread, whether that kernel may not be done yet, so that it must reach nothing but what others
    have written before, past the first-level cache.
    """

    in_front: Mapping[Name, Bits] = field(default_factory=dict)
    regions: list[Region] = field(default_factory=list)
    prefetched: list[tuple[Name, int, int]] = field(default_factory=list)
    ahead: Bits = field(init=False)

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

    def begin(self, threads: Threads, *, early: bool) -> None:
        """A launch of these; ``early``: before the kernels in front of it have ended."""
        self.ahead = np.full(threads.lanes, early)
        for region in self.regions:
            region.accesses = Accesses(len(region.content), threads)
            region.in_front = self.in_front.get(region.name)

    def written(self) -> dict[Name, Bits]:
        """Bytes that this launch has written, of each storage."""
        return {region.name: region.accesses.stored for region in self.regions if region.accesses is not None}

    def load(self, lanes: Bits, addresses: Bits, size: int, *, past_cache: bool = False) -> Bits:
        """[n] numbers of ``size`` bytes, by so many threads; ``past_cache``: not from the first-level cache."""
        found = np.empty(len(addresses), UNSIGNED[size])
        for region, here, places in self._regions_of(lanes, addresses, size, past_cache=past_cache):
            found[here] = region.numbers(size)[places // size]
            region.accesses.reads(*bytes_of(places, lanes[here], size))
        return found

    def store(self, lanes: Bits, addresses: Bits, numbers: Bits) -> None:
        size = numbers.dtype.itemsize
        for region, here, places in self._regions_of(lanes, addresses, size):
            put(region.numbers(size), region.accesses, places, lanes[here], numbers[here])

    def prefetch(self, addresses: Bits, sizes: Bits) -> None:
        """Bytes that are asked for: they may be written meanwhile, and read by nobody."""
        for address, size in zip(addresses.tolist(), sizes.tolist(), strict=True):
            inside = [region for region in self.regions if region.covers(np.uint64(address), size)]
            if not inside:
                raise Fault(f"{size} bytes are asked for outside of every tensor, at {hex(address)}")
            if address % 16 or size % 16:
                raise Fault("what is asked for does not begin and end at a multiple of 16 bytes")
            self.prefetched.append((inside[0].name, address - inside[0].address, size))

    def _regions_of(
        self, lanes: Bits, addresses: Bits, size: int, *, past_cache: bool = False
    ) -> Iterator[tuple[Region, Bits, Bits]]:
        """And which of the addresses are in it, and where."""
        aligned(addresses, size)
        ahead = bool(self.ahead[lanes].any())
        if ahead and not past_cache:
            raise Fault("memory is reached before the kernels in front have been waited for")
        left = np.ones(len(addresses), bool)
        for region in self.regions:
            here = region.covers(addresses, size)
            if here.any():
                places = (addresses[here] - region.address).astype(np.int64)
                if ahead and region.in_front is not None and region.in_front[bytes_of(places, places, size)[0]].any():
                    raise Fault("what the kernel in front writes is read before that has been waited for")
                yield region, here, places
                left &= ~here
        if left.any():
            raise Fault(f"{int(left.sum())} threads reach outside of every tensor, as at {hex(addresses[left][0])}")


def bytes_of(places: Bits, lanes: Bits, size: int) -> tuple[Bits, Bits]:
    """Of numbers of ``size`` bytes each byte, and the thread that reaches it."""
    return (places[:, None] + np.arange(size)).ravel(), np.repeat(lanes, size)


def put(content: Bits, accesses: Accesses, places: Bits, lanes: Bits, numbers: Bits) -> Bits:
    """Write numbers to bytes ``places`` of a memory whose numbers of that size are ``content``.

    Returns which of them change anything.
    """
    size = numbers.dtype.itemsize
    changes = content[places // size] != numbers
    accesses.writes(*bytes_of(places[changes], lanes[changes], size))
    accesses.stores(bytes_of(places, lanes, size)[0])
    content[places // size] = numbers
    # Of a warp's threads one is that writes, and which one is not said: a sum may have been rounded in several ways.
    others = content[places // size] != numbers
    if others.any():
        last = accesses.are_of_last(places, lanes)
        written = set(zip(places[last].tolist(), numbers[last].tolist(), strict=True))
        if not set(zip(places[others].tolist(), numbers[others].tolist(), strict=True)) <= written:
            raise Fault("warps write different numbers to one place at once")
    return changes


def aligned(addresses: Bits, size: int) -> None:
    if (addresses % addresses.dtype.type(size)).any():
        raise Fault(f"what is read or written as {size} bytes does not begin at a multiple of them")
