"""Decode steps under torch's profiler: the time in which no kernel and no copy ran, within a captured graph, too.

The profiler itself puts something between two kernels of a graph, which the figure says beside it; in a step of some
hundred kernels that is more than an engine may leave idle. So these figures are for information, and no bar goes by
them. Beside them stand the kernels that take most of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu_parts.floors import busy_seconds, idle_share
from benchmarks.gpu_parts.jobs import Context
from benchmarks.gpu_parts.profiled import longest, on_device
from selective_compile.runtime.engine import Engine

PROFILED = 12


def profile_steps(context: Context, name: str, engine: Engine) -> None:
    """Tell of some steps of the requests that decode."""
    steps = 2 if context.tiny else PROFILED
    ran, wall = on_device(lambda: [engine.step() for _ in range(steps)])
    idle = idle_of([(each.start, each.end) for each in ran], wall)
    if idle is None:
        context.skip(name, "the profiler saw nothing of the device")
        return
    busy = sum(each.end - each.start for each in ran)
    figures = {
        "strict_idle": idle.share,
        "strict_idle_by_host": idle.by_host,
        "resolution": idle.resolution,
        "launches": len(ran) / steps,
        "kernel_microseconds": busy / steps,
        "kernels": longest(ran, steps),
    }
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


def idle_of(spans: list[tuple[float, float]], wall: float) -> Idle | None:
    """From what ran on the device, (start, end) in microseconds, and the host's seconds; None: nothing was seen."""
    if not spans:
        return None
    window = max(end for _, end in spans) - min(start for start, _ in spans)
    busy = busy_seconds(spans)
    return Idle(
        share=idle_share(busy, window), by_host=idle_share(busy / 1e6, wall), resolution=min(1.0, len(spans) / window)
    )
