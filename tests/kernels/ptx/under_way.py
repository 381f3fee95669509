"""What goes on beside the threads that began it: copies and products, which are waited for by group or at a barrier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tests.kernels.ptx.accesses import Fault
from tests.kernels.ptx.formats import Bits

Work = Callable[[Bits], None]  # for those of a mask


@dataclass
class Begun:
    """``left``: by whom it is not waited for yet; ``group``: of each, by number, -1 until it is committed."""

    work: Work
    left: Bits
    group: Bits
    names: frozenset[str]


class Groups:
    """What each of so many threads, or warps, has begun, in groups that it waits for in their order."""

    def __init__(self, count: int) -> None:
        self.begun: list[Begun] = []
        self._committed = np.zeros(count, np.int64)

    def begin(self, mask: Bits, work: Work, names: frozenset[str] = frozenset()) -> None:
        """``work``: what is to be done when it is waited for; ``names``: of the registers that are not to be touched
        before."""
        self.begun.append(Begun(work, mask.copy(), np.full(len(mask), -1), names))

    def commit(self, mask: Bits) -> None:
        for each in self.begun:
            here = mask & each.left & (each.group < 0)
            each.group[here] = self._committed[here]
        self._committed[mask] += 1

    def wait(self, mask: Bits, newest: int = 0) -> None:
        """Until no more than so many groups, the newest, are under way."""
        for each in self.begun:
            due = mask & each.left & (each.group >= 0) & (each.group < self._committed - newest)
            if due.any():
                each.left &= ~due
                each.work(due)
        self.begun = [each for each in self.begun if each.left.any()]

    def names(self, mask: Bits) -> frozenset[str]:
        """Of the registers that some of the mask have under way."""
        return frozenset().union(*(each.names for each in self.begun if (each.left & mask).any()))


@dataclass
class Barrier:
    """Of a program, in shared memory: it has a next phase when all have arrived and all bytes have come.

    ``arrivals``: the number of each phase's; ``asked``: whether anybody has in this phase, who was told that it is not
    over, as it may not be.
    """

    count: int
    missing: int
    arrivals: list[int]
    new_arrival: Callable[[], int]
    bytes_missing: int = 0
    asked: bool = False
    copies: list[Callable[[], int]] = field(default_factory=list)

    @property
    def phase(self) -> int:
        return len(self.arrivals) - 1

    def arrive(self, expected: int) -> None:
        if not self.missing:
            raise Fault("more arrive at a barrier than it counts")
        self.missing -= 1
        self.bytes_missing += expected
        self._turn()

    def is_over(self, parity: int) -> bool:
        """Whether the phase of that parity is. Copies come after the first who asks."""
        if self.phase % 2 == parity and self.asked:
            while self.copies:
                self.bytes_missing -= self.copies.pop(0)()
            self._turn()
        self.asked |= self.phase % 2 == parity
        return self.phase % 2 != parity

    def _turn(self) -> None:
        if self.missing == 0 and self.bytes_missing == 0:
            self.arrivals.append(self.new_arrival())
            self.missing, self.asked = self.count, False
