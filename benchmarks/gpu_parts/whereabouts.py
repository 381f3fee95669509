"""Where the time of a start goes, by looking every few milliseconds at where the main thread is.

Unlike a profiler it takes no part in what it measures, and sees what runs while modules are imported. It imports
nothing that takes time.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType

EVERY = 0.01  # seconds between two looks; a call that holds the interpreter's lock has all that passed meanwhile
ROOT = str(Path(__file__).parents[2])
COUNT = 16


class Whereabouts:
    """Of the thread that makes it, from then on."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()
        self._thread = threading.get_ident()
        threading.Thread(target=self._look, daemon=True).start()

    def longest(self, count: int = COUNT) -> dict[str, float]:
        """Seconds by where it was, the most first: the innermost function of this project, and whose code that called
        in the end."""
        return {place: round(seconds, 2) for place, seconds in Counter(self._seconds).most_common(count)}

    def in_words(self) -> str:
        return "".join(f"{seconds:6.2f} s  {place}\n" for place, seconds in self.longest().items())

    def _look(self) -> None:
        before = time.perf_counter()
        while True:
            time.sleep(EVERY)
            frame, now = sys._current_frames().get(self._thread), time.perf_counter()
            if frame is None:
                return
            self._seconds[place_of(frame)] += now - before
            before = now


def place_of(frame: FrameType) -> str:
    """``module.function > package.module`` of a thread whose innermost call that is; of a project's own one side."""
    inner: FrameType | None = frame
    while inner is not None and not inner.f_code.co_filename.startswith(ROOT):
        inner = inner.f_back
    called = ".".join(name_of(frame).split(".")[:2])
    if inner is None:
        return called
    own = f"{name_of(inner)}.{inner.f_code.co_name}"
    return own if inner is frame else f"{own} > {called}"


def name_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "?"))
