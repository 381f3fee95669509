"""The batch manager: an engine driven through callbacks, for those who embed it in a server."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Any, Self

from torch import Tensor
from transformers import GenerationConfig

from selective_compile.runtime.engine import Engine
from selective_compile.runtime.iteration_stats import iteration_json
from selective_compile.runtime.request_state import RequestId
from selective_compile.runtime.responses import OpenRequest
from selective_compile.runtime.stats import EngineStats, StepFloor, StepRecord

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
        streaming: a response for each token, in place of one at the end. A beam search has all tokens at its end.
        pad_id: fills up the rows of sequences that are shorter than others of the request.
        options: other arguments of `Engine.submit`, such as `logprobs`, `priority` or `max_new_tokens`.
    """

    request_id: RequestId
    input_ids: Any
    generation_config: GenerationConfig | None = None
    streaming: bool = False
    pad_id: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)


GetRequests = Callable[[int], Iterable[InferenceRequest]]
SendResponse = Callable[[RequestId, dict[str, Tensor], bool, str], None]
PollStop = Callable[[], Collection[RequestId]]
OnStats = Callable[[str], None]


class BatchManager:
    """Runs the engine in a worker thread that asks for requests, sends responses and asks whom to stop.

    Each iteration is: `get_requests`, one step, responses, `poll_stop`, `on_stats`. Responses go out from a thread of
    their own, in order, so that a reader that blocks keeps only responses waiting and not the steps. What a callback
    raises is logged; where it was about one request, that request is stopped, and the others go on. With
    `EngineConfig.overlap` the other callbacks are called from one thread of their own during a step, `poll_stop` and
    `on_stats` about the step before, `get_requests` for the step after; one that blocks holds up the next step all the
    same.
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
        max_beam_width: int | None = None,
        floor: Callable[[StepRecord], StepFloor] | None = None,
    ) -> None:
        """Start the worker.

        Args:
            engine: nobody else may run its steps.
            get_requests: called with the most requests that can be taken, negative for no limit.
            send_response: called with the id, the tensors, whether it is the last response, and a message that is
                empty unless the request failed, in which case there are no tensors. The tensors, on the CPU, of a
                request's beams, where it has neither `num_beams` nor `num_return_sequences` one: `output_ids` [1,
                beams, length] int64, the prompt and what was generated, or in a streamed response what is new;
                `sequence_length` [1, beams] int64, of prompt and output so far; with the option `logprobs`
                `log_probs` [1, beams, output length] float32, as new as `output_ids`, and `cum_log_probs` [1, beams]
                float32, of the output so far; with `output_logits` `generation_logits` [1, beams, output length, V]
                float32, as new; and with `prompt_logits` `context_logits` [1, prompt length, V] float32, in the
                first response. Rows that are shorter than others are filled up, with `pad_id` or 0. Nothing of a
                request is left in the engine when its last response is sent, and its id is free.
            poll_stop: gives the ids of requests to be stopped; unknown ones are passed over. A stopped request
                gets its last response, with what it has generated.
            on_stats: called with the JSON text of `iteration_stats` after each step.
            max_active: most requests to be taken at a time; None: no limit.
            max_beam_width: most beams or samples of a request; None: no limit.
            floor: what `on_stats` is to report as a step's least time and limiting resource, such as a `Roofline` of
                `selective_compile.bench.floor`; None: neither is reported.

        Raises:
            ValueError: a limit is not a positive integer.
        """
        for name, limit in (("max_active", max_active), ("max_beam_width", max_beam_width)):
            if limit is not None and (type(limit) is not int or limit < 1):
                raise ValueError(f"{name} must be a positive integer or None, got {limit!r}")
        self._engine = engine
        self._get_requests = get_requests
        self._send_response = send_response
        self._poll_stop = poll_stop
        self._on_stats = on_stats
        self._max_active = max_active
        self._max_beam_width = max_beam_width
        self._floor = floor
        self._open: dict[RequestId, OpenRequest] = {}
        self._taken: set[RequestId] = set()  # ids whose final response has not been handed over
        self._lock = Lock()  # of `_taken`
        self._stopping = Event()
        self._wake = Event()
        self._last: StepRecord | None = None
        self._unreported: deque[tuple[StepRecord, EngineStats]] = deque()
        # Calls the server during a step, where the engine overlaps.
        self._caller = ThreadPoolExecutor(1, "selective-compile-callbacks") if engine.config.overlap else None
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
        if self._caller is not None:
            self._caller.shutdown()
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
                entry.cancel()
                self._close(request_id, {}, reason)

    def _iterate(self) -> bool:
        """One iteration; False: asked to stop, and nothing is left to do."""
        if self._caller is not None and self._open:
            self._step_beside(self._caller)
        else:
            self._ask()
            if self._open:
                self._step()
        self._respond()
        if self._caller is None or not self._open:
            self._call_after()
            self._respond()
        if not self._open:
            if self._stopping.is_set():
                return False
            self._wake.wait(IDLE_SECONDS)
            self._wake.clear()
        return True

    def _step_beside(self, caller: ThreadPoolExecutor) -> None:
        """A step, during which the server is called: for what follows the step before, and for new requests."""
        calls = [caller.submit(self._call_after), caller.submit(self._ask)]
        try:
            self._step()
        finally:
            for call in calls:
                call.result()

    def _step(self) -> None:
        self._engine.drive()
        self._engine.hand_out()
        record, self._last = self._last, None
        if record is not None:
            self._unreported.append((record, self._engine.stats()))

    def _ask(self) -> None:
        """New requests, to be in the next step."""
        if not self._stopping.is_set():
            with _Logged("get_requests"):
                for wanted in self._get_requests(self._room()):
                    self._take(wanted)

    def _call_after(self) -> None:
        """What follows a step: whom to stop, and its statistics."""
        if self._poll_stop is not None and self._open:
            with _Logged("poll_stop"):
                self._stop(self._poll_stop())
        while self._unreported:
            record, stats = self._unreported.popleft()
            if self._on_stats is not None:
                floor = None if self._floor is None else self._floor(record)
                with _Logged("on_stats"):
                    self._on_stats(iteration_json(record, stats, self._engine.config, floor))

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
                wanted.input_ids, wanted.generation_config, wanted.request_id, **_with_all_beams(wanted)
            )
        except (ValueError, TypeError) as error:
            self._close(wanted.request_id, {}, str(error))
            return
        opened = OpenRequest(handle=handle, streaming=wanted.streaming, pad_id=wanted.pad_id)
        beams = handle.params.beams
        width = len(handle.samples) if beams is None else beams.num_beams
        if self._max_beam_width is not None and width > self._max_beam_width:
            opened.cancel()
            name = "num_return_sequences" if beams is None else "num_beams"
            message = f"{name} must be at most max_beam_width, {self._max_beam_width}, got {width}"
            self._close(wanted.request_id, {}, message)
            return
        self._open[wanted.request_id] = opened

    def _stop(self, request_ids: Collection[RequestId]) -> None:
        for request_id in request_ids:
            if request_id in self._open:
                self._open[request_id].cancel()

    def _respond(self) -> None:
        """Responses for what has changed since the last time."""
        for request_id, entry in list(self._open.items()):
            error = entry.error
            if error is not None:
                entry.cancel()
                self._close(request_id, {}, error)
                continue
            ended, tensors = entry.ended, entry.tensors()
            if ended:
                self._close(request_id, tensors or {}, "")
            elif tensors is not None:
                self._sender.submit(self._deliver_part, entry, tensors)

    def _close(self, request_id: RequestId, tensors: dict[str, Tensor], error: str) -> None:
        self._open.pop(request_id, None)
        self._sender.submit(self._deliver_last, request_id, tensors, error)

    def _deliver_part(self, entry: OpenRequest, tensors: dict[str, Tensor]) -> None:
        if not self._call_back(entry.handle.request_id, tensors, False, ""):
            entry.cancel()

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


def _with_all_beams(wanted: InferenceRequest) -> dict[str, Any]:
    """Its options; where it has beams and does not say how many of them to return, all."""
    config, options = wanted.generation_config, dict(wanted.options)
    beams = options.get("num_beams", getattr(config, "num_beams", None))
    said = "num_return_sequences" in options or getattr(config, "num_return_sequences", None) is not None
    if isinstance(beams, int) and beams > 1 and not said:
        options["num_return_sequences"] = beams
    return options


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
