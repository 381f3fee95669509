"""Python's search for cycles that nobody can reach, kept to what is made meanwhile."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

from selective_compile.forks import lock_of_any_process

_LOCK = lock_of_any_process()
_WITHIN: list[None] = []  # one for each that is within


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Within, what was there before is not looked through, as Python does again and again while much is made: half a
    million objects of torch's modules, which take it a quarter of a second each time.  Nothing of them would be found
    but what somebody has let go of before; that is found behind the context.

    Where somebody has frozen objects himself before (`gc.freeze`), all is left to him; who does so within, finds them
    thawed.
    """
    ours = False
    try:
        with _LOCK:
            if _WITHIN or not gc.get_freeze_count():
                _WITHIN.append(None)
                ours = True
                gc.freeze()
        yield
    finally:
        with _LOCK:
            if ours and _WITHIN:  # in a process that was forked within, there is nothing left of it
                _WITHIN.pop()
                if not _WITHIN:
                    gc.unfreeze()


def _forget() -> None:
    """In a process that was forked, where whoever was within may not be."""
    if _WITHIN:
        _WITHIN.clear()
        gc.unfreeze()


os.register_at_fork(after_in_child=_forget)
