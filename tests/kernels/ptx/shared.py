"""The memory that the threads of a program share, with what goes on there beside them.

A byte that a copy is under way to must not be touched, one that a product under way reads must not be written.  What a
bulk copy has brought may be read by warps that have asked whether it is there, or that met one of them at a barrier;
what threads have written, by products that run beside them, behind a fence.
"""

from __future__ import annotations

import numpy as np

from tests.kernels.ptx.accesses import LANES, Accesses, Fault, Threads
from tests.kernels.ptx.formats import UNSIGNED, Bits
from tests.kernels.ptx.memory import aligned, bytes_of, put


class Shared:
    """[programs, bytes], which begins at an address that no pointer to nothing is; at first it is full of NaN."""

    BEGIN = 1024

    def __init__(self, threads: Threads, size: int) -> None:
        self._threads, self._size = threads, size
        self._stride = -(-(self.BEGIN + size) // 1024) * 1024
        self._content = np.full(threads.programs * self._stride, 0xFF, np.uint8)
        self._accesses = Accesses(len(self._content), threads)
        self._arriving, self._fresh = (np.zeros(len(self._content), bool) for _ in range(2))
        self._multiplied = np.zeros(len(self._content), np.int16)  # by so many warps
        # Of what bulk copies have brought, the number of the arrival; which warps know of each, from the second on.
        self._arrival = np.zeros(len(self._content), np.int32)
        self._known: list[Bits] = [np.zeros(0, bool)]

    def places(self, lanes: Bits, addresses: Bits, size: int) -> Bits:
        """Of bytes, each in the program of the thread that is named for it."""
        aligned(addresses, size)
        inside = (addresses >= self.BEGIN) & (addresses + np.uint64(size) <= self.BEGIN + self._size)
        if not inside.all():
            raise Fault(f"{int((~inside).sum())} threads reach outside of shared memory")
        return self._threads.program_of[lanes] * self._stride + addresses.astype(np.int64)

    def load(self, lanes: Bits, addresses: Bits, size: int) -> Bits:
        places = self.places(lanes, addresses, size)
        self._are_read(*bytes_of(places, lanes, size))
        return self._content.view(UNSIGNED[size])[places // size]

    def store(self, lanes: Bits, addresses: Bits, numbers: Bits) -> None:
        places, size = self.places(lanes, addresses, numbers.dtype.itemsize), numbers.dtype.itemsize
        every, _ = bytes_of(places, lanes, size)
        self._must_not(self._arriving[every], "a thread writes where a copy is under way to")
        self._must_not(self._multiplied[every] > 0, "a thread writes what a product under way reads")
        changes = put(self._content.view(UNSIGNED[size]), self._accesses, places, lanes, numbers)
        self._fresh[bytes_of(places[changes], lanes[changes], size)[0]] = True
        self._arrival[every] = 0

    def fence(self, lanes: Bits) -> None:
        """Products see what whole warps among these have written, and what was written in front of a barrier."""
        for lane in self._whole_warps(lanes):
            begin = self._threads.program_of[lane] * self._stride
            fresh = begin + np.flatnonzero(self._fresh[begin : begin + self._stride])
            self._fresh[fresh[self._accesses.written_by(fresh, np.full(len(fresh), lane))]] = False

    def multiply(self, lanes: Bits, addresses: Bits) -> tuple[Bits, Bits]:
        """The numbers of 16 bits that a product reads from now on, which warps do together, each of which a thread is
        named of; and the places of their bytes."""
        places = self.places(np.full(len(addresses), lanes[0]), addresses, 2)
        every = np.unique(bytes_of(places, places, 2)[0])
        for lane in lanes:
            self._are_read(every, np.full(len(every), lane))
        self._must_not(self._fresh[every], "a product reads what threads have written without a fence behind it")
        self._multiplied[every] += len(lanes)
        return self._content.view(np.uint16)[places // 2], every

    def multiplied(self, lanes: Bits, places: Bits) -> None:
        """Warps have waited for a product of theirs, that reads these places up to now."""
        for lane in lanes:
            self._are_read(places, np.full(len(places), lane))
        self._multiplied[places] -= len(lanes)

    def expect(self, lanes: Bits, addresses: Bits, size: int) -> Bits:
        """Pieces of ``size`` bytes that a copy is under way to from now on; the places of their bytes."""
        places, of_bytes = bytes_of(self.places(lanes, addresses, min(size, 8)), lanes, size)
        self._must_not(self._arriving[places], "two copies are under way to one place")
        self._must_not(self._multiplied[places] > 0, "a copy is under way to what a product under way reads")
        self._accesses.may_write(places, of_bytes)
        self._arriving[places] = True
        return places

    def arrived(self, lanes: Bits, addresses: Bits, size: int) -> None:
        """Pieces that the threads themselves write now."""
        places, _ = bytes_of(self.places(lanes, addresses, min(size, 8)), lanes, size)
        self._arriving[places] = False

    def land(self, places: Bits, numbers: Bits, arrival: int) -> None:
        """What a bulk copy has brought: ``numbers``, whose bytes have these places."""
        self._arriving[places] = self._fresh[places] = False
        self._accesses.forget(places)
        self._content[places] = numbers.view(np.uint8)
        self._arrival[places] = arrival

    def reach_barrier(self, lanes: Bits, addresses: Bits, *, changes: bool) -> None:
        """A barrier there begins or ends, or is arrived at or asked: this by any warps at once."""
        reached = bytes_of(self.places(lanes, addresses, 8), lanes, 8)
        if changes:
            self._accesses.writes(*reached)
        else:
            self._accesses.reads(*reached)

    def new_arrival(self) -> int:
        self._known.append(np.zeros(self._threads.lanes // LANES, bool))
        return len(self._known) - 1

    def know(self, lane: int, arrival: int) -> None:
        self._known[arrival][lane // LANES] = True

    def met(self, programs: Bits) -> None:
        """All threads of these came to a barrier: what one of them knows all know."""
        for known in self._known[1:]:
            by_program = known.reshape(self._threads.programs, -1)
            by_program[programs & by_program.any(1)] = True

    def _are_read(self, places: Bits, lanes: Bits) -> None:
        self._must_not(self._arriving[places], "a warp reads what a copy is under way to")
        self._accesses.reads(places, lanes)
        brought = self._arrival[places]
        for arrival in np.unique(brought[brought > 0]):
            warps = np.unique(lanes[brought == arrival] // LANES)
            self._must_not(
                ~self._known[arrival][warps], "a warp reads what a copy has brought, and did not wait for it"
            )

    def _whole_warps(self, lanes: Bits) -> Bits:
        """The first thread of each warp whose threads are all there."""
        warps, counts = np.unique(lanes // LANES, return_counts=True)
        return warps[counts == LANES] * LANES

    @staticmethod
    def _must_not(these: Bits, what: str) -> None:
        if these.any():
            raise Fault(what)
