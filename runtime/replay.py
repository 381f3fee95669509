"""A recorded run again: the scheduler alone, which needs no model, or the whole engine, whose tokens are compared."""

from __future__ import annotations

import json
import math
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Self

from selective_compile.options import EngineConfig
from selective_compile.runtime.plan import StepPlan
from selective_compile.runtime.recording import VERSION, pictured
from selective_compile.runtime.request_result import FinishReason, RequestTiming
from selective_compile.runtime.request_state import RequestId, RequestState, Terms
from selective_compile.runtime.scheduler import Scheduler
from selective_compile.runtime.stats import RequestEnd, StepObserver, StepRecord
from selective_compile.step import LongForm, Reach

Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class EventLog:
    """What `EngineConfig.record` wrote: its first line, and the others."""

    engine: Event
    events: tuple[Event, ...]

    @classmethod
    def read(cls, path: str | PathLike[str]) -> Self:
        """
        Raises:
            OSError: the file cannot be read.
            ValueError: it is no event log, or one of another version. A last line that was cut off is left out.
        """
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        try:
            events = [json.loads(line) for line in whole]
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} must be an event log, a JSON object a line, got {error}") from None
        first = events[0] if events and isinstance(events[0], dict) else {}
        if first.get("event") != "engine" or first.get("version") != VERSION:
            raise ValueError(f"{path} must be an event log of version {VERSION}, got {whole[:1]} as its first line")
        return cls(engine=first, events=tuple(events[1:]))

    @property
    def config(self) -> EngineConfig:
        """As it was, with as many blocks as there were; it records nothing."""
        config = {**self.engine["config"], "max_requests": self.engine["model"]["max_requests"]}
        *_, first = self.engine["model"]["pools"][0]
        return EngineConfig(**config, max_kv_tokens=first * config["block_size"])

    @property
    def arrivals(self) -> dict[RequestId, int]:
        """How many steps had begun when a request came; of several that had an id in turn, the first."""
        found: dict[RequestId, int] = {}
        begun, runs = 0, False
        for event in self.named("submitted", "planned", "computed", "failed"):
            if event["event"] == "submitted":
                found.setdefault(event["id"], begun)
            elif event["event"] == "planned":
                runs = bool(event["shares"])
                begun += runs
            else:
                begun += not runs  # one that failed before it was planned
                runs = False
        return found

    def named(self, *names: str) -> Iterator[Event]:
        return (event for event in self.events if event["event"] in names)

    def request_id(self, number: int) -> Any:
        return next(event["id"] for event in self.named("submitted") if event["number"] == number)


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What a replay came to; `difference` is the first thing that was not as in the log, in words, or None."""

    requests: int
    steps: int
    tokens: int
    difference: str | None

    @classmethod
    def of(cls, log: EventLog, difference: str | None) -> Self:
        return cls(
            requests=sum(1 for _ in log.named("submitted")),
            steps=sum(bool(event["shares"]) for event in log.named("planned")),
            tokens=sum(len(event["tokens"]) for event in log.named("computed")),
            difference=difference,
        )


def replay_schedule(log: EventLog, observers: Sequence[StepObserver] = ()) -> Replayed:
    """Make a scheduler decide again, by the log's times and tokens, and compare each step's batch.

    Args:
        observers: called with the record of each step, as those of an engine; requests end without times.
    """
    again = _ScheduleAgain(log, observers)
    for event in log.events:
        difference = again.do(event)
        if difference is not None:
            return Replayed.of(log, difference)
    return Replayed.of(log, None)


class _ScheduleAgain:
    """Calls a scheduler as `Engine` does; every method takes an event of that name."""

    def __init__(self, log: EventLog, observers: Sequence[StepObserver]) -> None:
        config, about = log.config, log.engine["model"]
        self._scheduler = Scheduler.configured(
            config,
            {Reach(window, chunk): blocks for window, chunk, blocks in about["pools"]},
            block_reuse=about["reuses_blocks"],
            host_slots=about["host_slots"],
        )
        self._states: dict[int, RequestState] = {}
        self._plan = StepPlan(shares=())
        self._steps = 0
        self._observers = observers
        self._observed = 0
        self._ended: list[RequestEnd] = []  # since the last record
        self._methods: dict[str, Callable[[Event], str | None]] = {
            "submitted": self._submitted,
            "cancelled": self._cancelled,
            "dropped": self._dropped,
            "planned": self._planned,
            "copied": self._copied,
            "computed": self._computed,
            "failed": self._failed,
            "timed": self._timed,
        }

    def do(self, event: Event) -> str | None:
        """What is not as in the log, or None."""
        return self._methods[event["event"]](event)

    def _submitted(self, event: Event) -> None:
        state = RequestState(
            event["id"],
            event["number"],
            array("q", event["prompt"]),
            max_new_tokens=event["max_new_tokens"],
            terms=terms_of(event),
            whole=event.get("whole", False),
            prefix=event.get("prefix", 0),
            long_form=LongForm(**form) if (form := event.get("long_form")) else None,
        )
        state.rows_from = event.get("rows_from")
        self._states[state.number] = state
        self._scheduler.add(state)

    def _cancelled(self, event: Event) -> None:
        self._remove(event["number"], "cancelled")

    def _dropped(self, event: Event) -> None:
        self._scheduler.preempt_all()

    def _planned(self, event: Event) -> str | None:
        self._plan = self._scheduler.schedule(event["now"])
        for state in self._plan.refused:
            self._end(self._states.pop(state.number), "error")
        found, wanted = pictured(self._plan), {name: event[name] for name in pictured(self._plan)}
        step, self._steps = self._steps, self._steps + bool(self._plan.shares)
        return None if found == wanted else f"step {step} was {wanted} and is {found}"

    def _copied(self, event: Event) -> None:
        self._scheduler.pace.copies.observe(len(self._plan.copies), event["ended"] - event["started"])

    def _computed(self, event: Event) -> None:
        outcomes = iter(event["tokens"])
        for share in self._plan.shares:
            _, token, end = next(outcomes) if share.samples else (None, None, None)
            if not share.state.finished:
                if end != "error":
                    self._scheduler.advance(share, token)
                if end is not None:
                    self._remove(share.state.number, end)

    def _failed(self, event: Event) -> None:
        for number in event["numbers"]:
            self._remove(number, "error")
        self._scheduler.forget()
        self._observe(StepPlan(shares=()), seconds=0.0, error="as it was recorded")

    def _timed(self, event: Event) -> None:
        seconds, pace = event["ended"] - event["started"], self._scheduler.pace
        predicted = pace.steps.predict(self._plan.num_tokens)
        pace.observe(self._plan, seconds)
        self._observe(self._plan, seconds=seconds, started=event["started"], predicted_seconds=predicted)

    def _remove(self, number: int, reason: FinishReason) -> None:
        state = self._states.pop(number)
        self._scheduler.remove(state)
        self._end(state, reason)

    def _end(self, state: RequestState, reason: FinishReason) -> None:
        if self._observers:
            timing = RequestTiming(queued=None, first_token=None, total=None)
            self._ended.append(RequestEnd(state.request_id, reason, state.generated, timing))

    def _observe(self, plan: StepPlan, **values: Any) -> None:
        if self._observers:
            record = StepRecord.of_plan(plan, step=self._observed, ended=tuple(self._ended), **values)
            self._observed += 1
            self._ended.clear()
            for observer in self._observers:
                observer(record)


def terms_of(event: Event) -> Terms:
    """The deadline is in the log as it was given: seconds from the arrival."""
    terms = event["terms"]
    deadline = math.inf if terms["deadline"] is None else terms["arrival"] + terms["deadline"]
    return Terms(**{**terms, "deadline": deadline})


def first_difference(log: EventLog, again: EventLog) -> str | None:
    """What two runs that should be the same differ in first: a batch, or a token; times are not compared."""
    for number, (one, other) in enumerate(_pairs(log, again)):
        if one is None or other is None:
            return f"step event {number} is there in one of the runs only"
        if one["event"] != other["event"]:
            return f"what was {one['event']} is {other['event']}"
        difference = _different_tokens(log, one, other) if one["event"] == "computed" else _different_plan(one, other)
        if difference is not None:
            return difference
    return None


def _pairs(log: EventLog, again: EventLog) -> Iterator[tuple[Event | None, Event | None]]:
    names = ("planned", "computed", "failed")
    ones, others = deque(log.named(*names)), deque(again.named(*names))
    while ones or others:
        yield ones.popleft() if ones else None, others.popleft() if others else None


def _different_plan(one: Event, other: Event) -> str | None:
    return None if one == other else f"what was {one} is {other}"


def _different_tokens(log: EventLog, one: Event, other: Event) -> str | None:
    for (number, token, end), (_, again, ends) in zip(one["tokens"], other["tokens"], strict=True):
        # Where it ended with an error there is no token; a time that is up has another name the second time.
        if (end is None) != (ends is None) or (token != again and end != "error"):
            name = log.request_id(number)
            return f"request {name!r} got token {token} (end: {end}) and now gets {again} (end: {ends})"
    return None
