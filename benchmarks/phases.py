"""How long functions take, by wrapping them where they are called from: the phases of a start.

Not by looking at where a thread is: Dynamo runs frames of its own making, and whoever asks Python for the frames of
another thread meanwhile breaks them.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

Seconds = tuple[float, float]  # of the processor and of the clock


@contextmanager
def watched(functions: Mapping[str, str]) -> Iterator[dict[str, Seconds]]:
    """Fills with what the calls of ``functions`` take, all of a phase together: ``module.name`` as callers have it,
    and the phase."""
    found: dict[str, Seconds] = {}

    def watch(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            result, took = timed(lambda: function(*args, **options))
            before = found.get(phase, (0.0, 0.0))
            found[phase] = (before[0] + took[0], before[1] + took[1])
            return result

        return call

    places = {path: (importlib.import_module(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in functions}
    before = {path: getattr(module, name) for path, (module, name) in places.items()}
    for path, (module, name) in places.items():
        setattr(module, name, watch(functions[path], before[path]))
    try:
        yield found
    finally:
        for path, (module, name) in places.items():
            setattr(module, name, before[path])


def timed(function: Callable[[], Any]) -> tuple[Any, Seconds]:
    cpu, clock = time.process_time(), time.perf_counter()
    result = function()
    return result, (time.process_time() - cpu, time.perf_counter() - clock)
