"""The lock that a step holds, which knows the thread that has it."""

from __future__ import annotations

import atexit
from threading import Condition, Event, Lock, RLock, current_thread, main_thread
from weakref import WeakSet

from selective_compile.forks import LocksInForks

LONGEST = 10.0  # seconds that a process which is to end waits for a step


class _Exit:
    """Keeps daemon threads, as those that read a stream, from steps of a process that is to end.

    Python ends such threads where they next want the interpreter, and one that is then within a library in C++ takes
    the process with it; or they find modules without their contents.  When this is called, only they are left.
    """

    def __init__(self) -> None:
        self.over = False
        self.locks: WeakSet[StepLock] = WeakSet()
        atexit.register(self.begin)

    def begin(self) -> None:
        """Wait for the steps that run; there will be no other but the main thread's."""
        self.over = True
        for lock in list(self.locks):
            lock.keep_others_out()

    def stay_out(self) -> None:
        if self.over and current_thread() is not main_thread():
            Event().wait()


_EXIT = _Exit()


class StepLock:
    """There is one step at a time; who would wait for it from within is refused, for he would wait for ever.

    So would he in a process that was forked during a step, whose thread is not there.
    """

    def __init__(self, *others: Lock | Condition) -> None:
        """`others`: locks that are taken within a step, in this order."""
        self._lock = RLock()  # of C, so that an exception of a signal's comes when it is held by a `with`, or free
        self._in_forks = LocksInForks(self._lock, *others)
        _EXIT.locks.add(self)

    @property
    def lost(self) -> bool:
        """Whether this process was forked within a step, whose thread is not there: there will be no other step."""
        return self._in_forks.lost

    def of_one_step(self) -> RLock:
        """The lock, to be entered.  Raises RuntimeError as `check`."""
        self.check()
        lock = self._lock  # before it is asked whether the process is to end, when there comes to be another
        _EXIT.stay_out()
        return lock

    def keep_others_out(self) -> None:
        """For good, but for this thread."""
        self._lock.acquire(timeout=LONGEST)
        self._lock = RLock()

    def check(self) -> None:
        """Raises RuntimeError in the thread that holds it, and where a thread of another process does."""
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError(
                "steps must not be waited for from within a step, by a processor, a criterion or an observer of it"
            )
        if self.lost:
            raise RuntimeError("a process must not be forked within a step of its engine, and this was: make another")
