"""What ran on the device meanwhile, by torch's profiler.

The profiler may stay attached to the device, and slow down what comes behind it: whatever is timed comes before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

NAME = 80  # characters of a kernel's name, which may be a template of many more


class Ran(NamedTuple):
    """A kernel or a copy, from when to when in microseconds."""

    name: str
    start: float
    end: float


def on_device(run: Callable[[], Any]) -> tuple[list[Ran], float]:
    """In the order of their starts; and the host's seconds from one synchronisation to another. Nothing of a CPU."""
    activities = [ProfilerActivity.CUDA] if torch.cuda.is_available() else [ProfilerActivity.CPU]
    with profile(activities=activities) as seen:
        _synchronize()  # what was enqueued before is not in the window
        began = time.perf_counter()
        run()
        _synchronize()
        wall = time.perf_counter() - began
    events = [event for event in seen.events() if event.device_type == DeviceType.CUDA]
    # An annotation spans the kernels that it names, and what is between them.
    ran = [
        Ran(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if not event.is_user_annotation
    ]
    return sorted(ran, key=lambda each: each.start), wall


def longest(ran: Iterable[Ran], times: int, count: int = 10) -> list[dict[str, Any]]:
    """Of what ran so many times over, as in steps: the kernels that took most of one in all, those of one name
    together; launches and microseconds are of one."""
    most = sorted(_by_name(ran).items(), key=lambda kernel: sum(kernel[1]), reverse=True)[:count]
    return [
        {"name": name[:NAME], "launches": len(spans) / times, "microseconds": sum(spans) / times}
        for name, spans in most
    ]


def medians(ran: Iterable[Ran]) -> dict[str, float]:
    """Microseconds of a launch, by the kernel's name, in the order in which they first ran."""
    return {name[:NAME]: median(spans) for name, spans in _by_name(ran).items()}


def _by_name(ran: Iterable[Ran]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for name, start, end in ran:
        found.setdefault(name, []).append(end - start)
    return found


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
