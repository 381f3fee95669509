"""The event log of an engine: all that its decisions depend on, and what they were, one JSON object a line.

    {"event": "engine", ...}     first: the configuration, the blocks of the pool, the model's class and vocabulary
    {"event": "submitted", ...}  a request, its terms and options, those of the model's own configuration among them
    {"event": "cancelled", ...}  a request, by its number
    {"event": "dropped"}         all keys and values were dropped, since the weights changed or somebody said so
    {"event": "planned", ...}    a step: the time it was planned at, its shares, who came, gave way and was refused
    {"event": "copied", ...}     when its copies between device and host began and ended
    {"event": "computed", ...}   the tokens that the step gave, and why requests ended with them
    {"event": "failed", ...}     the step failed: who ended by that
    {"event": "timed", ...}      when the step began and ended, which later decisions go by

Requests are named by the number in which they came. `selective_compile.runtime.replay` reads it.
"""

from __future__ import annotations

import dataclasses
import fcntl
import gc
import json
import logging
import math
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, TextIO
from weakref import finalize

from torch import nn
from transformers import GenerationConfig

from selective_compile.forks import ThisProcess
from selective_compile.options import EngineConfig
from selective_compile.runtime.generation import GenerationParams
from selective_compile.runtime.merged_fields import DEFAULTS, merged
from selective_compile.runtime.plan import StepPlan
from selective_compile.runtime.request_state import RequestState
from selective_compile.runtime.submitted_prompt import Submission

logger = logging.getLogger(__name__)
VERSION = 2
# Of an EngineConfig: what is the log's own business, and what the blocks in its first line stand for.
NOT_TOLD = ("record", "dtype", "max_kv_tokens", "kv_memory_fraction")


class Recording:
    """What the engine tells of itself, under its guard, in the order in which it happens. This one forgets it."""

    def submitted(
        self,
        state: RequestState,
        submission: Submission,
        params: GenerationParams,
        config: GenerationConfig | None,
        options: Mapping[str, Any],
    ) -> None:
        """A request came; `config` and `options` are those of `Engine.submit`."""

    def cancelled(self, state: RequestState) -> None:
        """A request that had not ended was cancelled."""

    def dropped(self) -> None:
        """Every running request was preempted, and all that the pool held forgotten."""

    def planned(self, now: float, plan: StepPlan) -> None:
        """The scheduler was asked at this time, and said this."""

    def copied(self, started: float, ended: float) -> None:
        """The copies of the plan took from here to there, on the engine's clock."""

    def computed(self, plan: StepPlan, tokens: Sequence[int], ends: Sequence[str | None]) -> None:
        """The step ran; `ends` has, for each of the tokens, the reason why its request ended with it."""

    def failed(self, doomed: Iterable[RequestState], *, passed_on: bool) -> None:
        """The step failed, by something that was passed on as it came or not; these ended."""

    def timed(self, started: float, ended: float) -> None:
        """The step that ran took from here to there, on the engine's clock."""


