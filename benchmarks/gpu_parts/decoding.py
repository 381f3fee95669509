"""Steps of an engine in which every request decodes, and what the device did in them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_parts.floors import busy_seconds, idle_share
from selective_compile.runtime.engine import Engine
from selective_compile.runtime.stats import StepRecord

LAST = 5  # enough for a median, and so few that contexts are not much shorter than behind them


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """Medians over steps, in seconds.

    Attributes:
        wall: of a step on the host: from one step's start to the next one's.
        last_wall: of the last `LAST` of them.
        span: on the device, by events recorded when the model's run is called and when the call has returned: what lies
            between the spans is planning, sampling and handing out. None: no device, or the run was not found.
        contexts: tokens in the context of each request, in the middle one of the steps.
    """

    wall: float
    last_wall: float
    span: float | None
    contexts: tuple[int, ...]


def decoded(engine: Engine, records: list[StepRecord], steps: int) -> Decoded:
    """`records` is what the engine's observer fills."""
    spans = Spans(engine)
    records.clear()
    moments = [time.perf_counter()]
    with spans:
        for _ in range(steps):
            engine.step()
            moments.append(time.perf_counter())
    walls = [after - before for before, after in zip(moments, moments[1:], strict=False)]
    middle = records[len(records) // 2]
    return Decoded(
        wall=statistics.median(walls),
        last_wall=statistics.median(walls[-LAST:]),
        span=spans.median(),
        contexts=tuple(share.start + share.tokens for share in middle.shares),
    )


class Spans:
    """CUDA events around each run of the model, replayed or not, while it is entered."""

    def __init__(self, engine: Engine) -> None:
        self._runner: Any = getattr(engine, "_runner", None)
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._names = [name for name in ("run", "launch") if hasattr(self._runner, name)]
        if not torch.cuda.is_available():
            self._names = []

    def __enter__(self) -> None:
        for name in self._names:
            setattr(self._runner, name, self._timed(getattr(self._runner, name)))

    def __exit__(self, *_: object) -> None:
        for name in self._names:
            delattr(self._runner, name)  # the class's shows again

    def median(self) -> float | None:
        if not self._pairs:
            return None
        torch.cuda.synchronize()
        return statistics.median(before.elapsed_time(after) for before, after in self._pairs) / 1e3

    def _timed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            result = run(*arguments)
            after.record()
            self._pairs.append((before, after))
            return result

        return timed


def replayed(engine: Engine, count: int) -> float | None:
    """Seconds of the last step's graph alone, of so many back to back; None: no device, or the step was no graph.

    The requests' tokens are of no use from then on, and as fast to compute as others.
    """
    if not torch.cuda.is_available() or (replay := engine.captured_step) is None:
        return None
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    replay()  # the host is ahead of the device when the clock starts
    before.record()
    for _ in range(count):
        replay()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / 1e3 / count


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
