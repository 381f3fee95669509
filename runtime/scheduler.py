"""The scheduler: which requests are in the next step, with how many tokens each, and who gives up memory."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from selective_compile.runtime.block_pool import BlockPool
from selective_compile.runtime.request_state import RequestState


class Share(NamedTuple):
    """A request's part in a step: tokens start .. start + num_tokens of `state.tokens` are computed."""

    state: RequestState
    start: int
    num_tokens: int
    samples: bool  # the last known token is among them, so the step's logits give the next one

    @property
    def is_prefill(self) -> bool:
        """True unless the share is the token that the previous step generated; recomputing is prefill too."""
        return not self.samples or self.num_tokens > 1 or self.start < self.state.prompt_length


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What one step computes, in the order in which it lies in the ragged batch."""

    shares: tuple[Share, ...]
    preempted: tuple[RequestState, ...]

    @property
    def num_tokens(self) -> int:
        return sum(share.num_tokens for share in self.shares)


class Scheduler:
    """First come, first served, within one token budget a step; a pure function of the calls made to it, no
    tensors.

    Running requests come first, in order of arrival, then waiting ones as far as budget, memory and
    `max_requests` allow; the last prompt may get only a chunk of itself into the step. A request is admitted
    with the blocks of all the tokens it has, so only growth by generated tokens can find the pool empty. Then
    the request that arrived last
    is preempted: it gives back its blocks and waits, first in the queue, to be computed again. The request
    that arrived first is never preempted and a request that could not run with the pool to itself is never
    added, hence each step computes at least one token and every request ends.

    `running` and `waiting` are both in order of arrival, and each running request arrived before each waiting
    one. A step costs time in proportion to the running requests, however many wait.
    """

    def __init__(self, pool: BlockPool, *, token_budget: int, max_requests: int, block_size: int) -> None:
        self.pool = pool
        self.token_budget = token_budget
        self.max_requests = max_requests
        self.block_size = block_size
        self.preemptions = 0
        self._running: OrderedDict[int, RequestState] = OrderedDict()
        self._waiting: OrderedDict[int, RequestState] = OrderedDict()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def running(self) -> Iterator[RequestState]:
        return iter(self._running.values())

    def waiting(self) -> Iterator[RequestState]:
        return iter(self._waiting.values())

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def fits(self, num_tokens: int) -> bool:
        """Whether a request that comes to hold so many computed tokens can run, at least by itself."""
        return self.blocks_for(num_tokens) <= self.pool.num_blocks

    def add(self, state: RequestState) -> None:
        """Queue a request. The caller has refused what never `fits`, and numbers requests as they arrive."""
        assert self.fits(len(state.tokens)) and state.pending > 0 and not state.blocks, state
        assert not self._waiting or state.number > next(reversed(self._waiting)), state
        self._waiting[state.number] = state

    def remove(self, state: RequestState) -> None:
        """End a request, running or waiting: it is scheduled no more and its blocks are free."""
        assert not state.finished, state
        (self._running if state.number in self._running else self._waiting).pop(state.number)
        self._give_back(state)
        state.finished = True

    def schedule(self) -> StepPlan:
        """Decide the next step. `advance` every share of it before the next call."""
        shares: list[Share] = []
        preempted: list[RequestState] = []
        budget = self.token_budget
        # A copy, since making room shortens the running requests from the end; those then have no blocks.
        for state in list(self._running.values()):
            if budget == 0 or not state.blocks or not self._make_room(state, preempted):
                break
            budget -= self._take(state, budget, shares)
        while budget and (admitted := self._admit()):
            budget -= self._take(admitted, budget, shares)
        assert shares or not self.has_work, "requests wait and none can be scheduled"
        return StepPlan(shares=tuple(shares), preempted=tuple(preempted))

    def advance(self, share: Share, token: int | None = None) -> None:
        """The step has computed this share and, where the share samples, generated `token`."""
        state = share.state
        assert not state.finished and state.computed == share.start, share
        assert share.samples == (token is not None), share
        state.computed += share.num_tokens
        if token is not None:
            state.tokens.append(token)

    def preempt_all(self) -> None:
        """Forget all keys and values: every running request waits, in order, to be computed again."""
        while self._running:
            self._preempt_youngest()

    def check(self) -> None:
        """Assert the invariants of the queues and of the pool."""
        running, waiting = list(self._running.values()), list(self._waiting.values())
        numbers = [state.number for state in running + waiting]
        assert numbers == sorted(set(numbers)), "not in order of arrival"
        assert len(running) <= self.max_requests, len(running)
        for state in running:
            least, most = self.blocks_for(state.computed), self.blocks_for(len(state.tokens))
            assert least <= len(state.blocks) <= most, state
        for state in waiting:
            assert not state.blocks and state.computed == 0, state
        for state in running + waiting:
            assert not state.finished and state.pending > 0, state
        self.pool.check(state.blocks for state in running)

    def _take(self, state: RequestState, budget: int, shares: list[Share]) -> int:
        pending = state.pending
        num_tokens = min(pending, budget)
        shares.append(Share(state, state.computed, num_tokens, num_tokens == pending))
        return num_tokens

    def _make_room(self, state: RequestState, preempted: list[RequestState]) -> bool:
        """Get the blocks of all known tokens of a running request; False: it had to give way itself."""
        needed = self.blocks_for(len(state.tokens)) - len(state.blocks)
        while needed > self.pool.num_free:
            victim = self._preempt_youngest()
            preempted.append(victim)
            if victim is state:
                return False
        if needed:
            state.blocks.extend(self.pool.allocate(needed))
        return True

    def _admit(self) -> RequestState | None:
        """Start the request that waits first, if there is memory for it; nobody overtakes it."""
        if not self._waiting or len(self._running) == self.max_requests:
            return None
        state = next(iter(self._waiting.values()))
        needed = self.blocks_for(len(state.tokens))
        # Half a block of growth is left to each running request, or the newcomer would soon be preempted
        # again: of 200 requests (prompts log-uniform in 8-512, outputs in 8-256; pools of 60, 150 and 400
        # blocks of 16 slots) this computes 8, 12 and 16 % fewer tokens, for 0.4, 1.3 and 2.1 % more steps.
        if needed + len(self._running) // 2 > self.pool.num_free:
            return None
        del self._waiting[state.number]
        self._running[state.number] = state
        state.blocks.extend(self.pool.allocate(needed))
        return state

    def _preempt_youngest(self) -> RequestState:
        number, state = self._running.popitem()
        self._give_back(state)
        state.computed = 0
        self._waiting[number] = state
        self._waiting.move_to_end(number, last=False)
        self.preemptions += 1
        return state

    def _give_back(self, state: RequestState) -> None:
        self.pool.release(state.blocks)
        state.blocks = array("i")
