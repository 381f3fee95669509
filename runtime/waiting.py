"""Waiting requests in the order in which they are admitted.

Under none of the orders does anyone wait for ever, as long as those that run end: what comes later than a request
is ahead of it only if it came soon enough after it. How soon is said with each order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Protocol

from selective_compile.options import WaitingOrder
from selective_compile.runtime.request_state import RequestId, RequestState

# One more of priority is worth as much as having come so many seconds earlier.
PRIORITY_SECONDS = 10.0
# Among deadlines, a request without one is placed as if it had to end within so many seconds.
PATIENCE_SECONDS = 60.0
# So many tokens a second of the debt of a user who waits are made good to those users who come anew.
FORGIVEN_TOKENS = 10.0
# What a generated token counts, where a token of a prompt counts 1: it takes a step, and reads the weights for it.
GENERATED_TOKEN = 2


class WaitingQueue(Protocol):
    """Requests without blocks. Adding, finding the first and removing take logarithmic time on average."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[RequestState]:
        """In no order that matters."""

    def add(self, state: RequestState) -> None: ...

    def remove(self, state: RequestState) -> None: ...

    def first(self) -> RequestState | None:
        """Who is to be admitted next; it stays."""

    def charge(self, state: RequestState, num_tokens: int) -> None:
        """The request was served so many tokens, generated ones counted `GENERATED_TOKEN` times."""


class RankedQueue:
    """The smallest rank first; of equal ones, the request that came first."""

    def __init__(self, rank: Callable[[RequestState], float]) -> None:
        self._rank = rank
        self._states: dict[int, RequestState] = {}
        # Entries of requests that have been removed stay until they come up, or are too many.
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def add(self, state: RequestState) -> None:
        heappush(self._heap, (self._rank(state), state.number))  # before anything has changed, should it have no rank
        self._states[state.number] = state

    def remove(self, state: RequestState) -> None:
        del self._states[state.number]
        if len(self._heap) > 2 * len(self._states) + 32:
            self._heap = [(self._rank(left), number) for number, left in self._states.items()]
            heapify(self._heap)

    def first(self) -> RequestState | None:
        while self._heap:
            state = self._states.get(self._heap[0][1])
            if state is not None:
                return state
            heappop(self._heap)
        return None

    def charge(self, state: RequestState, num_tokens: int) -> None:
        pass


class _Account:
    """What a user was served, and his waiting requests; `entry` tells when they began to wait."""

    __slots__ = ("entry", "requests", "served")

    def __init__(self, served: float) -> None:
        self.served = served
        self.requests = RankedQueue(by_arrival)
        self.entry = 0


class FairQueue:
    """The user who was served the fewest tokens first: the virtual token counter of Sheng et al., OSDI 2024.

    A user who begins to wait is put level with the one served least among those who wait already, so that nobody
    saves up service by staying away. He is also put `FORGIVEN_TOKENS` a second ahead, or users who keep coming anew
    could be ahead of one with a debt for ever.
    """

    def __init__(self, running: Callable[[], Iterable[RequestState]] = tuple) -> None:
        """`running`: those that were admitted, whose accounts stay open: they may come back, and not anew."""
        self._running = running
        self._accounts: dict[RequestId | None, _Account] = {}
        self._heap: list[tuple[float, int, RequestId | None]] = []
        self._length = 0
        self._entries = 0
        self._level = 0.0  # never falls: what whoever waits has been served at least
        self._most_accounts = 64

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[RequestState]:
        return (state for account in self._accounts.values() for state in account.requests)

    def add(self, state: RequestState) -> None:
        account = self._account(state)
        if not account.requests:
            # A request that was preempted does not come anew: it is not put behind those it was ahead of.
            if not state.charged:
                self._raise_level(state.terms.arrival)
                account.served = max(account.served, self._level)
            self._entries += 1
            account.entry = self._entries
            heappush(self._heap, (account.served, account.entry, state.terms.user))
        account.requests.add(state)
        self._length += 1

    def remove(self, state: RequestState) -> None:
        account = self._accounts[state.terms.user]
        account.requests.remove(state)
        self._length -= 1
        if not self._length:
            self._level = max(self._level, account.served)
        if len(self._accounts) > self._most_accounts:
            self._close_accounts()

    def first(self) -> RequestState | None:
        account = self._first_account()
        return None if account is None else account.requests.first()

    def charge(self, state: RequestState, num_tokens: int) -> None:
        self._account(state).served += num_tokens

    def _raise_level(self, now: float) -> None:
        first = self._first_account()
        self._level = max(self._level, FORGIVEN_TOKENS * now, first.served if first else 0.0)

    def _account(self, state: RequestState) -> _Account:
        account = self._accounts.get(state.terms.user)
        if account is None:
            account = self._accounts[state.terms.user] = _Account(self._level)
        return account

    def _first_account(self) -> _Account | None:
        """Entries of the heap that were overtaken by what happened since are put right as they come up."""
        while self._heap:
            served, entry, user = self._heap[0]
            account = self._accounts.get(user)
            if account is None or account.entry != entry or not account.requests:
                heappop(self._heap)
            elif account.served != served:
                heapreplace(self._heap, (account.served, entry, user))
            else:
                return account
        return None

    def _close_accounts(self) -> None:
        """Drop those that say no more than a new one would; the others' owners run, wait, or are in debt."""
        running = {state.terms.user for state in self._running()}
        self._accounts = {
            user: account
            for user, account in self._accounts.items()
            if account.requests or account.served > self._level or user in running
        }
        self._most_accounts = 2 * len(self._accounts) + 64


def by_arrival(state: RequestState) -> float:
    return state.number


def by_priority(state: RequestState) -> float:
    """Whoever comes `PRIORITY_SECONDS` later for each step of priority is behind."""
    return state.terms.arrival - PRIORITY_SECONDS * state.terms.priority


def by_deadline(state: RequestState) -> float:
    """Whoever comes after a request's deadline, which is later than that moment, is behind it."""
    terms = state.terms
    return terms.arrival + PATIENCE_SECONDS if terms.deadline == math.inf else terms.deadline


def waiting_queue(order: WaitingOrder, running: Callable[[], Iterable[RequestState]] = tuple) -> WaitingQueue:
    """The queue of an order; `running`: those that were admitted from it and have not ended."""
    if order == "fair":
        return FairQueue(running)
    return RankedQueue({"first_come": by_arrival, "priority": by_priority, "deadline": by_deadline}[order])
