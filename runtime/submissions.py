"""Requests that are on their way into an engine: to read their options may take long, and keeps no step waiting."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from selective_compile.runtime.callbacks import CallbackThreads, answer
from selective_compile.runtime.inference_request import InferenceRequest
from selective_compile.runtime.own_code import Done, Failed, attempt
from selective_compile.runtime.request import Request
from selective_compile.runtime.request_state import RequestId

# Among the calls of the threads that submit.
SUBMISSIONS = "submissions"


@dataclass(kw_only=True)
class _Submission:
    wanted: InferenceRequest
    submitted: Future[Done[Request | Failed] | Failed]
    stopped: bool = False


class Submitted(NamedTuple):
    """A request that is in the engine, or why it is not, and whether it was to be stopped meanwhile."""

    wanted: InferenceRequest
    handle: Request | Failed
    stopped: bool


class Submissions:
    """Submits one after another in a thread of its own; they are taken up in the order in which they came."""

    def __init__(self, threads: CallbackThreads) -> None:
        self._threads = threads
        self._all: deque[_Submission] = deque()

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self.ids

    @property
    def ids(self) -> list[RequestId]:
        return [each.wanted.request_id for each in self._all]

    @property
    def stopped(self) -> list[RequestId]:
        return [each.wanted.request_id for each in self._all if each.stopped]

    def submit(self, wanted: InferenceRequest, call: Callable[[], Request | Failed]) -> None:
        """Have the call made, whatever it raises."""
        submission = _Submission(wanted=wanted, submitted=Future())
        self._all.append(submission)
        submit = partial(attempt, "submission", call)
        self._threads.submit(SUBMISSIONS, partial(answer, submission.submitted, submit))

    def stop(self, request_id: RequestId) -> None:
        """It is to be stopped when it is taken up; others are passed over."""
        for each in self._all:
            each.stopped |= each.wanted.request_id == request_id

    def take_up(self, patience: float) -> Iterator[Submitted]:
        """In order, those that are in the engine within so many seconds."""
        deadline = time.monotonic() + patience
        while self._all:
            first = self._all[0]
            wait([first.submitted], max(0.0, deadline - time.monotonic()))
            if not first.submitted.done():
                return
            asked = first.submitted.result()
            self._all.popleft()
            yield Submitted(first.wanted, asked if isinstance(asked, Failed) else asked.result, first.stopped)

    def give_up(self) -> list[RequestId]:
        """Of those that nobody will take up any more: they are cancelled once they are in."""
        for each in self._all:
            each.submitted.add_done_callback(_cancel)
        return self.ids


def _cancel(submitted: Future[Done[Request | Failed] | Failed]) -> None:
    asked = None if submitted.exception() is not None else submitted.result()
    if isinstance(asked, Done) and isinstance(asked.result, Request):
        for sample in asked.result.samples:
            sample.cancel()
