"""The lock that a step holds, which knows the thread that has it."""

from __future__ import annotations

from threading import Lock, get_ident


class StepLock:
    """There is one step at a time; who would wait for it from within is refused, for he would wait for ever."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._holder: int | None = None

    def __enter__(self) -> None:
        self.check()
        self._lock.acquire()
        self._holder = get_ident()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._holder = None
        self._lock.release()

    def check(self) -> None:
        """Raises RuntimeError in the thread that holds it."""
        if self._holder == get_ident():
            raise RuntimeError(
                "steps must not be waited for from within a step, by a processor, a criterion or an observer of it"
            )
