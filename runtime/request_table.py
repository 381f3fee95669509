"""The engine's unfinished requests, by id and by what the scheduler knows of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from selective_compile.runtime.plan import Share
from selective_compile.runtime.prompt import check_request_id
from selective_compile.runtime.request import Request
from selective_compile.runtime.request_state import RequestId, RequestState


class RequestTable:
    """Numbers requests as they arrive, and knows those that have not ended; an id is free again after that."""

    def __init__(self) -> None:
        self._live: dict[RequestId, Request] = {}
        self._submitted = 0

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._live.values()))

    @property
    def next_number(self) -> int:
        """Of the request that is added next."""
        return self._submitted

    def choose_id(self, request_id: RequestId | None) -> RequestId:
        """The id if it is free, or one that is made up for None.

        Raises:
            ValueError: it is no id, or that of an unfinished request.
        """
        if request_id is None:
            number = self._submitted
            while (made_up := f"request-{number}") in self._live:
                number += 1
            return made_up
        if check_request_id(request_id) in self._live:
            raise ValueError(f"request_id must not be that of an unfinished request, got {request_id!r}")
        return request_id

    def add(self, request: Request) -> None:
        assert request.state.number == self._submitted and request.request_id not in self._live, request
        self._submitted += 1
        self._live[request.request_id] = request

    def of(self, state: RequestState) -> Request:
        return self._live[state.request_id]

    def of_shares(self, shares: Iterable[Share]) -> tuple[Request, ...]:
        return tuple(self._live[share.state.request_id] for share in shares)

    def remove(self, request: Request) -> None:
        del self._live[request.request_id]
