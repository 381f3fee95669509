"""The batch manager: an engine, or several, driven through callbacks, for those who embed it in a server."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from threading import Event, Thread
from typing import Self

from torch import Tensor

from selective_compile.runtime.callbacks import CallbackThreads, Question
from selective_compile.runtime.delivery import Delivery, SendResponse
from selective_compile.runtime.engine import Engine
from selective_compile.runtime.inference_request import InferenceRequest, requests_among, with_all_beams
from selective_compile.runtime.iterations import Iteration, Iterations
from selective_compile.runtime.one_thread import OneThread
from selective_compile.runtime.own_code import Failed, Logged
from selective_compile.runtime.prompt import check_request_id
from selective_compile.runtime.request import Request
from selective_compile.runtime.request_processor import RequestProcessor
from selective_compile.runtime.request_state import RequestId
from selective_compile.runtime.responses import OpenRequest
from selective_compile.runtime.stats import StepFloor, StepRecord
from selective_compile.runtime.submissions import Submissions, Submitted

logger = logging.getLogger(__name__)

# How long the worker sleeps when there is nothing to do, unless `notify` wakes it.
IDLE_SECONDS = 0.005
# How long steps wait for what `get_requests` and `poll_stop` have to say, and for new requests to be read.
PATIENCE = 0.05
# Texts of which `on_stats` has not returned; those that come while there are so many are not told.
WAITING_STATS = 1000
# In place of a request's id, among the calls that the senders make.
ON_STATS = ("on_stats",)

GetRequests = Callable[[int], Iterable[InferenceRequest]]
PollStop = Callable[[], Collection[RequestId]]
OnStats = Callable[[str], None]


class BatchManager:
    """Runs the engine in a worker thread that asks for requests, sends responses and asks whom to stop.

    Each iteration is: `get_requests`, one step, responses, `poll_stop`, `on_stats`. What a callback raises is logged;
    where it was about one request, that request is stopped, and the others go on.

    Callbacks are called in threads of their own, and none that blocks stops the steps. `get_requests` and `poll_stop`
    are waited for `PATIENCE` seconds: what takes longer is taken up when it comes, and is not called again until then.
    So are requests whose options take long to read, such as stop strings for a large vocabulary.
    With `EngineConfig.overlap` they are called during a step, about the one before and for the one after.
    `send_response` and `on_stats` are called one call after the other, but beside those that take longer than
    `PATIENCE`: a reader that blocks keeps the responses of its own request waiting, which counts to `max_active` as
    long, and those of others only when `senders` calls block. While `on_stats` blocks, the first `WAITING_STATS` texts
    wait for it.
    """

    def __init__(
        self,
        engine: Engine | RequestProcessor,
        get_requests: GetRequests,
        send_response: SendResponse,
        poll_stop: PollStop | None = None,
        on_stats: OnStats | None = None,
        *,
        max_active: int | None = None,
        max_beam_width: int | None = None,
        floor: Callable[[StepRecord], StepFloor] | None = None,
        senders: int = 16,
    ) -> None:
        """Start the worker.

        Args:
            engine: nobody else may run its steps. Of several behind a `RequestProcessor` each that has work takes a
                step in an iteration, all at once, and `on_stats` says which it was, as "Engine".
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
                request is left in the engine when its last response is sent, and its id is free. A request that comes
                with it before is refused: its last response, with a message, follows that of the one that has it.
            poll_stop: gives the ids of requests to be stopped; unknown ones are passed over. A stopped request
                gets its last response, with what it has generated.
            on_stats: called with the JSON text of `iteration_stats` after each step.
            max_active: most requests to be taken at a time; None: no limit.
            max_beam_width: most beams or samples of a request; None: no limit.
            floor: what `on_stats` is to report as a step's least time and limiting resource, such as a `Roofline` of
                `selective_compile.bench.floor`; None: neither is reported.
            senders: most threads that call `send_response` and `on_stats`.

        Raises:
            ValueError: a limit is not a positive integer, a callback cannot be called, or the engine is none.
        """
        if not isinstance(engine, (Engine, RequestProcessor)):
            raise ValueError(f"engine must be an Engine or a RequestProcessor, got {type(engine).__name__}")
        needed = {"get_requests": get_requests, "send_response": send_response}
        for name, callback in {**needed, "poll_stop": poll_stop, "on_stats": on_stats}.items():
            if not callable(callback) and (name in needed or callback is not None):
                raise ValueError(f"{name} must be callable{'' if name in needed else ' or None'}, got {callback!r}")
        if type(senders) is not int or senders < 1:
            raise ValueError(f"senders must be a positive integer, got {senders!r}")
        for name, limit in (("max_active", max_active), ("max_beam_width", max_beam_width)):
            if limit is not None and (type(limit) is not int or limit < 1):
                raise ValueError(f"{name} must be a positive integer or None, got {limit!r}")
        self._engine = engine
        self._get_requests = get_requests
        self._poll_stop = poll_stop
        self._on_stats = on_stats
        self._max_active = max_active
        self._max_beam_width = max_beam_width
        self._floor = floor
        self._open: dict[RequestId, OpenRequest] = {}
        self._stopping = Event()
        self._wake = Event()
        self._iterations = Iterations(engine)
        self._unreported: deque[Iteration] = deque()
        # Calls the server during a step, where an engine overlaps.
        self._caller = OneThread("selective-compile-callbacks") if self._iterations.overlaps else None
        self._abandoning = Event()
        self._senders = CallbackThreads(senders, PATIENCE, name="selective-compile-responses")
        self._askers = CallbackThreads(3, PATIENCE, name="selective-compile-questions")
        self._asked_requests = Question[list[InferenceRequest]](self._askers, PATIENCE)
        self._asked_stops = Question[Collection[RequestId]](self._askers, PATIENCE)
        self._submissions = Submissions(self._askers)
        self._delivery = Delivery(self._senders, send_response)
        self._worker = Thread(target=self._run, name="selective-compile-batch-manager", daemon=True)
        self._worker.start()

    def notify(self) -> None:
        """Tell a worker that sleeps that `get_requests` has something for it."""
        self._wake.set()

    def shutdown(self, timeout: float | None = None) -> bool:
        """Take no more requests, let those that were taken end, send their responses, and stop the threads.

        From within a callback it asks for that and does not wait for it.

        Args:
            timeout: None: for as long as it takes, for ever where a callback blocks for ever. Otherwise so many
                seconds; after that what still runs is stopped and gets its last response, as far as its reader takes
                it, and nothing is waited for.

        Returns:
            whether all has been sent and all threads have ended.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        self._stopping.set()
        self._wake.set()
        within = threading.current_thread() is self._worker  # as an observer of the engine is
        if within or self._senders.include_this or self._askers.include_this:
            return False
        if ended := self._joined(deadline):
            return ended
        self._abandoning.set()
        return False

    def _joined(self, deadline: float | None) -> bool:
        """Whether the worker has ended, and the threads after it."""
        self._worker.join(_left(deadline))
        # The worker has closed them by then.
        return not self._worker.is_alive() and all(
            threads.join(_left(deadline)) for threads in (self._senders, self._askers)
        )

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
        return self._delivery.num_taken

    def _run(self) -> None:
        reason = "the worker thread of the batch manager ended"
        try:
            while self._iterate():
                pass
        except BaseException as error:
            reason = f"{reason}: {type(error).__name__}: {error}"
            raise
        finally:
            self._end(reason)

    def _end(self, reason: str) -> None:
        """The last response of everyone who has not had it, and no more threads."""
        self._iterations.close()
        self._respond()
        for request_id, entry in list(self._open.items()):
            entry.cancel()
            self._close(request_id, {}, reason)
        for request_id in self._submissions.give_up():
            self._close(request_id, {}, reason)
        self._asked_requests.give_up(self._refuse)
        self._asked_stops.give_up(lambda request_ids: None)
        if self._caller is not None:
            self._caller.close()
        self._askers.close()
        self._senders.close()

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
            if self._stopping.is_set() and not self._submissions:
                return False
            self._wake.wait(IDLE_SECONDS)
            self._wake.clear()
        return True

    def _step_beside(self, caller: OneThread) -> None:
        """A step, during which the server is called: for what follows the step before, and for new requests."""
        calls = [caller.submit(self._call_after), caller.submit(self._ask)]
        try:
            self._step()
        finally:
            for call in calls:
                call.result()

    def _step(self) -> None:
        self._unreported.extend(self._iterations.run())

    def _ask(self) -> None:
        """New requests, to be in the next step."""
        arrived: list[InferenceRequest] = []
        with Logged("get_requests"):
            taking = not self._stopping.is_set()
            arrived = self._asked_requests.ask(self._ask_for_requests, anew=taking) or []
        for wanted in arrived:
            self._take(wanted)
        for submitted in self._submissions.take_up(PATIENCE if arrived else 0.0):
            self._open_one(submitted)

    def _call_after(self) -> None:
        """What follows a step: whom to stop, and its statistics."""
        if self._poll_stop is not None and (self._open or self._submissions):
            with Logged("poll_stop"):
                self._stop(self._asked_stops.ask(self._poll_stop) or ())
        if self._abandoning.is_set():
            self._stop([*self._open, *self._submissions.ids])
        while self._unreported:
            self._tell_stats(self._unreported.popleft())

    def _ask_for_requests(self) -> list[InferenceRequest]:
        found = []
        with Logged("get_requests"):  # those that came before it raised are taken
            for wanted in requests_among(self._get_requests(self._room())):
                found.append(wanted)
        return found

    def _refuse(self, late: list[InferenceRequest]) -> None:
        """For requests that come when the worker has ended."""
        for wanted in late:
            self._delivery.refuse_late(wanted.request_id, "the batch manager was shut down")

    def _tell_stats(self, iteration: Iteration) -> None:
        tell = self._on_stats
        if tell is None or self._senders.num_unfinished(ON_STATS) >= WAITING_STATS:
            return

        def call() -> None:
            with Logged("on_stats", takes=BaseException):
                tell(iteration.text(self._floor))

        self._senders.submit(ON_STATS, call)

    def _room(self) -> int:
        return -1 if self._max_active is None else max(0, self._max_active - self.num_active)

    def _take(self, wanted: InferenceRequest) -> None:
        try:
            request_id = check_request_id(wanted.request_id)
        except ValueError as error:
            self._delivery.refuse_id(wanted.request_id, str(error))
            return
        wanted = replace(wanted, request_id=request_id)
        if self._delivery.take(request_id):
            self._submissions.submit(wanted, partial(self._submit, wanted))
        else:
            is_open = request_id in self._open or request_id in self._submissions
            self._delivery.refuse_duplicate(request_id, is_open=is_open)

    def _open_one(self, submitted: Submitted) -> None:
        wanted, handle, stopped = submitted
        if isinstance(handle, Failed):
            self._close(wanted.request_id, {}, handle.error)
            return
        opened = OpenRequest(handle=handle, streaming=wanted.streaming, pad_id=wanted.pad_id)
        if (message := self._too_wide(handle)) is not None:
            opened.cancel()
            self._close(wanted.request_id, {}, message)
            return
        self._open[wanted.request_id] = opened
        if stopped:
            opened.cancel()

    def _too_wide(self, handle: Request) -> str | None:
        beams = handle.params.beams
        width = len(handle.samples) if beams is None else beams.num_beams
        if self._max_beam_width is None or width <= self._max_beam_width:
            return None
        name = "num_return_sequences" if beams is None else "num_beams"
        return f"{name} must be at most max_beam_width, {self._max_beam_width}, got {width}"

    def _submit(self, wanted: InferenceRequest) -> Request | Failed:
        """Failed: the caller is told what is wrong; what else is raised is for the log as well."""
        try:
            options = with_all_beams(wanted)
            return self._engine.submit(wanted.input_ids, wanted.generation_config, wanted.request_id, **options)
        except (ValueError, TypeError) as error:
            return Failed(error=str(error))

    def _stop(self, request_ids: Collection[RequestId]) -> None:
        for request_id in request_ids:
            if request_id in self._open:
                self._open[request_id].cancel()
            else:
                self._submissions.stop(request_id)

    def _respond(self) -> None:
        """Responses for what has changed since the last time."""
        for request_id, entry in list(self._open.items()):
            error = entry.error
            if error is not None:
                entry.cancel()
                self._close(request_id, {}, error)
                continue
            ended = entry.ended
            try:
                tensors = entry.tensors(ended=ended)
            except Exception as failure:  # whatever it is, the others go on
                logger.exception("a response could not be made, of request %r", request_id)
                entry.cancel()
                self._close(request_id, {}, str(failure))
                continue
            if ended:
                self._close(request_id, tensors or {}, "")
            elif tensors is not None:
                self._delivery.part(entry, tensors)

    def _close(self, request_id: RequestId, tensors: dict[str, Tensor], error: str) -> None:
        self._open.pop(request_id, None)
        self._delivery.last(request_id, tensors, error)


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
