"""The lock that a step holds, which knows the thread that has it."""

from __future__ import annotations

from threading import Condition, Lock, RLock

from selective_compile.forks import LocksInForks


class StepLock:
    """There is one step at a time; who would wait for it from within is refused, for he would wait for ever.

    So would he in a process that was forked during a step, whose thread is not there.
    """

    def __init__(self, *others: Lock | Condition) -> None:
        """`others`: locks that are taken within a step, in this order."""
        self._lock = RLock()  # of C, so that an exception of a signal's comes when it is held by a `with`, or free
        self._in_forks = LocksInForks(self._lock, *others)

    @property
    def lost(self) -> bool:
        """Whether this process was forked within a step, whose thread is not there: there will be no other step."""
        return self._in_forks.lost

    def of_one_step(self) -> RLock:
        """The lock, to be entered.  Raises RuntimeError as `check`."""
        self.check()
        return self._lock

    def check(self) -> None:
        """Raises RuntimeError in the thread that holds it, and where a thread of another process does."""
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError(
                "steps must not be waited for from within a step, by a processor, a criterion or an observer of it"
            )
        if self.lost:
            raise RuntimeError("a process must not be forked within a step of its engine, and this was: make another")
