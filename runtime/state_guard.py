"""The lock over an engine's state, in which signals wait: whoever hears of one finds the state whole."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, get_ident, main_thread
from types import FrameType
from typing import Any, Final

Handler = Callable[[int, FrameType | None], object]
# By which a process is told to end, or that its time is up: their handlers raise.
NAMES: Final = ("SIGINT", "SIGTERM", "SIGALRM", "SIGVTALRM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
HEARD: Final = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))  # Windows has a few of them


class StateGuard(Condition):
    """Held for moments.  A signal that comes meanwhile goes to its handler, which may raise, when the guard is free
    again; a second one at once, so that code of the user's that never ends can be left.

    Python runs handlers in the main thread alone, between any two of its instructions: raised between two that belong
    together, as taking blocks and writing down who has them, they would be lost.  `wait` is for other threads.
    """

    def __init__(self) -> None:
        super().__init__()
        # Of the main thread alone.  An exception that a handler raises among these lines leaves `_hear` in its place,
        # which hands on what it hears.
        self._handlers: dict[int, Handler] = {}
        self._listens = False
        self._in_place = False  # by `__enter__`
        self._waiting: Counter[int] = Counter()

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
            self._hand_all_on()

    def _listen(self) -> bool:
        """Whether it does so from now on."""
        if self._listens or not is_main_thread():
            return False
        listens = False
        for number in HEARD:
            handler = signal.getsignal(number)
            if handler == self._hear:  # an exception has left it in place
                listens = True
            elif callable(handler) and not self._is_told_by(number, handler):  # else nothing of Python's happens
                self._handlers[number] = handler
                signal.signal(number, self._hear)
                listens = True
        self._listens = listens
        return listens

    def _is_told_by(self, number: int, handler: object) -> bool:
        """As where an exception has left `_hear`, or within a step of another engine that this one's step makes."""
        while isinstance(other := getattr(handler, "__self__", None), StateGuard):
            if other is self:
                return True
            handler = other._handlers[number]
        return False

    def _give_back(self) -> None:
        self._listens = False
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._hear:  # and not one of code of the user's that has come meanwhile
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._waiting[number] += 1
        if self._waiting[number] > 1 or not self._is_owned():  # type: ignore[attr-defined]
            self._hand_on(number, frame)

    def _hand_all_on(self) -> None:
        if self._waiting:
            try:
                self._hand_on(next(iter(self._waiting)))
            finally:
                self._hand_all_on()

    def _hand_on(self, number: int, frame: FrameType | None = None) -> None:
        if self._waiting.pop(number, 0):
            try:
                self._handlers[number](number, frame)
            except BaseException as error:
                error._of_a_signal = True  # type: ignore[attr-defined]
                raise


def is_passed_on(error: BaseException) -> bool:
    """Whether it is nobody's failure, whose code it came in: Ctrl-C, and what else a handler of a signal has raised."""
    return isinstance(error, KeyboardInterrupt) or hasattr(error, "_of_a_signal")


def is_main_thread() -> bool:
    return get_ident() == main_thread().ident
