"""How responses reach a server: in order for each id, and with one last one for each request."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Lock

from torch import Tensor

from selective_compile.runtime.callbacks import CallbackThreads
from selective_compile.runtime.own_code import Logged
from selective_compile.runtime.request_state import RequestId
from selective_compile.runtime.responses import OpenRequest

Tensors = dict[str, Tensor]
SendResponse = Callable[[RequestId, Tensors, bool, str], None]


class Delivery:
    """Calls `send_response` in threads, and knows which ids are taken: until the last response has been handed over."""

    def __init__(self, threads: CallbackThreads, send_response: SendResponse) -> None:
        self._threads = threads
        self._send_response = send_response
        self._taken: set[RequestId] = set()
        self._lock = Lock()  # of `_taken`
        self._refused: dict[RequestId, list[str]] = {}  # what to say to those who came with an id that is open

    @property
    def num_taken(self) -> int:
        with self._lock:
            return len(self._taken)

    @property
    def num_refusals_that_wait(self) -> int:
        return sum(map(len, self._refused.values()))

    def take(self, request_id: RequestId) -> bool:
        """For a new request; False: another has it."""
        with self._lock:
            free = request_id not in self._taken
            self._taken.add(request_id)
        return free

    def part(self, entry: OpenRequest, tensors: Tensors) -> None:
        """A response that is not the last one; if the server cannot take it, the request is cancelled."""
        self._send(entry.handle.request_id, partial(self._deliver_part, entry, tensors))

    def last(self, request_id: RequestId, tensors: Tensors, error: str) -> None:
        """The last response, and behind it those to whom the id was refused."""
        self._send(request_id, partial(self._deliver_last, request_id, tensors, error))
        for message in self._refused.pop(request_id, ()):
            self._send(request_id, partial(self._call, request_id, {}, True, message))

    def refuse_id(self, request_id: RequestId, message: str) -> None:
        """To a request whose id is none."""
        self._send(None, partial(self._call, request_id, {}, True, message))

    def refuse_duplicate(self, request_id: RequestId, *, is_open: bool) -> None:
        """Behind the last response of the one that has the id: until then, every response is about that one."""
        message = f"request_id must not be that of an unfinished request, got {request_id!r}"
        if is_open:
            self._refused.setdefault(request_id, []).append(message)
        else:
            self._send(request_id, partial(self._call, request_id, {}, True, message))

    def refuse_late(self, request_id: RequestId, message: str) -> None:
        """To a request that comes when there may be no thread left: in the caller's."""
        self._call(request_id, {}, True, message)

    def _send(self, request_id: RequestId | None, call: Callable[[], object]) -> None:
        """In order with the responses of the same id; None: with those of ids that are none."""
        self._threads.submit(request_id, call)

    def _deliver_part(self, entry: OpenRequest, tensors: Tensors) -> None:
        if not self._call(entry.handle.request_id, tensors, False, ""):
            entry.cancel()

    def _deliver_last(self, request_id: RequestId, tensors: Tensors, error: str) -> None:
        with self._lock:
            self._taken.discard(request_id)  # before the call, in which the id may be used again
        self._call(request_id, tensors, True, error)

    def _call(self, request_id: RequestId, tensors: Tensors, is_final: bool, error: str) -> bool:
        with Logged("send_response", takes=BaseException) as outcome:
            self._send_response(request_id, tensors, is_final, error)
        return not outcome.failed
