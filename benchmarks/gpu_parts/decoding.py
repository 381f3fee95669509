"""Steps of an engine in which every request decodes, and what the device did in them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu_parts.timing import quartiles
from selective_compile.runtime.engine import Engine
from selective_compile.runtime.stats import StepRecord

LAST = 5  # enough for a median, and so few that contexts are not much shorter than behind them


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """Medians over steps, in seconds.

    Attributes:
        wall: of a step on the host: from one step's start to the next one's.
        last_wall: of the last `LAST` of them.
        quartiles: of a step on the host: a fourth of the steps took less, and a fourth more.
        span: on the device, by events recorded when the model's run is called and when the call has returned: what lies
            between the spans is planning, sampling and handing out. None: no device, or the run was not found.
        contexts: tokens in the context of each request, in the middle one of the steps.
    """

    wall: float
    last_wall: float
    quartiles: tuple[float, float]
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
        quartiles=quartiles(walls),
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


def replayed(engine: Engine, windows: int) -> tuple[float, ...] | None:
    """Seconds of the last step's graph alone, in the mean of `LAST` back to back, of so many times as many in a row;
    None: no device, or the step was no graph.

    The first of them says most, right behind the steps: by later ones the device may have other clocks. The requests'
    tokens are of no use from then on, and as fast to compute as others.
    """
    if not torch.cuda.is_available() or (replay := engine.captured_step) is None:
        return None
    moments = [torch.cuda.Event(enable_timing=True) for _ in range(windows + 1)]
    torch.cuda.synchronize()
    replay()  # the host is ahead of the device when the clock starts
    moments[0].record()
    for moment in moments[1:]:
        for _ in range(LAST):
            replay()
        moment.record()
    torch.cuda.synchronize()
    return tuple(before.elapsed_time(after) / 1e3 / LAST for before, after in zip(moments, moments[1:], strict=False))
