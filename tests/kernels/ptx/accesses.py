"""Who has reached each byte of a memory since when: where two warps meet, and one writes, a barrier must lie between.

So one run is enough to see what another order of the warps would change.  A store that changes nothing is no meeting:
warps may write a number that all of them have.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tests.kernels.ptx.formats import Bits

LANES = 32  # of a warp


class Fault(AssertionError):
    """What a program must not do, or only by chance is right."""


@dataclass
class Threads:
    """Of a launch: ``programs`` of so many warps, whose ``rounds`` are the barriers that all of their threads came to.

    A warp's name is a number above 0; that of several warps of a program is one of its own.
    """

    programs: int
    threads: int
    rounds: Bits = field(init=False)

    def __post_init__(self) -> None:
        self.rounds = np.zeros(self.programs, np.int32)
        lane = np.arange(self.programs * self.threads)
        self.program_of, self.thread = lane // self.threads, lane % self.threads
        self.names = self.threads // LANES + 1  # of each program
        self.warp_of = (1 + self.program_of * self.names + self.thread // LANES).astype(np.int32)
        self.several_of = (1 + self.program_of * self.names + self.threads // LANES).astype(np.int32)

    @property
    def lanes(self) -> int:
        return len(self.thread)


NOBODY, ANYBODY = 0, -1  # beside the warps' names


class Accesses:
    """Of ``size`` bytes by some `Threads`.  Nothing is said of what one warp's own threads do."""

    def __init__(self, size: int, threads: Threads) -> None:
        self._threads = threads
        # Nearly all of a large memory is reached by nobody, and of such arrays takes no room.
        self._writer, self._written = np.zeros(size, np.int32), np.zeros(size, np.int32)
        self._reader, self._read = np.zeros(size, np.int32), np.zeros(size, np.int32)
        self.stored = np.zeros(size, bool)  # which bytes threads have written

    def reads(self, places: Bits, lanes: Bits) -> None:
        """Each of the bytes is read by the thread ``lanes`` has for it."""
        if self._apart(self._writer[places], self._written[places], lanes).any():
            raise Fault("a warp reads what another one has written, and no barrier lies between")
        threads, before = self._threads, self._reader[places]
        mine, several = threads.warp_of[lanes], threads.several_of[lanes]
        own = self._same_program(before, lanes)
        beside = own & (before != mine) & (self._read[places] == threads.rounds[threads.program_of[lanes]])
        now = np.where((before != NOBODY) & ~own, ANYBODY, np.where(beside, several, mine))
        self._reader[places] = now
        # Of several that read one byte at once, one is the last.
        if (others := (last := self._reader[places]) != now).any():
            ours = others & self._same_program(last, lanes) & (now != ANYBODY)
            self._reader[places[ours]] = several[ours]
            self._reader[places[others & ~ours]] = ANYBODY
        self._read[places] = threads.rounds[threads.program_of[lanes]]

    def writes(self, places: Bits, lanes: Bits) -> None:
        self.may_write(places, lanes)
        self._writer[places] = self._threads.warp_of[lanes]
        self._written[places] = self._threads.rounds[self._threads.program_of[lanes]]

    def may_write(self, places: Bits, lanes: Bits) -> None:
        if self._apart(self._writer[places], self._written[places], lanes).any():
            raise Fault("a warp writes over what another one has written, and no barrier lies between")
        if self._apart(self._reader[places], self._read[places], lanes).any():
            raise Fault("a warp writes over what another one has read, and no barrier lies between")

    def stores(self, places: Bits) -> None:
        """The bytes are written, be it with what is there."""
        self.stored[places] = True

    def written_by(self, places: Bits, lanes: Bits) -> Bits:
        """Whether the warp itself has written a byte, or it was written in front of a barrier."""
        return ~self._apart(self._writer[places], self._written[places], lanes)

    def are_of_last(self, places: Bits, lanes: Bits) -> Bits:
        """Whether the thread named for a byte is of the warp that has written it last."""
        return self._writer[places] == self._threads.warp_of[lanes]

    def forget(self, places: Bits) -> None:
        """What comes there now comes from no thread."""
        self._writer[places] = self._reader[places] = NOBODY

    def _apart(self, who: Bits, when: Bits, lanes: Bits) -> Bits:
        """Where somebody else was, who may as well have come later."""
        threads = self._threads
        other = (who != NOBODY) & (who != threads.warp_of[lanes])
        return other & (~self._same_program(who, lanes) | (when == threads.rounds[threads.program_of[lanes]]))

    def _same_program(self, who: Bits, lanes: Bits) -> Bits:
        return (who > 0) & ((who - 1) // self._threads.names == self._threads.program_of[lanes])
