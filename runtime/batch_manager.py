"""The batch manager: an engine driven through callbacks, for those who embed it in a server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from transformers import GenerationConfig

from selective_compile.runtime.engine import Engine
from selective_compile.runtime.iteration_stats import iteration_json
from selective_compile.runtime.request import Request
from selective_compile.runtime.request_state import RequestId
from selective_compile.runtime.stats import StepRecord

logger = logging.getLogger(__name__)

# How long the worker sleeps when there is nothing to do, unless `notify` wakes it.
IDLE_SECONDS = 0.005


@dataclass(frozen=True, kw_only=True)
class InferenceRequest:
    """What `get_requests` returns a list of.

    Attributes:
        request_id: a string or an integer that no request has whose final response is still to come.
        input_ids: as for `Engine.submit`.
        generation_config: as for `Engine.submit`.
        streaming: a response for each token, in place of one at the end.
        options: other arguments of `Engine.submit`, such as `logprobs`, `priority` or `max_new_tokens`.
    """

    request_id: RequestId
    input_ids: Any
    generation_config: GenerationConfig | None = None
    streaming: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


GetRequests = Callable[[int], Iterable[InferenceRequest]]
SendResponse = Callable[[RequestId, dict[str, Tensor], bool, str], None]
PollStop = Callable[[], Collection[RequestId]]
OnStats = Callable[[str], None]


@dataclass(kw_only=True)
class _Open:
    """A request whose final response has not been sent; `sent` counts the tokens that are in responses."""

    handle: Request
    streaming: bool
    sent: int = 0


class BatchManager:
    """Runs the engine in a worker thread that asks for requests, sends responses and asks whom to stop.

    Each iteration is: `get_requests`, one step, responses, `poll_stop`, `on_stats`. Responses go out from a thread of
    their own, in order, so that a reader that blocks keeps only responses waiting and not the steps. What a callback
    raises is logged; where it was about one request, that request is stopped, and the others go on.
    """

    def __init__(
        self,
        engine: Engine,
        get_requests: GetRequests,
        send_response: SendResponse,
        poll_stop: PollStop | None = None,
        on_stats: OnStats | None = None,
        *,
        max_active: int | None = None,
    ) -> None:
        """Start the worker.

        Args:
            engine: nobody else may run its steps.
            get_requests: called with the most requests that can be taken, negative for no limit.
            send_response: called with the id, the tensors, whether it is the last response, and a message that is
                empty unless the request failed, in which case there are no tensors. The tensors, on the CPU:
                `output_ids` [1, 1, length] int64, the prompt and what was generated, or in a streamed response what
                is new; `sequence_length` [1, 1] int64, of prompt and output so far; and for requests with
                `logprobs` `log_probs` [1, 1, output length] and `cum_log_probs` [1, 1], float32, of the output so
                far. Nothing of a request is left in the engine when its last response is sent, and its id is free.
            poll_stop: gives the ids of requests to be stopped; unknown ones are passed over. A stopped request
                gets its last response, with what it has generated.
            on_stats: called with the JSON text of `iteration_stats` after each step.
            max_active: most requests to be taken at a time; None: no limit.

        Raises:
            ValueError: max_active is not a positive integer.
        """
        if max_active is not None and (isinstance(max_active, bool) or not max_active > 0):
            raise ValueError(f"max_active must be a positive integer or None, got {max_active!r}")
        self._engine = engine
        self._get_requests = get_requests
        self._send_response = send_response
        self._poll_stop = poll_stop
        self._on_stats = on_stats
        self._max_active = max_active
        self._open: dict[RequestId, _Open] = {}
        self._taken: set[RequestId] = set()  # ids whose final response has not been handed over
        self._lock = Lock()  # of `_taken`
        self._stopping = Event()
        self._wake = Event()
        self._last: StepRecord | None = None
        self._sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="selective-compile-responses")
        engine.add_observer(self._observe)
        self._worker = Thread(target=self._run, name="selective-compile-batch-manager", daemon=True)
        self._worker.start()

    def notify(self) -> None:
        """Tell a worker that sleeps that `get_requests` has something for it."""
        self._wake.set()

    def shutdown(self) -> None:
        """Take no more requests, let those that were taken end, send their responses, and stop the threads."""
        self._stopping.set()
        self._wake.set()
        self._worker.join()
        self._sender.shutdown()
        self._engine.remove_observer(self._observe)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.shutdown()

    @property
    def alive(self) -> bool:
        """Whether the worker thread runs; it ends at `shutdown`, or by an exception that is no `Exception`."""
        return self._worker.is_alive()

    @property
    def num_active(self) -> int:
        """Requests taken whose last response has not been handed over."""
        with self._lock:
            return len(self._taken)

    def _run(self) -> None:
        reason = "the worker thread of the batch manager ended"
        try:
            while self._iterate():
                pass
        except BaseException as error:
            reason = f"{reason}: {type(error).__name__}: {error}"
            raise
        finally:
            self._respond()
            for request_id, entry in list(self._open.items()):
                entry.handle.cancel()
                self._close(request_id, {}, reason)

    def _iterate(self) -> bool:
        """One iteration; False: asked to stop, and nothing is left to do."""
        if not self._stopping.is_set():
            with _Logged("get_requests"):
                for wanted in self._get_requests(self._room()):
                    self._take(wanted)
        if self._open:
            self._engine.drive()
        self._respond()
        if self._poll_stop is not None and self._open:
            with _Logged("poll_stop"):
                self._stop(self._poll_stop())
        record, self._last = self._last, None
        if self._on_stats is not None and record is not None:
            with _Logged("on_stats"):
                self._on_stats(iteration_json(record, self._engine.stats(), self._engine.config))
        if not self._open:
            if self._stopping.is_set():
                return False
            self._wake.wait(IDLE_SECONDS)
            self._wake.clear()
        return True

    def _room(self) -> int:
        return -1 if self._max_active is None else max(0, self._max_active - self.num_active)

    def _take(self, wanted: InferenceRequest) -> None:
        with self._lock:
            known = wanted.request_id in self._taken
            self._taken.add(wanted.request_id)
        if known:
            message = f"request_id must not be that of an unfinished request, got {wanted.request_id!r}"
            self._sender.submit(self._call_back, wanted.request_id, {}, True, message)
            return
        try:
            handle = self._engine.submit(
                wanted.input_ids, wanted.generation_config, wanted.request_id, **wanted.options
            )
        except (ValueError, TypeError) as error:
            self._close(wanted.request_id, {}, str(error))
            return
        if handle.search is not None or len(handle.samples) > 1:
            for sample in handle.samples:
                sample.cancel()
            name = "num_return_sequences" if handle.search is None else "num_beams"
            self._close(
                wanted.request_id, {}, f"{name} must be 1, for a response has one sequence; submit to the engine"
            )
            return
        self._open[wanted.request_id] = _Open(handle=handle, streaming=wanted.streaming)

    def _stop(self, request_ids: Collection[RequestId]) -> None:
        for request_id in request_ids:
            if request_id in self._open:
                self._open[request_id].handle.cancel()
        self._respond()

    def _respond(self) -> None:
        """Responses for what has changed since the last time."""
        for request_id, entry in list(self._open.items()):
            handle = entry.handle
            ended = handle.finished
            if handle.error is not None:
                self._close(request_id, {}, handle.error)
            elif ended or (entry.streaming and handle.state.generated > entry.sent):
                tensors = _tensors(entry)
                entry.sent = len(handle.tokens)
                if ended:
                    self._close(request_id, tensors, "")
                else:
                    self._sender.submit(self._deliver_part, handle, tensors)

    def _close(self, request_id: RequestId, tensors: dict[str, Tensor], error: str) -> None:
        self._open.pop(request_id, None)
        self._sender.submit(self._deliver_last, request_id, tensors, error)

    def _deliver_part(self, handle: Request, tensors: dict[str, Tensor]) -> None:
        if not self._call_back(handle.request_id, tensors, False, ""):
            handle.cancel()

    def _deliver_last(self, request_id: RequestId, tensors: dict[str, Tensor], error: str) -> None:
        with self._lock:
            self._taken.discard(request_id)  # before the call, in which the id may be used again
        self._call_back(request_id, tensors, True, error)

    def _call_back(self, request_id: RequestId, tensors: dict[str, Tensor], is_final: bool, error: str) -> bool:
        with _Logged("send_response") as outcome:
            self._send_response(request_id, tensors, is_final, error)
        return not outcome.failed

    def _observe(self, record: StepRecord) -> None:
        self._last = record


def _tensors(entry: _Open) -> dict[str, Tensor]:
    handle = entry.handle
    tokens, prompt = handle.tokens, handle.prompt_ids
    new = tokens[entry.sent :] if entry.streaming else prompt + tokens
    tensors = {
        "output_ids": torch.tensor(new, dtype=torch.int64).view(1, 1, -1),
        "sequence_length": torch.tensor([[len(prompt) + len(tokens)]]),
    }
    logprobs = handle.logprobs
    if logprobs is not None:
        log_probs = torch.tensor(logprobs, dtype=torch.float32).view(1, 1, -1)
        tensors |= {"log_probs": log_probs, "cum_log_probs": log_probs.sum(dim=-1)}
    return tensors


class _Logged:
    """Around a callback of the user: whatever it raises is his, and must not end the thread that called it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.failed = error is not None
        if isinstance(error, Exception):
            logger.error("callback %s raised", self._name, exc_info=error)
            return True
        return False
