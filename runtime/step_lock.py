"""The lock that a step holds, which knows the thread that has it."""

from __future__ import annotations

from threading import RLock


class StepLock:
    """There is one step at a time; who would wait for it from within is refused, for he would wait for ever."""

    def __init__(self) -> None:
        self._lock = RLock()  # of C, so that an exception of a signal's comes when it is held by a `with`, or free

    def of_one_step(self) -> RLock:
        """The lock, to be entered.  Raises RuntimeError in the thread that holds it."""
        self.check()
        return self._lock

    def check(self) -> None:
        """Raises RuntimeError in the thread that holds it."""
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError(
                "steps must not be waited for from within a step, by a processor, a criterion or an observer of it"
            )
