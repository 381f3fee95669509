"""Python's search for cycles that nobody can reach, kept to what is made meanwhile."""

from __future__ import annotations

import gc
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

    Where somebody has frozen objects himself (`gc.freeze`), all is left to him.
    """
    with _LOCK:
        ours = bool(_WITHIN) or not gc.get_freeze_count()
        if ours:
            gc.freeze()
            _WITHIN.append(None)
    try:
        yield
    finally:
        with _LOCK:
            if ours:
                _WITHIN.pop()
            if ours and not _WITHIN:
                gc.unfreeze()
