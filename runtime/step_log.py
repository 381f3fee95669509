"""What the steps came to: totals, and a record of each step for whoever observes the engine."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from selective_compile.runtime.own_code import Logged
from selective_compile.runtime.plan import StepPlan
from selective_compile.runtime.request import Ending, Request
from selective_compile.runtime.request_result import FinishReason
from selective_compile.runtime.scheduler import Scheduler
from selective_compile.runtime.stats import EngineStats, RequestEnd, StepObserver, StepRecord

MOST_ENDED = 4096


@dataclass(frozen=True, kw_only=True)
class Observed:
    """A step that has run, on the way to the observers: `observers` were there when it ended."""

    record: StepRecord
    observers: tuple[StepObserver, ...]

    def tell(self) -> list[StepObserver]:
        """Those that raised, which is logged."""
        failed = []
        for observer in self.observers:
            with Logged("observer") as outcome:
                observer(self.record)
            if outcome.failed:
                failed.append(observer)
        return failed


class StepLog:
    """Counts what the steps did, and keeps the engine's clock. The engine calls it under its guard."""

    def __init__(self, observers: Sequence[StepObserver], clock: Callable[[], float]) -> None:
        self._clock = clock
        self.began = clock()
        self._observers: tuple[StepObserver, ...] = ()
        for observer in observers:
            self.add_observer(observer)
        self._left: deque[Request] = deque(maxlen=MOST_ENDED)  # and not yet in a record
        self._unsettled: list[Ending] = []  # not yet counted: they may not have their reasons
        self._ended: Counter[FinishReason] = Counter()
        self.steps = 0
        self.tokens_computed = 0
        self.tokens_generated = 0
        self.last_step_seconds: float | None = None

    def now(self) -> float:
        """Seconds on the engine's clock, which deadlines are given on."""
        return self._clock() - self.began

    def add_observer(self, observer: StepObserver) -> None:
        if not callable(observer):
            raise ValueError(f"observer must be callable, got {observer!r}")
        self._observers = (*self._observers, observer)

    def remove_observer(self, observer: StepObserver) -> None:
        self._observers = tuple(kept for kept in self._observers if kept != observer)
        if not self._observers:  # nobody would ever take them
            self._left.clear()

    @property
    def has_ended(self) -> bool:
        """Whether the next record is to say of a request how it ended."""
        return bool(self._left)

    def ended(self, request: Request) -> None:
        """The request has left; it has, or is about to get, its reason."""
        self._count_ends()
        self._unsettled.append(request.ending)
        if self._observers:
            self._left.append(request)

    def stepped(
        self, plan: StepPlan, number: int, *, started: float, seconds: float, predicted: float | None
    ) -> Observed | None:
        """The step with that number took so long; None if nobody observes."""
        self.last_step_seconds = seconds
        return self._observed(plan, number, started=started, seconds=seconds, predicted_seconds=predicted)

    def failed(self, error: str) -> Observed | None:
        """The step with number `steps` - 1 failed; None if nobody observes."""
        return self._observed(StepPlan(shares=()), self.steps - 1, seconds=0.0, error=error)

    def _observed(self, plan: StepPlan, number: int, **values: Any) -> Observed | None:
        if not self._observers:
            return None
        ended = tuple(RequestEnd.of(request) for request in self._left)
        self._left.clear()
        record = StepRecord.of_plan(plan, step=number, ended=ended, **values)
        return Observed(record=record, observers=self._observers)

    def _count_ends(self) -> None:
        self._ended.update(ending.reason for ending in self._unsettled if ending.reason is not None)
        self._unsettled = [ending for ending in self._unsettled if ending.reason is None]

    def stats(self, scheduler: Scheduler, *, graphs: tuple[int, int, int], kv_bytes: int) -> EngineStats:
        """The engine at this moment; `graphs`: compiled ones, captured ones, and how many of these there can be."""
        compiled, captured, captured_max = graphs
        self._count_ends()
        pool = scheduler.pool
        return EngineStats(
            steps=self.steps,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            requests_max=scheduler.max_requests,
            blocks_free=pool.num_free,
            blocks_used=pool.num_blocks - pool.num_free,
            blocks_max=pool.num_blocks,
            block_size=scheduler.block_size,
            kv_bytes=kv_bytes,
            blocks_idle=pool.num_idle,
            host_slots_used=sum(tier.num_used for tier in scheduler.blocks.host_tiers),
            host_slots_max=sum(tier.num_slots for tier in scheduler.blocks.host_tiers),
            preemptions=scheduler.preemptions,
            tokens_admitted=scheduler.tokens_admitted,
            tokens_reused=scheduler.tokens_reused,
            tokens_computed=self.tokens_computed,
            tokens_generated=self.tokens_generated,
            ended=dict(self._ended),
            graphs=compiled,
            captured=captured,
            captured_max=captured_max,
            last_step_seconds=self.last_step_seconds,
        )
