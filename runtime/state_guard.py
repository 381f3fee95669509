"""The lock over an engine's state, in which Ctrl-C waits: whoever hears it finds the state whole."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, get_ident, main_thread
from types import FrameType
from typing import Any


class StateGuard(Condition):
    """Held for moments.  A SIGINT that comes meanwhile goes to its handler, which may raise, when the guard is free
    again; a second one at once, so that code of the user's that never ends can be left.

    Python runs handlers in the main thread alone, between any two of its instructions: raised between two that belong
    together, as taking blocks and writing down who has them, they would be lost.  `wait` is for other threads.
    """

    def __init__(self) -> None:
        super().__init__()
        # Of the main thread alone.  An exception that a handler raises among these lines leaves `_hear` in its place,
        # which hands on what it hears.
        self._handler: Callable[[int, FrameType | None], object] | None = None
        self._listens = False
        self._in_place = False  # by `__enter__`
        self._waiting = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hears for as long; else `__enter__` begins to, and `__exit__` ends it, each time."""
        in_place = self._listen()
        try:
            yield
        finally:
            if in_place:
                self._give_back()

    def __enter__(self) -> bool:
        if self._listen():
            self._in_place = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if is_main_thread() and not self._is_owned():  # type: ignore[attr-defined]
            if self._in_place:
                self._in_place = False
                self._give_back()
            self._hand_on()

    def _listen(self) -> bool:
        """Whether it does so from now on."""
        if self._listens or not is_main_thread():
            return False
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler) or self._is_told_by(handler):  # else nothing of Python's happens
            return False
        self._handler = handler
        signal.signal(signal.SIGINT, self._hear)
        self._listens = True
        return True

    def _is_told_by(self, handler: object) -> bool:
        """As where an exception has left `_hear`, or within a step of another engine that this one's step makes."""
        while isinstance(other := getattr(handler, "__self__", None), StateGuard):
            if other is self:
                return True
            handler = other._handler
        return False

    def _give_back(self) -> None:
        self._listens = False
        if signal.getsignal(signal.SIGINT) == self._hear:  # and not one of code of the user's that has come meanwhile
            signal.signal(signal.SIGINT, self._handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._waiting += 1
        if self._waiting > 1 or not self._is_owned():  # type: ignore[attr-defined]
            self._hand_on(frame)

    def _hand_on(self, frame: FrameType | None = None) -> None:
        if self._waiting and self._handler is not None:
            self._waiting = 0
            self._handler(signal.SIGINT, frame)


def is_main_thread() -> bool:
    return get_ident() == main_thread().ident
