"""Processes that are forked: they have no thread but the one that forked, and nobody gives back what others held.

An engine's locks are taken before, by the thread that forks, so that what they protect is whole in the new process.
Other locks are made anew there: what they protect is put in its place by one assignment, or is made again. Threads that
were started are not there: who has one asks whether it is still the same process.
"""

from __future__ import annotations

import os
import time
from threading import Condition, Lock, RLock
from typing import Any
from weakref import WeakSet

# Seconds that a fork waits, for steps to end, say.
PATIENCE = 1.0


class ThisProcess:
    """Told apart from the one that it was forked from, at the cost of comparing two integers.

    Attributes:
        number: another one in each process that is forked from one of this number.
    """

    number = 0


def lock_of_any_process() -> RLock:
    """One that is free in a process that is forked, but for the thread that forks."""
    lock = RLock()
    _LOCKS.add(lock)
    return lock


class LocksInForks:
    """Locks of one object, in the order in which they are taken.

    Attributes:
        lost: in a process that was forked, somebody held one of them for longer than `PATIENCE`, and has it for ever.
    """

    def __init__(self, *locks: RLock | Lock | Condition) -> None:
        self.lost = False
        self._locks = locks
        _OBJECTS.add(self)

    def hold(self, deadline: float) -> list[RLock | Lock | Condition]:
        """Those that could be had."""
        return [lock for lock in self._locks if lock.acquire(timeout=max(0.0, deadline - time.monotonic()))]

    def look(self) -> None:
        """In a process that was forked, where all that were held are free again."""
        held = self.hold(0.0)
        self.lost |= len(held) < len(self._locks)
        for lock in held:
            lock.release()


_LOCKS: WeakSet[RLock] = WeakSet()
_OBJECTS: WeakSet[LocksInForks] = WeakSet()
_FORKING = RLock()  # one thread at a time
_held: list[RLock | Lock | Condition] = []  # by that thread


def _hold() -> None:
    _FORKING.acquire()
    deadline = time.monotonic() + PATIENCE
    for each in _all(_OBJECTS):
        _held.extend(each.hold(deadline))


def _let_go() -> None:
    while _held:
        _held.pop().release()
    _FORKING.release()


def _let_go_in_child() -> None:
    ThisProcess.number += 1
    _let_go()
    for lock in _all(_LOCKS):
        if not lock.acquire(blocking=False):
            lock._at_fork_reinit()
        else:
            lock.release()
    for each in _all(_OBJECTS):
        each.look()


def _all(members: WeakSet[RLock] | WeakSet[LocksInForks]) -> list[Any]:
    """Those that there are now; another thread may make one meanwhile."""
    while True:
        try:
            return list(members)
        except RuntimeError:
            continue


os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_let_go_in_child)
