"""The background thread: runs steps while there is work, and sleeps while there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Condition
from typing import ParamSpec
from weakref import WeakMethod

from selective_compile.forks import ThisProcess

P = ParamSpec("P")


class BackgroundThread:
    """Calls `step` again and again in a thread of its own, for as long as `running` is entered."""

    def __init__(
        self,
        *,
        guard: Condition,
        has_work: Callable[[], bool],
        step: Callable[[], None],
        on_stop: Callable[[], None],
    ) -> None:
        """
        Args:
            guard: held while `has_work` is called, and notified by others when its answer may have changed.
            has_work: whether there is something for `step` to do.
            step: called without the guard.
            on_stop: called in the thread as its last act, when `alive` is False already.
        """
        self._guard = guard
        self._has_work = has_work
        self._step = step
        self._on_stop = on_stop
        self._alive = False
        self._stopping = False
        self._process = ThisProcess.number

    @property
    def alive(self) -> bool:
        return self._alive and self._process == ThisProcess.number

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start the thread; at the end let it finish its step and wait for it.

        Raises:
            RuntimeError: it runs already.
            BaseException: whatever `step` or `on_stop` raised; the thread has stopped at that.
        """
        with self._guard:
            if self.alive:
                raise RuntimeError("a background thread must not be running already, got a second one")
            self._alive, self._stopping, self._process = True, False, ThisProcess.number
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="selective-compile")
        loop, process = executor.submit(self._loop), ThisProcess.number
        try:
            yield
        finally:
            if process == ThisProcess.number:  # in one that was forked meanwhile there is no such thread
                with self._guard:
                    self._stopping = True
                    self._guard.notify_all()
                executor.shutdown()
        if process == ThisProcess.number:
            loop.result()

    def _loop(self) -> None:
        try:
            while self._wait_for_work():
                self._step()
        finally:
            self._alive = False
            self._on_stop()

    def _wait_for_work(self) -> bool:
        """False: stop, even if there is work."""
        with self._guard:
            self._guard.wait_for(lambda: self._stopping or self._has_work())
            return not self._stopping


def weakly(method: Callable[P, None]) -> Callable[P, None]:
    """The method without a hold on its object: a cycle would keep the KV pools until the garbage collector runs.

    While the background thread runs, whoever entered `running` holds the engine.
    """
    reference = WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        bound = reference()
        if bound is not None:
            bound(*args, **kwargs)

    return call
