"""The whole engine again, by the times of a log: a model computes, and the tokens are compared with the log's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from selective_compile.options import EngineConfig
from selective_compile.programs import Program, compile_step_program
from selective_compile.runtime.engine import Engine, StepError
from selective_compile.runtime.generation_fields import FIELDS
from selective_compile.runtime.merged_fields import DEFAULTS
from selective_compile.runtime.replay import Event, EventLog, Replayed, first_difference
from selective_compile.runtime.request import Request
from selective_compile.runtime.samples import Asked
from selective_compile.runtime.stats import StepObserver


class Interrupted(BaseException):
    """Stands for whatever interrupted the step that was recorded, an interrupt of the user's for instance."""


class RecordedClock:
    """Tells the time that it is given beforehand; when there is none left, the last."""

    def __init__(self) -> None:
        self._now = 0.0
        self._next: deque[float] = deque()

    def set(self, *moments: float) -> None:
        self._next = deque(moments)

    def __call__(self) -> float:
        if self._next:
            self._now = self._next.popleft()
        return self._now


class InterposedProgram:
    """A program during whose run happens what happened then: requests came or were cancelled, or it failed."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.before_plan: Callable[[], None] = _nothing
        self.before_run: Callable[[], None] = _nothing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def weights_version(self) -> Any:
        self.before_plan()
        return self._program.weights_version()

    def __call__(self, *arguments: Any) -> Any:
        self.before_run()
        return self._program(*arguments)


def replay_engine(
    log: EventLog,
    model: nn.Module,
    *,
    program: Program | None = None,
    config: EngineConfig | None = None,
    record: str | PathLike[str] | None = None,
    observers: Sequence[StepObserver] = (),
    progress: Callable[[int], None] = lambda steps: None,
) -> Replayed:
    """Serve the log's requests on a model, deciding by the log's times, and compare every batch and token.

    A request with an option that the log has no words for, such as a processor of its own or a limit of time, is
    made to generate the log's tokens; all others must come to them by themselves.

    Args:
        program: the model already compiled.
        config: None: the log's; whatever is changed in it, the blocks must be as many.
        record: where to write the log of the replay; None: it is not kept.
        observers: of the engine; times are those of the log.
        progress: called with 1 after each step.

    Raises:
        ValueError: it is not the model of the log.
    """
    chosen = config or log.config
    compiled = program if program is not None else compile_step_program(model, chosen)
    about = {"name": type(model).__name__, "vocab_size": compiled.vocab_size}
    recorded = {name: log.engine["model"][name] for name in about}
    if about != recorded:
        raise ValueError(f"the model must be the one of the log, {recorded}, got {about}")
    with TemporaryDirectory() as folder:
        path = Path(record) if record is not None else Path(folder) / "again.jsonl"
        again = _EngineAgain(log, model, compiled, replace(chosen, record=path), observers)
        again.run(progress)
        return Replayed.of(log, first_difference(log, EventLog.read(path)))


class _EngineAgain:
    def __init__(
        self,
        log: EventLog,
        model: nn.Module,
        program: Program,
        config: EngineConfig,
        observers: Sequence[StepObserver],
    ) -> None:
        self._log = log
        self._clock = RecordedClock()
        self._program = InterposedProgram(program)
        interposed: Any = self._program
        self._engine = Engine(model, config, program=interposed, observers=observers, clock=self._clock)
        self._requests: dict[int, Request] = {}
        self._outcomes: dict[int, list[tuple[int, str | None]]] = {}
        for event in log.named("computed"):
            for number, token, end in event["tokens"]:
                self._outcomes.setdefault(number, []).append((token, end))

    def run(self, progress: Callable[[int], None]) -> None:
        events = deque(self._log.events)
        while events:
            event = events.popleft()
            if event["event"] == "planned":
                self._step(event, events)
                progress(1)
            elif event["event"] == "failed":  # before there was a plan
                self._program.before_plan = partial(_fail, event)
                self._engine_step()
            else:
                self._outside(event)

    def _step(self, planned: Event, events: deque[Event]) -> None:
        """One step, with all that the log has between its plan and its tokens."""
        during: list[Event] = []
        outcome = None
        while planned["shares"] and outcome is None and events:
            event = events.popleft()
            during.append(event)
            outcome = event if event["event"] in ("computed", "failed") else None
        times = next((event for event in events if event["event"] == "timed"), planned | {"started": 0.0, "ended": 0.0})
        self._program.before_run = partial(self._during, during, times["ended"])
        copied = [(event["started"], event["ended"]) for event in during if event["event"] == "copied"]
        self._clock.set(
            times["started"], planned["now"], *(moment for pair in copied for moment in pair), times["ended"]
        )
        self._engine_step()

    def _during(self, events: Sequence[Event], ended: float) -> None:
        for event in events:
            if event["event"] == "failed":
                _fail(event)
            self._outside(event)
        self._clock.set(ended)

    def _engine_step(self) -> None:
        try:
            self._engine.step()
        except (StepError, Interrupted):
            pass  # as it was recorded; a failure that was not shows as a difference
        finally:
            self._program.before_plan = self._program.before_run = _nothing

    def _outside(self, event: Event) -> None:
        if event["event"] == "submitted":
            self._submit(event)
        elif event["event"] == "cancelled":
            self._requests[event["number"]].cancel()
        elif event["event"] == "dropped":
            self._engine.drop_computed()

    def _submit(self, event: Event) -> None:
        terms = {name: value for name, value in event["terms"].items() if name != "arrival"}
        outcomes = self._outcomes.get(event["number"], [])
        options = forced(event, outcomes) if event["untold"] else event["options"]
        self._clock.set(event["terms"]["arrival"])
        rows_from = event.get("rows_from")
        if rows_from is not None:
            options = {**options, "prompt_logprobs": True}
        # Nothing of the configuration that the model has now: the log has what counted then.
        asked = [
            Asked(config=None, options={**dict.fromkeys(FIELDS), **DEFAULTS, **options, "num_return_sequences": 1})
        ]
        terms["rows_from"] = rows_from if event.get("scored", rows_from) else None
        (request,) = self._engine.submit_samples(event["prompt"], asked, event["id"], **terms)
        self._requests[event["number"]] = request


def forced(event: Event, outcomes: Sequence[tuple[int, str | None]]) -> dict[str, Any]:
    """Options by which a request generates these tokens and ends as it did."""
    prompt = len(event["prompt"])

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        token, end = outcomes[len(ids) - prompt]
        if end == "error":
            raise RuntimeError("as it was recorded")
        return [token]

    def ends(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        generated = ids.shape[1] - prompt
        _, end = outcomes[generated - 1]
        # The last token that is allowed ends it by itself.
        return torch.tensor(
            [end is not None and not (end == "length" and generated == event["max_new_tokens"])], device="cpu"
        )

    return {
        "max_new_tokens": event["max_new_tokens"],
        "do_sample": False,
        "eos_token_id": None,
        "prefix_allowed_tokens_fn": allowed,
        "stopping_criteria": [ends],
    }


def _fail(event: Event) -> None:
    raise Interrupted if event["passed_on"] else RuntimeError("as it was recorded")


def _nothing() -> None:
    """Nothing happened."""
