"""The background thread: runs steps while there is work, and sleeps while there is none."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, Thread
from typing import ParamSpec
from weakref import WeakMethod

P = ParamSpec("P")


class Run:
    """A thread that works until it is told to stop, at the latest when the process is to end."""

    def __init__(
        self,
        guard: Condition,
        *,
        work: Callable[[Run], None],
        on_end: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """
        Args:
            guard: held and notified where the thread is told.
            on_end: called in the thread as its last act, when `alive` is False already.
            failed: given what `work` or `on_end` raised.
        """
        self.stopping = False
        self._unregister = atexit.unregister  # of a module that is without its contents when the last things go
        self._guard = guard
        self._over = False
        # Python would wait for one that is no daemon before it calls what is to be called at exit.
        self._thread = Thread(target=self._run, args=(work, on_end, failed), name="selective-compile", daemon=True)

    @property
    def alive(self) -> bool:
        """False in a process that was forked meanwhile, too, which does not have the thread."""
        return self._thread.is_alive() and not self._over

    def start(self) -> None:
        atexit.register(self.stop)
        self._thread.start()

    def stop(self) -> None:
        """Let it finish what it does, and wait for it; nothing if it has not begun, or is over."""
        self.stopping = True
        if self._thread.is_alive():
            with self._guard:
                self._guard.notify_all()
            self._thread.join()
        self._unregister(self.stop)

    def _run(
        self, work: Callable[[Run], None], on_end: Callable[[], None], failed: Callable[[BaseException], None]
    ) -> None:
        try:
            try:
                work(self)
            finally:
                self._over = True
                on_end()
        except BaseException as error:  # noqa: BLE001 - for whoever started it
            failed(error)


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
        self._run: Run | None = None

    @property
    def alive(self) -> bool:
        return self._run is not None and self._run.alive

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start the thread; at the end let it finish its step and wait for it.

        Wherever Ctrl-C comes meanwhile, the thread is told to stop: once more, if it came while it was being told.

        Raises:
            RuntimeError: it runs already.
            BaseException: whatever `step` or `on_stop` raised; the thread has stopped at that.
        """
        failures: list[BaseException] = []
        run = Run(self._guard, work=self._loop, on_end=self._on_stop, failed=failures.append)
        try:
            try:
                self._start(run)
                yield
            finally:
                run.stop()
        finally:
            run.stop()
        if failures:
            raise failures.pop()

    def _start(self, run: Run) -> None:
        with self._guard:
            if self.alive:
                raise RuntimeError("a background thread must not be running already, got a second one")
            self._run = run
            run.start()

    def _loop(self, run: Run) -> None:
        while self._wait_for_work(run):
            self._step()

    def _wait_for_work(self, run: Run) -> bool:
        """False: stop, even if there is work."""
        with self._guard:
            self._guard.wait_for(lambda: run.stopping or self._has_work())
            return not run.stopping


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
