"""A thread that makes calls one after the other, for as long as the process has threads."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any

Call = tuple[Future[Any], Callable[[], Any]]


class OneThread:
    """It starts with the first call, and ends when this is collected, after those that it has.

    A `ThreadPoolExecutor` takes no call once the main thread has ended, when others may still read their requests.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._thread = Thread(target=_serve, args=(self._calls,), name=name, daemon=True)
        weakref.finalize(self, self._calls.put, None).atexit = False

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """What comes of the call, which waits for those before it."""
        made: Future[Any] = Future()
        if not self._thread.ident:
            self._thread.start()
        self._calls.put((made, lambda: call(*arguments)))
        return made

    def close(self) -> None:
        """Let it end after the calls that it has, and wait for that."""
        self._calls.put(None)
        if self._thread.ident:
            self._thread.join()


def _serve(calls: SimpleQueue[Call | None]) -> None:
    while (taken := calls.get()) is not None:
        made, call = taken
        try:
            made.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            made.set_exception(error)
        del taken, made, call  # or they would be held until the next one comes
