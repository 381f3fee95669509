"""Processes that are forked: they have no thread but the one that forked, and nobody gives back what others held.

So an engine's locks are taken before, by the thread that forks, and what they protect is whole in the new process.
Threads that were started are not there: who has one asks whether it is still the same process.
"""

from __future__ import annotations

import os
from threading import Condition, Lock, RLock
from weakref import WeakSet

# Seconds that a fork waits for each lock: for a step to end, say.
PATIENCE = 1.0


class ThisProcess:
    """Told apart from the one that it was forked from, at the cost of comparing two integers.

    Attributes:
        number: another one in each process that is forked from one of this number.
    """

    number = 0


class LocksInForks:
    """Locks of one object, in the order in which they are taken.

    Attributes:
        lost: in a process that was forked, somebody who held one for longer than `PATIENCE` has it for ever.
    """

    def __init__(self, *locks: RLock | Lock | Condition) -> None:
        self.lost = False
        self._locks = locks
        self._held: list[RLock | Lock | Condition] = []
        _ALL.add(self)

    def hold(self) -> None:
        self._held = [lock for lock in self._locks if lock.acquire(timeout=PATIENCE)]

    def let_go(self, *, forked: bool) -> None:
        self.lost |= forked and len(self._held) < len(self._locks)
        while self._held:
            self._held.pop().release()


_ALL: WeakSet[LocksInForks] = WeakSet()


def _hold() -> None:
    for each in _ALL:
        each.hold()


def _let_go() -> None:
    for each in _ALL:
        each.let_go(forked=False)


def _let_go_in_child() -> None:
    ThisProcess.number += 1
    for each in _ALL:
        each.let_go(forked=True)


os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_let_go_in_child)
