"""The steps of one engine or of several at once, for whoever runs them one iteration after another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from selective_compile.options import EngineConfig
from selective_compile.runtime.engine import Engine
from selective_compile.runtime.iteration_stats import iteration_json
from selective_compile.runtime.one_thread import OneThread
from selective_compile.runtime.request_processor import RequestProcessor
from selective_compile.runtime.stats import EngineStats, StepFloor, StepObserver, StepRecord


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """A step and its engine after it; `engine` is the place of that among several, or None."""

    record: StepRecord
    stats: EngineStats
    config: EngineConfig
    engine: int | None

    def text(self, floor: Callable[[StepRecord], StepFloor] | None) -> str:
        """As `iteration_stats`, in JSON."""
        least = None if floor is None else floor(self.record)
        return iteration_json(self.record, self.stats, self.config, least, engine=self.engine)


class Iterations:
    """Runs a step of every engine that has work, all at once, and waits for the last of them.

    Attributes:
        overlaps: whether one of them hands out tokens while the next step computes.
    """

    def __init__(self, engine: Engine | RequestProcessor) -> None:
        """Observe the engines, which nobody else may step, until `close`."""
        self._engines = engine.engines if isinstance(engine, RequestProcessor) else (engine,)
        self.overlaps = any(each.config.overlap for each in self._engines)
        self._records: list[list[StepRecord]] = [[] for _ in self._engines]
        self._observers: list[StepObserver] = [partial(self._observe, place) for place in range(len(self._engines))]
        self._others = [OneThread("selective-compile-steps") for _ in self._engines[1:]]
        for each, observer in zip(self._engines, self._observers, strict=True):
            each.add_observer(observer)

    def run(self) -> list[Iteration]:
        """One iteration, whose tokens are with their requests; a step that failed counts. Raises what interrupts it."""
        first, *others = self._engines
        running = [thread.submit(each.drive) for thread, each in zip(self._others, others, strict=True)]
        try:
            first.drive()
        finally:
            for other in running:
                other.result()
        return [found for place in range(len(self._engines)) for found in self._taken(place)]

    def close(self) -> None:
        for each, observer in zip(self._engines, self._observers, strict=False):
            each.remove_observer(observer)
        self._observers.clear()  # they lead back here, and so to the engines, whose memory is to be freed at once
        for thread in self._others:
            thread.close()

    def _observe(self, place: int, record: StepRecord) -> None:
        self._records[place].append(record)

    def _taken(self, place: int) -> list[Iteration]:
        engine = self._engines[place]
        engine.hand_out()
        records, self._records[place] = self._records[place], []
        number = place if len(self._engines) > 1 else None
        if not records:
            return []
        stats = engine.stats()
        return [Iteration(record=record, stats=stats, config=engine.config, engine=number) for record in records]
