"""Threads that call a server's callbacks, and what the worker does with a callback that blocks."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait
from functools import partial
from threading import Condition, Thread
from typing import Generic, TypeVar

Call = Callable[[], object]  # what it returns, nobody takes
Answer = TypeVar("Answer")


class CallbackThreads:
    """Runs calls one after the other in a thread of their own, and beside those that block in further threads.

    The calls of a key run in the order in which they came. One that blocks keeps those of its own key waiting, and
    others only for a moment, or when all threads are in calls that block. Keys take turns. The threads are daemons.
    """

    def __init__(self, most: int, patience: float, *, name: str) -> None:
        """
        Args:
            most: threads, of this name.
            patience: seconds after which a call that has not returned is taken to block.
        """
        self._most = most
        self._patience = patience
        self._name = name
        self._changed = Condition()
        self._calls: dict[Hashable, deque[Call]] = {}  # what has not returned; of each key only the first may run
        self._ready: deque[Hashable] = deque()  # keys of which none runs
        self._threads: list[Thread] = []
        self._num_serving = 0
        self._began: dict[Hashable, float] = {}  # of the calls that run
        self._num_idle = 0
        self._closed = False

    def submit(self, key: Hashable, call: Call) -> None:
        """Have it run when those of the key before it have returned; it must not raise."""
        with self._changed:
            calls = self._calls.setdefault(key, deque())
            calls.append(call)
            if len(calls) == 1:
                self._ready.append(key)
                self._find_thread()
                self._changed.notify()

    def num_unfinished(self, key: Hashable) -> int:
        """Calls of the key that have not returned."""
        with self._changed:
            return len(self._calls.get(key, ()))

    @property
    def include_this(self) -> bool:
        """Whether the caller is in one of these calls."""
        return threading.current_thread() in self._alive()

    def close(self) -> None:
        """Threads end when there is nothing for them to do."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until all calls have returned and the threads have ended, after `close`. False: not by then."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while threads := self._alive():
            for thread in threads:
                thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    return False
        return True

    def _find_thread(self) -> None:
        """For a key that is ready there is a thread that waits, if only for the moment at which all others block."""
        if self._ready and not self._num_idle and self._num_serving < self._most:
            self._num_serving += 1
            self._num_idle += 1
            thread = Thread(target=self._serve, name=self._name, daemon=True)
            self._threads = [*(each for each in self._threads if each.is_alive()), thread]
            thread.start()

    def _alive(self) -> list[Thread]:
        with self._changed:
            return [thread for thread in self._threads if thread.is_alive()]

    def _serve(self) -> None:
        while (found := self._next()) is not None:
            key, call = found
            call()
            with self._changed:
                del self._began[key]
                self._calls[key].popleft()
                if self._calls[key]:
                    self._ready.append(key)
                else:
                    del self._calls[key]
                self._num_idle += 1
                self._changed.notify()

    def _next(self) -> tuple[Hashable, Call] | None:
        """What to run next; None: the thread, which is idle, is to end."""
        with self._changed:
            while self._ready or not self._closed:
                others = self._began.values()
                left = max(others, default=-math.inf) + self._patience - time.monotonic()
                if self._ready and left <= 0:
                    break
                self._changed.wait(left if self._ready else None)
            self._num_idle -= 1
            if not self._ready:
                self._num_serving -= 1
                return None
            key = self._ready.popleft()
            self._began[key] = time.monotonic()
            self._find_thread()
            return key, self._calls[key][0]


class Question(Generic[Answer]):
    """A callback that is asked for something again and again, and waited for only so long.

    An answer that takes longer comes with a later `ask`, which begins no other call until then.
    """

    def __init__(self, threads: CallbackThreads, patience: float) -> None:
        """`patience`: seconds."""
        self._threads = threads
        self._patience = patience
        self._asked: Future[Answer] | None = None

    def ask(self, callback: Callable[[], Answer], *, anew: bool = True) -> Answer | None:
        """The answer if there is one by now; what the callback raises comes here as well.

        Args:
            anew: False: only of a call that has begun already.
        """
        if self._asked is None and anew:
            self._asked = Future()
            self._threads.submit(self, partial(answer, self._asked, callback))
            wait([self._asked], self._patience)
        if self._asked is None or not self._asked.done():
            return None
        asked, self._asked = self._asked, None
        return asked.result()

    def give_up(self, late: Callable[[Answer], None]) -> None:
        """Ask no more; the answer of a call that has not returned goes there, in its thread."""
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.add_done_callback(lambda done: late(done.result()) if done.exception() is None else None)


def answer(asked: Future[Answer], callback: Callable[[], Answer]) -> None:
    """Put what the callback gives into `asked`, or what it raises."""
    try:
        found = callback()
    except BaseException as error:  # noqa: BLE001 - raised again where the answer is asked for
        asked.set_exception(error)
    else:
        asked.set_result(found)
