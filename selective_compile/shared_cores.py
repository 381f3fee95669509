"""Threads that wait for one another, on cores that other work wants, too.

At the end of each operation, GNU's OpenMP threads wait for one another by looking again and again, for a millisecond
or so, before they sleep.  Where another process wants the cores, those that wait keep them from those that work, in
both processes.  OpenMP itself looks only briefly once it runs more threads than there are cores
(`gomp_throttled_spin_count_var` of libgomp), which is to be had at any time: by one more thread that has a team of its
own and sleeps.
"""

from __future__ import annotations

import ctypes
import logging
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event, Thread

from selective_compile.kernels import native

logger = logging.getLogger(__name__)

TASKS = Path("/proc/self/task")
WINDOW = 0.5  # seconds between two looks
# Of a window, all threads together: two on idle cores waited for 0.004 to 0.12 of it, beside one or two busy processes
# for 0.78 to 1.03, whether idle ones slept or not (engines of 5 and 125 million parameters on two cores of a Zen 4).
# Sleeping on idle cores makes a step of the larger one take 1.2 times as long: one window of 0.12 is no reason to.
SHARED, ALONE = 0.4, 0.2
CALM = 4  # windows, one after another, before the threads are trusted to be alone

Waits = Mapping[str, int]
_Work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class SharedCores:
    """Looks, at times, whether this process's threads wait for cores, and lets idle ones sleep while they do."""

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, waits: Callable[[], Waits] | None = None
    ) -> None:
        """
        Args:
            waits: what `waits_for_cores` gives.
        """
        self._clock, self._waits = clock, waits or waits_for_cores
        self._before: tuple[float, Waits] | None = None
        self._calm = 0
        self._team: SleepingTeam | None = None

    @property
    def shared(self) -> bool:
        """Other work was found to want the cores."""
        return self._team is not None

    def look(self) -> None:
        """Called often, as before each step: does something only where a window is over."""
        now = self._clock()
        if self._before is not None and now < self._before[0] + WINDOW:
            return
        waits = self._waits()
        if self._before is not None:
            began, before = self._before
            # What lies between two looks may be an hour without a step: that tells nothing about the steps.
            if now < began + 4 * WINDOW:
                waited = sum(waits[task] - before[task] for task in waits.keys() & before.keys())
                self._judge(waited / 1e9 / (now - began))
        self._before = now, waits

    def _judge(self, share: float) -> None:
        self._calm = self._calm + 1 if share < ALONE else 0
        if self._team is None and share > SHARED:
            logger.info("other work wants the cores: threads that wait for one another sleep")
            self._team = SleepingTeam()
        elif self._team is not None and self._calm >= CALM:
            logger.info("nobody else wants the cores any more")
            self._team.end()
            self._team = None


class SleepingTeam:
    """A thread with a team of OpenMP threads, all of which sleep until this ends or is gone."""

    def __init__(self) -> None:
        gone = Event()
        self.thread = Thread(target=_sleep, args=(gone,), name="selective-compile-sleeping-team", daemon=True)
        self.end = weakref.finalize(self, gone.set)
        self.thread.start()


def _sleep(gone: Event) -> None:
    if parallel := native.torch_parallel():
        call = ctypes.CFUNCTYPE(None, _Work, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(parallel)
        call(_Work(lambda _: None), None, 2, 0)
    gone.wait()


def waits_for_cores() -> Waits:
    """Nanoseconds that each thread of this process was ready to run and had no core; nothing where it is not known."""
    found = {}
    try:
        for task in TASKS.iterdir():
            found[task.name] = int((task / "schedstat").read_text(encoding="utf-8").split()[1])
    except (OSError, IndexError, ValueError):  # a thread has ended, or this is no Linux
        pass
    return found
