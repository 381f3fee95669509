"""The requests of an engine, running and waiting: how they come, fork, give way and go, and what they hold."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from selective_compile.options import WaitingOrder
from selective_compile.runtime.request_blocks import RequestBlocks
from selective_compile.runtime.request_state import NOT_CLEAR, RequestState
from selective_compile.runtime.waiting import GENERATED_TOKEN, waiting_queue


class Queues:
    """Who runs, in the order of admission, and who waits, in their own (`selective_compile.runtime.waiting`).

    A request is admitted with the blocks of all the tokens it has, so only growth by generated tokens can find the
    pool empty. Then the request that was admitted last is preempted: it gives back its blocks and waits to be computed
    again. The one that was admitted first is never preempted, and a request that could not run with the pool to itself
    is never added, hence every request ends. One that has grown into the model's long form gives back its blocks, too,
    once. Nobody overtakes the request that waits first, whatever it takes to admit it.

    A request of a `width` above 1 has room for as many of the places of `max_requests`: once its prompt is computed,
    `fork` lets others go on from there. They share its blocks, and each copies the last one when it first writes to
    it. With a `group` they stay together: admitted, preempted and removed all at once, and served in step, in that
    one that has no pending token waits for the others (`rearrange`). Without, each goes its own way from there.
    """

    def __init__(
        self,
        blocks: RequestBlocks,
        *,
        token_budget: int,
        max_requests: int,
        block_size: int,
        order: WaitingOrder,
        marks_prefill: bool,
    ) -> None:
        """
        Args:
            marks_prefill: whether to know of those that run whose prompt is yet to be computed.
        """
        self.blocks = blocks
        self.token_budget = token_budget
        self.max_requests = max_requests
        self.block_size = block_size
        self.order = order
        self.preemptions = 0
        self.tokens_reused = 0
        self.tokens_admitted = 0
        self._running: OrderedDict[int, RequestState] = OrderedDict()  # in order of admission
        self._waiting = waiting_queue(order, self.running)
        self._marks_prefill = marks_prefill
        self._prefilling: dict[int, RequestState] = {}  # of the running ones
        self._places = 0  # of max_requests, taken by the running requests

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
        return iter(self._waiting)

    def fits_together(self, num_tokens: int, count: int) -> bool:
        """Whether so many requests of such a length can run side by side, whatever they share."""
        return count <= self.max_requests and self.blocks.fits_together(num_tokens, count)

    def add(self, state: RequestState) -> None:
        """Queue a request. The caller has refused what never `fits`, and numbers requests as they arrive."""
        assert self.blocks.fits(state.final_length) and state.pending > 0 and not state.tables, state
        assert state.width == 1 or self.fits_together(state.final_length, state.width), state
        self._waiting.add(state)

    def remove(self, state: RequestState) -> None:
        """End a request, running or waiting: it is scheduled no more and its blocks are free."""
        assert not state.finished, state
        members = state.members
        for member in members:
            member.settle()
        if members[0].number in self._running:
            for member in members:
                del self._running[member.number]
                self._give_back(member)
        else:
            self._waiting.remove(members[0])
        for member in members:
            member.finished = True

    def narrow(self, state: RequestState) -> None:
        """One fewer is to go on from a request that has not forked: its place and blocks are free."""
        assert state.width > 1 and state.group is None, state
        if state.number in self._running:
            self._places -= 1
            self.blocks.narrow(state)
        else:
            state.width -= 1

    def fork(self, parent: RequestState, children: Sequence[RequestState], *, together: bool = False) -> None:
        """Let others run, from what a running request has computed and in the places that it was admitted with.

        Args:
            children: new states, their tokens those that `parent` has computed and more of their own; numbered next
                after it. Fewer than it has room for give up the places of the rest.
            together: they and the parent are a `group` from now on; `rearrange` is to follow at once.
        """
        assert len(children) < parent.width and parent.number in self._running, parent
        self._places -= parent.width - 1 - len(children)
        self.blocks.fork(parent, children, copies_last=not together)
        every = (parent, *children)
        parent.clear_until = NOT_CLEAR
        for child in children:
            child.charged = parent.computed
        if together:
            for state in every:
                state.group = every
        running = list(self._running.items())
        place = running.index((parent.number, parent)) + 1
        running[place:place] = [(child.number, child) for child in children]
        self._running = OrderedDict(running)

    def rearrange(self, group: Sequence[RequestState], parents: Sequence[int], tokens: Sequence[int]) -> None:
        """Each of a group goes on from the one at the place that `parents` has for it, with one more token.

        All of them are computed to their ends. Blocks that nobody goes on from are free.
        """
        assert all(state.pending == 0 and not state.shares_last for state in group), group
        known = [state.tokens for state in group]
        self.blocks.rearrange(group, parents)
        for state, parent, token in zip(group, parents, tokens, strict=True):
            state.tokens = array("q", known[parent])
            state.tokens.append(token)

    def settle(self) -> None:
        """Steps that were on their way are given up: what they were to give is expected no more."""
        for state in (*self.running(), *self.waiting()):
            for member in state.members:
                member.settle()

    def forget(self) -> None:
        """What the pool holds is not to be used any more. Nobody runs, or would go on from what is forgotten."""
        assert not self._running
        self.blocks.forget()

    def preempt_all(self) -> None:
        """Forget all keys and values: every running request waits, in order, to be computed again."""
        while self._running:
            self._preempt_last()
        self.forget()

    def check(self) -> None:
        """Assert the invariants of the queues and of the pool."""
        running, waiting = list(self._running.values()), list(self._waiting)
        states = running + sorted(waiting, key=lambda state: state.number)
        assert len({state.number for state in states}) == len(states) == len(running) + self.num_waiting, states
        numbers = [state.number for state in states if not (state.began_anew or state.outgrown)]
        assert self.order != "first_come" or numbers == sorted(numbers), "not in order of arrival"
        assert self._places == sum(state.width for state in running) <= self.max_requests, self._places
        for state in running:
            assert all(member.number in self._running for member in state.members), "a part of a group runs"
        for state in waiting:
            assert all(not member.tables and member.computed == 0 for member in state.members), state
        for state in running + waiting:
            assert not state.finished and any(member.pending > 0 for member in state.members), state
            clear = state.computed <= state.clear_until
            assert not clear or (state.pending == 1 and not state.group and not state.shares_last), state
            assert not clear or state.clear_until <= len(state.blocks) * self.block_size, state
        assert self._prefilling.keys() <= self._running.keys(), "prefilling without running"
        self.blocks.check(running)

    def _admit(self, budget: int) -> RequestState | None:
        """Start the request that waits first, if there is memory for it, and budget for its least share.

        Nobody overtakes it.
        """
        state = self._waiting.first()
        if state is None or state.least_at_once > budget:
            return None
        if self._places + sum(member.width for member in state.members) > self.max_requests:
            return None
        for member in state.members:
            if member.outgrown:
                member.choose_form()
        if not self.blocks.admit(state, num_running=len(self._running)):
            return None
        # At no time in neither: whoever runs or waits has an account.
        for member in state.members:
            self._running[member.number] = member
            self._places += member.width
            self._count_reuse(member)
            if self._marks_prefill:
                self._prefilling[member.number] = member
        self._waiting.remove(state)
        return state

    def _make_room(self, state: RequestState, end: int, preempted: list[RequestState]) -> bool:
        """Get the blocks of the next tokens of a running request, up to `end`; False: it had to give way itself.

        Of a group at once, before any of it has a share: else a part of it might be preempted with the share.
        """
        while not self._cover(state, end):
            victim = self._preempt_last()
            preempted.append(victim)
            if victim is state.members[0]:
                return False
        return True

    def _cover(self, state: RequestState, end: int) -> bool:
        if state.group is None:
            return self.blocks.cover(state, end)
        ends = [(member, member.computed + min(member.pending, self.token_budget)) for member in state.group]
        return all(self.blocks.cover(member, most) for member, most in ends)

    def _preempt_last(self) -> RequestState:
        return self._preempt(next(reversed(self._running.values())).members[0])

    def _preempt(self, leader: RequestState) -> RequestState:
        for member in leader.members:
            del self._running[member.number]
            self._give_back(member)
            member.computed = 0
        self._waiting.add(leader)
        self.preemptions += 1
        return leader

    def _give_back(self, state: RequestState) -> None:
        self._charge_generated(state)
        state.clear_until = NOT_CLEAR
        self.blocks.release(state)
        self._places -= state.width
        state.draft = array("q")
        self._prefilling.pop(state.number, None)

    def _count_reuse(self, state: RequestState) -> None:
        found = state.computed
        state.reused += found
        self.tokens_reused += found
        self.tokens_admitted += len(state.tokens)
        if self.order == "fair":
            # Once for each token, however often it is computed again; what was found costs nobody anything.
            self._waiting.charge(state, max(0, len(state.tokens) - max(state.charged, found)))
            state.charged = len(state.tokens)

    def _charge_generated(self, state: RequestState) -> None:
        """Called once for each block and not for each token: it would be a third of a step's cost."""
        known = len(state.tokens) - state.unknown
        if self.order == "fair" and state.charged < known:
            self._waiting.charge(state, GENERATED_TOKEN * (known - state.charged))
            state.charged = known
