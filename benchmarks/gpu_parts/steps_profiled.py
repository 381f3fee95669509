"""Decode steps under torch's profiler: the time in which no kernel and no copy ran, within a captured graph, too.

The profiler itself puts something between two kernels of a graph, which the figure says beside it; in a step of some
hundred kernels that is more than an engine may leave idle. So these figures are for information, and no bar goes by
them. It may also stay attached to the device: whatever is timed comes before it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_parts.floors import busy_seconds, idle_share
from benchmarks.gpu_parts.jobs import Context
from selective_compile.runtime.engine import Engine

PROFILED = 12


def profile_steps(context: Context, name: str, engine: Engine) -> None:
    """Tell of some steps of the requests that decode."""
    idle = idle_in(engine, 2 if context.tiny else PROFILED)
    if idle is None:
        context.skip(name, "the profiler saw nothing of the device")
        return
    figures = {"strict_idle": idle.share, "strict_idle_by_host": idle.by_host, "resolution": idle.resolution}
    text = f"idle {idle.share:.2%} between kernels, too; {idle.resolution:.2%} cannot be told from 0"
    context.tell(context.job.row(name, figures=figures, text=text))


@dataclass(frozen=True, kw_only=True)
class Idle:
    """The part of a window of steps in which no kernel and no copy ran, by torch's profiler.

    Attributes:
        share: of the time from the start of the first kernel to the end of the last, which the profiler stamps: 1 -
            busy / window, both by one clock.
        by_host: of the host's time for the window, from one synchronisation to another. It has the first step's
            planning in it, behind which the device has nothing to do.
        resolution: what a microsecond behind each kernel is of the window. So much is put between two kernels of a
            graph by the profiler alone; a share that is not above it cannot be told from 0.
    """

    share: float
    by_host: float
    resolution: float


def idle_in(engine: Engine, steps: int) -> Idle | None:
    """Of so many steps of their own; None: the profiler saw nothing of the device."""
    activities = [ProfilerActivity.CUDA] if torch.cuda.is_available() else [ProfilerActivity.CPU]
    with profile(activities=activities) as seen:
        _synchronize()  # what was enqueued before is not in the window
        began = time.perf_counter()
        for _ in range(steps):
            engine.step()
        _synchronize()
        wall = time.perf_counter() - began
    on_device = [event for event in seen.events() if event.device_type == DeviceType.CUDA]
    # An annotation spans the kernels that it names, and what is between them.
    on_device = [event for event in on_device if not event.is_user_annotation]
    return idle_of([(event.time_range.start, event.time_range.end) for event in on_device], wall)


def idle_of(spans: list[tuple[float, float]], wall: float) -> Idle | None:
    """From what ran on the device, (start, end) in microseconds, and the host's seconds."""
    if not spans:
        return None
    window = max(end for _, end in spans) - min(start for start, _ in spans)
    busy = busy_seconds(spans)
    return Idle(
        share=idle_share(busy, window), by_host=idle_share(busy / 1e6, wall), resolution=min(1.0, len(spans) / window)
    )


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
