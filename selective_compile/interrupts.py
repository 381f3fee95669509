"""Ctrl-C where no work has begun yet, or all is done: the process ends at once, with one word.

Python tells of it by an exception wherever the program is, and torch drops one that is raised while it loads.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

INTERRUPTED = 130
WORD = "interrupted"


@contextmanager
def ending_at_once() -> Iterator[None]:
    """For what imports and writes nothing: there is nothing to put in order."""
    with _handled_by(end_at_once):
        yield


@contextmanager
def raising() -> Iterator[None]:
    """For work, which puts in order what it has begun."""
    with _handled_by(signal.default_int_handler):
        yield


@contextmanager
def _handled_by(handler: Callable[..., Any]) -> Iterator[None]:
    """Where nobody has asked that it be ignored; handlers are the main thread's."""
    before = signal.getsignal(signal.SIGINT)
    if before in (signal.SIG_IGN, None) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def end_at_once(number: int, frame: Any) -> NoReturn:
    os.write(2, f"{WORD}\n".encode())
    os._exit(INTERRUPTED)
