"""The handle that a user holds on a request: its tokens as they come, its end, cancelling it."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from threading import TIMEOUT_MAX, Condition
from typing import Any, NoReturn, Protocol, SupportsIndex

from selective_compile.forks import lock_of_any_process
from selective_compile.runtime.awaiting import Awaiting
from selective_compile.runtime.beam_request import RequestSearch
from selective_compile.runtime.beams import BeamResult
from selective_compile.runtime.generation import GenerationParams
from selective_compile.runtime.own_code import cause_of
from selective_compile.runtime.records import TokenRecord, joined_rows
from selective_compile.runtime.request_result import FinishReason, RequestResult, RequestTiming
from selective_compile.runtime.request_state import RequestState

LONGEST = sys.float_info.max  # seconds


class Ending:
    """How a request ended, once it has, for who is to know that and not to hold the request."""

    __slots__ = ("reason",)

    def __init__(self) -> None:
        self.reason: FinishReason | None = None


class RequestOwner(Protocol):
    """The part of the engine that a handle needs."""

    @property
    def driven(self) -> bool:
        """Whether a background thread runs the steps, so that a reader only has to wait."""

    def check_outside_step(self) -> None:
        """Raises RuntimeError where a reader would wait within a step."""

    def drive(self) -> None:
        """Run a step on behalf of a reader that waits; a step that fails says so in its requests."""

    def cancel(self, request: Request) -> None:
        """End the request and free its blocks."""


class Request:
    """What `Engine.submit` returns. Every method may be called from any thread.

    Iterating gives the token ids as they are generated; each iterator starts with the first. Where no
    background thread runs the engine (`Engine.running`), the reader that waits runs it, for all requests.
    Coroutines read with `async for`, and `await` the result; while they wait, their event loop goes on.

    Attributes:
        samples: those of the prompt that were submitted as one, each a request by itself; this one comes first.
    """

    def __init__(self, state: RequestState, params: GenerationParams, owner: RequestOwner) -> None:
        self.request_id = state.request_id
        self.params = params
        self.state = state
        self.samples: tuple[Request, ...] = (self,)
        self.search: RequestSearch | None = None
        # Until the end: samples know one another, and a cycle would keep the KV pools until the garbage collector runs.
        self._owner: RequestOwner | None = owner
        self._lock = lock_of_any_process()
        self._changed = Condition(self._lock)
        self._awaiting = Awaiting()
        self._waiting = 0  # how many readers wait for a change: mostly none, whom it takes time to tell of each token
        self._tokens: list[int] = []
        self._records: list[TokenRecord] = []  # one for each token, if the request keeps any
        self.prompt_logprobs: list[float] = []  # of the prompt's tokens behind that at `state.rows_from`
        self.prompt_logits: list[Any] = []  # of the prompt's tokens so far, in pieces [tokens, V]
        self._searched: BeamResult | None = None
        self.ending = Ending()
        self._error: str | None = None
        self._submitted_at = time.perf_counter()
        self._scheduled_at: float | None = None
        self._first_token_at: float | None = None
        self._last_token_at: float | None = None
        self._finished_at: float | None = None

    @property
    def prompt_ids(self) -> list[int]:
        return self.state.tokens[: self.state.prompt_length].tolist()

    @property
    def tokens(self) -> list[int]:
        """The ids generated so far, as a copy."""
        with self._lock:
            return self._tokens.copy()

    @property
    def logprobs(self) -> list[float] | None:
        """Log probabilities of the tokens so far, as a copy; None unless asked for."""
        with self._lock:
            found = self._results()["logprobs"]
        return None if found is None else list(found)

    def since(self, count: int) -> tuple[list[int], list[TokenRecord]]:
        """The tokens behind the first so many, and the records of these if the request keeps any."""
        with self._lock:
            return self._tokens[count:], self._records[count:]

    @property
    def searched(self) -> BeamResult | None:
        """How the search ended, if it has; None without beams."""
        return self._searched

    @property
    def finished(self) -> bool:
        return self.ending.reason is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.ending.reason

    @property
    def error(self) -> str | None:
        return self._error

    @property
    def timing(self) -> RequestTiming:
        def since_submit(moment: float | None) -> float | None:
            return None if moment is None else moment - self._submitted_at

        return RequestTiming(
            queued=since_submit(self._scheduled_at),
            first_token=since_submit(self._first_token_at),
            total=since_submit(self._finished_at),
            between_tokens=self._between_tokens(),
        )

    def _between_tokens(self) -> float | None:
        first, last, gaps = self._first_token_at, self._last_token_at, len(self._tokens) - 1
        return None if first is None or last is None or gaps < 1 else (last - first) / gaps

    def is_of(self, owner: RequestOwner) -> bool:
        """Whether it is the engine's; one that has finished is nobody's, and as good as anybody's."""
        return self._owner in (owner, None)

    def cancel(self) -> None:
        """End the request now and free its memory; without effect on one that has finished."""
        owner = self._owner
        if owner is not None:
            owner.cancel(self)

    def result(self, timeout: float | None = None) -> RequestResult:
        """Wait for the end. A request that failed returns too: finish_reason "error", and the message in
        `error`.

        Raises:
            ValueError: `timeout` is no number.
            RuntimeError: called within a step, by a processor, a criterion or an observer.
            TimeoutError: it has not ended within `timeout` seconds. It goes on; ask again or cancel it.
        """
        number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
        if timeout is not None and not (number and timeout == timeout):  # NaN would be waited for without an end
            raise ValueError(f"timeout must be seconds or None, got {timeout!r}")
        # Of an integer that no float can hold, the largest one.
        deadline = None if timeout is None else time.perf_counter() + max(-LONGEST, min(timeout, LONGEST))
        if not self._wait_for(lambda: self.finished, deadline):
            raise TimeoutError(f"request {self.request_id!r} must finish within {timeout} seconds, has not yet")
        return self._result()

    def __await__(self) -> Generator[Any, None, RequestResult]:
        """What `result` returns, for a coroutine. The request goes on where that is cancelled, as by a timeout."""
        yield from self._awaited(lambda: self.finished).__await__()
        return self._result()

    def __iter__(self) -> Iterator[int]:
        """Stream the generated token ids.

        Raises:
            RuntimeError: the request ended with an error, after the tokens generated before it.
        """
        position = 0
        while True:
            self._wait_for(lambda seen=position: self._has_more(seen), None)  # type: ignore[misc]
            fresh = self._tokens[position:]
            if not fresh:
                break
            yield from fresh
            position += len(fresh)
        self._check_success()

    async def __aiter__(self) -> AsyncIterator[int]:
        """As iterating, for a coroutine."""
        position = 0
        while True:
            await self._awaited(lambda seen=position: self._has_more(seen))  # type: ignore[misc]
            fresh = self._tokens[position:]
            if not fresh:
                break
            for token in fresh:
                yield token
            position += len(fresh)
        self._check_success()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("a Request must not be copied or pickled: take its `result()`")

    def __repr__(self) -> str:
        ended = self.ending.reason or "not finished"
        return f"Request({self.request_id!r}, {len(self._tokens)} tokens, {ended})"

    def reason_to_end(self, generated: int, token: int, record: TokenRecord | None) -> FinishReason | None:
        """For the engine: why this token, with so many generated before it, is the last; None if it is not.

        "error" where the record is that of one in place of a token, or where the model cannot go on from it.
        """
        if record is not None and record.error is not None:
            return "error"
        if token in self.params.eos_token_ids:
            return "stop"
        if record is not None and record.stop is not None:
            return record.stop
        if generated + 1 == self.params.max_new_tokens:
            return "length"
        return "error" if token >= self.state.known_ids else None

    def start(self) -> None:
        """For the engine: the request is in a step for the first time, or again after a preemption."""
        if self._scheduled_at is None:
            self._scheduled_at = time.perf_counter()

    def publish(
        self, token: int, record: TokenRecord | None, finish_reason: FinishReason | None, moment: float
    ) -> None:
        """For the engine: one more token, which came at that moment, the last one where there is a finish reason."""
        with self._lock:
            self._tokens.append(token)
            if record is not None and self.params.recorded:
                self._records.append(record)
            self._last_token_at = moment
            if self._first_token_at is None:
                self._first_token_at = moment
            if finish_reason is not None:
                self._end(finish_reason)
            self._notify()

    def publish_search(self, result: BeamResult, finish_reason: FinishReason) -> None:
        """For the engine: the search has ended, and all tokens of its best hypothesis are there at once."""
        with self._lock:
            self._tokens.extend(result.hypotheses[0].tokens)
            self._searched = result
            self._first_token_at = self._last_token_at = time.perf_counter()
            self._end(finish_reason)
            self._notify()

    def finish(self, finish_reason: FinishReason, error: str | None = None) -> None:
        """For the engine: the end, without another token."""
        with self._lock:
            self._error = error
            self._end(finish_reason)
            self._notify()

    def wake(self) -> None:
        """For the engine: make readers look again at who runs the steps."""
        with self._lock:
            self._notify()

    def _notify(self) -> None:
        if self._waiting:
            self._changed.notify_all()
        self._awaiting.wake()

    def _has_more(self, count: int) -> bool:
        return len(self._tokens) > count or self.finished

    def _check_success(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"request {self.request_id!r} failed: {self._error}") from cause_of(self._error)

    def _result(self) -> RequestResult:
        assert self.ending.reason is not None
        return RequestResult(
            request_id=self.request_id,
            tokens=tuple(self._tokens),
            finish_reason=self.ending.reason,
            error=self._error,
            timing=self.timing,
            **self._results(),
        )

    def _end(self, finish_reason: FinishReason) -> None:
        assert self.ending.reason is None, self
        self._finished_at = time.perf_counter()
        self.ending.reason = finish_reason
        self._owner = None

    def _results(self) -> dict[str, Any]:
        """What the records of the tokens come to, by the names of `RequestResult`."""
        wanted = self.params
        top = wanted.top_logprobs > 0
        return {
            "logprobs": self._kept("logprob", wanted.logprobs),
            "prompt_logprobs": tuple(self.prompt_logprobs) if wanted.prompt_logprobs else None,
            "prompt_logits": joined_rows(self.prompt_logits) if wanted.prompt_logits else None,
            "processed_logprobs": self._kept("processed_logprob", wanted.processed_logprobs),
            "top_logprobs": self._kept("top_logprobs", top and wanted.logprobs),
            "processed_top_logprobs": self._kept("processed_top_logprobs", top and wanted.processed_logprobs),
            "logits": self._kept("logits", wanted.output_logits),
            "scores": self._kept("scores", wanted.output_scores),
            "hypotheses": None,
            "beams": None,
            **({} if self._searched is None else _of_search(self._searched)),
        }

    def _kept(self, name: str, wanted: bool) -> tuple[Any, ...] | None:
        return tuple(getattr(record, name) for record in self._records) if wanted else None

    def _owner_outside_step(self) -> RequestOwner | None:
        """None where it has ended since; raises RuntimeError within a step, which nobody may wait in."""
        owner = self._owner
        if owner is not None:
            owner.check_outside_step()
        return owner

    def _wait_for(self, ready: Callable[[], bool], deadline: float | None) -> bool:
        """Wait for, or work towards, `ready`; False when the deadline comes first."""
        while not ready():
            left = None if deadline is None else deadline - time.perf_counter()
            if left is not None and left <= 0:
                return False
            owner = self._owner_outside_step()
            if owner is None:
                continue
            with self._lock:
                # Under the condition, or the wake of a background thread that stops here would be missed.
                driven = owner.driven
                if driven and not ready():
                    self._waiting += 1
                    try:
                        self._changed.wait(None if left is None else min(left, TIMEOUT_MAX))
                    finally:
                        self._waiting -= 1
            if not driven:
                owner.drive()
        return True

    async def _awaited(self, ready: Callable[[], bool]) -> None:
        """As `_wait_for`, for a coroutine: where nobody runs the steps, a thread takes one for it."""
        while not ready():
            owner = self._owner_outside_step()
            if owner is None:
                continue
            with self._lock:
                driven = owner.driven
                change = self._awaiting.change() if driven and not ready() else None
            if change is not None:
                await change
            elif not driven:
                await asyncio.to_thread(owner.drive)


def _of_search(result: BeamResult) -> dict[str, Any]:
    return {**vars(result), "logprobs": result.hypotheses[0].logprobs}
