"""The engine's unfinished requests, by id and by what the scheduler knows of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from selective_compile.runtime.plan import Share
from selective_compile.runtime.prompt import check_request_id
from selective_compile.runtime.request import Request
from selective_compile.runtime.request_state import RequestId, RequestState


class RequestTable:
    """Numbers requests as they arrive, and knows those that have not ended; an id is free again after that.

    Of several samples of a prompt the first stands for all until the prompt is computed: the scheduler does not know
    the others until then.
    """

    def __init__(self) -> None:
        self._live: dict[RequestId, Request] = {}
        self._submitted = 0
        self._unforked: dict[int, list[Request]] = {}  # by whose prompt they wait for, the number of its request

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._live.values()))

    @property
    def next_number(self) -> int:
        """Of the request that is added next."""
        return self._submitted

    @property
    def num_unforked(self) -> int:
        return sum(map(len, self._unforked.values()))

    def choose_ids(self, request_id: RequestId | None, count: int) -> list[RequestId]:
        """For so many samples: `choose_id`, and that with a number behind it."""
        first = self.choose_id(request_id)
        return [first, *(self.choose_id(f"{first}/{place}") for place in range(1, count))]

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
        if (chosen := check_request_id(request_id)) in self._live:
            raise ValueError(f"request_id must not be that of an unfinished request, got {chosen!r}")
        return chosen

    def add(self, request: Request) -> None:
        assert request.state.number == self._submitted and request.request_id not in self._live, request
        # The states of the other beams have the numbers behind its own.
        self._submitted += 1 if request.params.beams is None else request.params.beams.num_beams
        self._live[request.request_id] = request

    def of(self, state: RequestState) -> Request:
        return self._live[state.request_id]

    def group_of(self, state: RequestState) -> tuple[Request, ...]:
        """Its request, and behind it the samples that start from its prompt."""
        return (self.of(state), *self._unforked.get(state.number, ()))

    def of_shares(self, shares: Iterable[Share]) -> tuple[tuple[Request, ...], ...]:
        if self._unforked:
            return tuple([self.group_of(share.state) for share in shares])
        live = self._live
        return tuple([(live[share.state.request_id],) for share in shares])

    def remove(self, request: Request) -> None:
        del self._live[request.request_id]

    def fork_later(self, first: Request, others: list[Request]) -> None:
        """These go on from the prompt of the first, once it is computed."""
        self._unforked[first.state.number] = others

    def take_unforked(self, state: RequestState) -> list[Request]:
        """Those that wait for its prompt, which do so no more."""
        return self._unforked.pop(state.number, [])

    def pass_on(self, request: Request) -> Request | None:
        """Who goes on in place of one that leaves before the others of its prompt have forked, with its state; None: no
        other waits for its prompt."""
        others = self._unforked.get(request.state.number)
        if not others:
            return None
        heir = others.pop(0)
        request.state, heir.state = heir.state, request.state
        request.state.request_id, heir.state.request_id = request.request_id, heir.request_id
        return heir

    def drop_unforked(self, request: Request) -> bool:
        """Whether it waited for another's prompt, which it does no more."""
        for others in self._unforked.values():
            if request in others:
                others.remove(request)
                return True
        return False
