"""What goes on beside the threads that began it: copies and products, which are waited for by group or at a barrier.

They may be done at once or not before they are waited for, or at any time between. Either end is tried here: where the
results differ, something was read or written too early.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tests.kernels.ptx.formats import Bits
from tests.kernels.ptx.memory import Fault

Work = Callable[[Bits], None]  # for those of a mask


@dataclass
class Begun:
    """``left``: of whom it is not done yet; ``group``: of each, by number, -1 until it is committed."""

    work: Work
    left: Bits
    group: Bits
    names: frozenset[str] = frozenset()


class Groups:
    """What each of so many threads, or warps, has begun, in groups that it waits for in their order."""

    def __init__(self, count: int, *, early: bool) -> None:
        self.early = early
        self.begun: list[Begun] = []
        self.committed = np.zeros(count, np.int64)

    def begin(self, mask: Bits, work: Work, names: frozenset[str] = frozenset()) -> None:
        """``names``: of the registers that are not to be touched before it is waited for."""
        if self.early:
            work(mask)
        self.begun.append(Begun(work, mask.copy(), np.full(len(mask), -1), names))

    def commit(self, mask: Bits) -> None:
        for each in self.begun:
            here = mask & each.left & (each.group < 0)
            each.group[here] = self.committed[here]
        self.committed[mask] += 1

    def wait(self, mask: Bits, newest: int = 0) -> None:
        """Until no more than so many groups, the newest, are under way."""
        for each in self.begun:
            due = mask & each.left & (each.group >= 0) & (each.group < self.committed - newest)
            if due.any():
                if not self.early:
                    each.work(due)
                each.left &= ~due
        self.begun = [each for each in self.begun if each.left.any()]

    def names(self, mask: Bits) -> frozenset[str]:
        """Of the registers that some of the mask have under way."""
        return frozenset().union(*(each.names for each in self.begun if (each.left & mask).any()))


@dataclass
class Barrier:
    """Of a program, in shared memory: it has a next phase when all have arrived and all bytes have come."""

    count: int
    missing: int
    bytes_missing: int = 0
    phase: int = 0
    copies: list[Callable[[], int]] = field(default_factory=list)

    def arrive(self, expected: int) -> None:
        if not self.missing:
            raise Fault("more arrive at a barrier than it counts")
        self.missing -= 1
        self.bytes_missing += expected
        self._turn()

    def came(self, count: int) -> None:
        self.bytes_missing -= count
        self._turn()

    def finish_copies(self) -> None:
        while self.copies:
            self.came(self.copies.pop(0)())

    def _turn(self) -> None:
        if self.missing == 0 and self.bytes_missing == 0:
            self.phase += 1
            self.missing = self.count