class FileRecording(Recording):
    """Writes a line for each event, as it happens, until one cannot be written: nobody's request has a part in that."""

    def __init__(
        self, path: str | PathLike[str], config: EngineConfig, model: nn.Module, about: Mapping[str, Any]
    ) -> None:
        """
        Args:
            model: whose own configuration counts to what its requests ask for.
            about: what else is to be known of it.

        Raises:
            OSError: nothing can be written there.
            ValueError: another engine writes to it.
        """
        self._path = path
        self._model = model
        self._file = _opened_alone(path)
        self._process = ThisProcess.number
        finalize(self, self._file.close)  # the engine has no end of its own
        told = {name: value for name, value in dataclasses.asdict(config).items() if name not in NOT_TOLD}
        self._write("engine", version=VERSION, config=told, model=about)

    def submitted(
        self,
        state: RequestState,
        submission: Submission,
        params: GenerationParams,
        config: GenerationConfig | None,
        options: Mapping[str, Any],
    ) -> None:
        asked = merged(config, options, getattr(self._model, "generation_config", None))
        told, untold = _told(asked)
        told = {name: value for name, value in told.items() if value != DEFAULTS.get(name)}
        if params.criteria is not None and params.criteria.by_clock:
            untold.append("max_time")
        deadline = submission.deadline
        if deadline == math.inf:  # which JSON has no word for
            deadline = None
        terms = dataclasses.asdict(state.terms) | {"deadline": deadline}
        self._write(
            "submitted",
            number=state.number,
            id=state.request_id,
            prompt=submission.prompt.tolist(),
            max_new_tokens=params.max_new_tokens,
            terms=terms,
            rows_from=state.rows_from,
            scored=state.rows_from is not None and state.generated_from == state.rows_from + 1,
            whole=state.whole,
            prefix=state.prefix,
            long_form=state.long_form and dataclasses.asdict(state.long_form),
            options=told,
            untold=untold,
        )

    def cancelled(self, state: RequestState) -> None:
        self._write("cancelled", number=state.number)

    def dropped(self) -> None:
        self._write("dropped")

    def planned(self, now: float, plan: StepPlan) -> None:
        self._write("planned", now=now, **pictured(plan))

    def copied(self, started: float, ended: float) -> None:
        self._write("copied", started=started, ended=ended)

    def computed(self, plan: StepPlan, tokens: Sequence[int], ends: Sequence[str | None]) -> None:
        sampling = [share.state.number for share in plan.shares if share.samples]
        self._write("computed", tokens=list(zip(sampling, tokens, ends, strict=True)))

    def failed(self, doomed: Iterable[RequestState], *, passed_on: bool) -> None:
        self._write("failed", numbers=[state.number for state in doomed], passed_on=passed_on)

    def timed(self, started: float, ended: float) -> None:
        self._write("timed", started=started, ended=ended)

    def _write(self, event: str, **values: Any) -> None:
        if self._process != ThisProcess.number and not self._file.closed:
            logger.warning("a forked process records nothing, the event log is that of the first: %s", self._path)
            self._file.close()
        if self._file.closed:
            return
        try:
            self._file.write(json.dumps({"event": event, **values}) + "\n")
        except OSError:
            logger.exception("the event log cannot be written any more, and ends here: %s", self._path)
            with suppress(OSError):  # what is left of the line
                self._file.close()


def _opened_alone(path: str | PathLike[str]) -> TextIO:
    """An empty file that no other recording has open; a pipe or a device may have several."""
    file = Path(path).open("a", encoding="utf-8", buffering=1)
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        if not _locked(file):
            gc.collect()  # an engine that nobody holds any more, but for its own requests
            if not _locked(file):
                file.close()
                raise ValueError(f"record must be a file that no other engine writes to, got {str(path)!r}")
        file.truncate(0)
    return file


def _locked(file: TextIO) -> bool:
    """Whether this is the one who has the file from now on, until it is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def recording_of(config: EngineConfig, model: nn.Module, **about: Any) -> Recording:
    """What the configuration asks for; `about` is what is to be known of the model. Raises OSError."""
    return Recording() if config.record is None else FileRecording(config.record, config, model, about)


def pictured(plan: StepPlan) -> dict[str, Any]:
    """A plan in numbers: shares as request, first token and how many."""
    groups = {"preempted": plan.preempted, "admitted": plan.admitted, "refused": plan.refused}
    return {
        "shares": [[share.state.number, share.start, share.num_tokens] for share in plan.shares],
        **{name: [state.number for state in group] for name, group in groups.items()},
        "copies": [list(copy) for copy in plan.copies],
    }


def _told(options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What JSON has words for and comes back the same, and the names of the rest."""
    told, untold = {}, []
    for name, value in options.items():
        if value is None or isinstance(value, (bool, int, float, str)) or _is_list_of_numbers(value):
            told[name] = value
        else:
            untold.append(name)
    return told, untold


def _is_list_of_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int or _is_list_of_numbers(item) for item in value)
