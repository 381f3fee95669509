"""The scheduler: which requests are in the next step, with how many tokens each, and who gives up memory."""

from __future__ import annotations

import math
from array import array
from collections.abc import Container, Mapping, Sequence
from functools import partial

from selective_compile.options import Batching, EngineConfig, SchedulerPolicy, WaitingOrder
from selective_compile.runtime.block_pool import BlockPool
from selective_compile.runtime.pace import Pace
from selective_compile.runtime.plan import Draft, Share, StepPlan
from selective_compile.runtime.queues import Queues
from selective_compile.runtime.request_blocks import RequestBlocks
from selective_compile.runtime.request_state import NOT_CLEAR, RequestState
from selective_compile.step import Reach

WHOLE = Reach()
# Where prompts have steps of their own, those that decode have one after so many of them.
PREFILL_STEPS = 4


class Scheduler(Queues):
    """Chooses each step's tokens within one budget; a pure function of the calls made to it, no tensors, no clock.

    What steps and copies took it is told by way of its `pace`.

    Running requests come first, in the order in which they were admitted; then waiting ones, as far as budget, memory
    and `max_requests` allow; the last prompt may get only a chunk of itself into the step. Each step computes at least
    one token, since what was admitted first always can be (`Queues`).

    Under "guaranteed_no_evict", and in static batches, a request is admitted only when its blocks and those that
    all running requests may still come to need are free: then nobody is ever preempted.

    A block counts as computed, and is shared (`selective_compile.runtime.request_blocks`), from the plan on whose
    step fills it: a step writes all its keys and values before any request reads them. Whoever gives up such a step
    calls `forget`.

    A step costs time in proportion to the running requests, however many wait.
    """

    def __init__(
        self,
        pool: BlockPool,
        *others: tuple[BlockPool, Reach],
        token_budget: int,
        max_requests: int,
        block_size: int,
        block_reuse: bool = True,
        policy: SchedulerPolicy = "max_utilization",
        order: WaitingOrder = "first_come",
        batching: Batching = "inflight_fused",
        prefill_slowdown: float | None = None,
        reach: Reach = WHOLE,
        host_slots: int = 0,
    ) -> None:
        """
        Args:
            pool: of the attention calls that see farthest, which is `reach`.
            others: of those that see less far.
            host_slots: of the host tier, for each pool; what is there is kept by the names that `block_reuse` gives.
        """
        self.guarantees = policy == "guaranteed_no_evict" or batching == "static"
        self.batching = batching
        self.pool = pool
        self.pace = Pace(
            token_budget=token_budget,
            max_requests=max_requests,
            block_size=block_size,
            prefill_slowdown=prefill_slowdown if batching == "inflight_fused" else None,
        )
        blocks = RequestBlocks(
            ((pool, reach), *others),
            token_budget=token_budget,
            block_size=block_size,
            reuse=block_reuse,
            guarantees=self.guarantees,
            host_slots=host_slots,
            copying_pays=self.pace.copying_pays,
        )
        sizes = {"token_budget": token_budget, "max_requests": max_requests, "block_size": block_size}
        super().__init__(blocks, **sizes, order=order, marks_prefill=batching != "inflight_fused")
        self._prefill_steps = 0  # of prompts alone, since those that decode had a step
        self._batch = 0  # places that were taken by the static batch

    @classmethod
    def configured(
        cls, config: EngineConfig, pools: Mapping[Reach, int], *, block_reuse: bool, host_slots: int
    ) -> Scheduler:
        """As an engine has it; `pools`: how many blocks there are for each reach, the farthest first."""
        (reach, first), *others = pools.items()
        return cls(
            BlockPool(first),
            *((BlockPool(blocks), other) for other, blocks in others),
            reach=reach,
            token_budget=config.token_budget,
            max_requests=config.max_requests,
            block_size=config.block_size,
            block_reuse=block_reuse,
            policy=config.scheduler_policy,
            order=config.waiting_order,
            batching=config.batching,
            prefill_slowdown=config.prefill_slowdown,
            host_slots=host_slots,
        )

    @property
    def _ends_are_on_their_way(self) -> bool:
        return bool(self._running) and all(state.awaits_its_last for state in self.running())

    def schedule(self, now: float = 0.0) -> StepPlan:
        """Decide the next step. `advance` every share of it before the next call.

        Args:
            now: the time, on the clock that deadlines are given on.
        """
        draft = Draft(budget=self.token_budget, prefill=self._prefill_budget())
        self._refuse_late(now, draft)
        self._fill(draft)
        if draft.outgrown and not draft.shares:  # nobody else ran: they begin anew in this step
            self._fill(draft)
        assert draft.shares or self._ends_are_on_their_way or not self.has_work, "requests wait and none is scheduled"
        static = self.batching == "static" and bool(self._running)
        empty = self._batch - self._places if static else 0
        return draft.plan(copies=self.blocks.take_copies() if draft.shares else (), empty_slots=empty)

    def _fill(self, draft: Draft) -> None:
        if self.batching == "inflight_fused":
            self._continue(draft)
            self._admit_within_budget(draft)
        else:
            self._alternate(draft)

    def advance(self, share: Share, token: int | None = None) -> None:
        """The step has computed this share and, where the share samples, generated `token`.

        One of a group has its token from `rearrange`, and so has one that is forked into a group.
        """
        state, start, num_tokens, samples, _ = share
        assert not state.finished and state.computed == start and (samples or token is None), share
        state.computed = start + num_tokens
        if token is not None:
            state.tokens.append(token)

    def expect(self, share: Share) -> None:
        """As `advance` for a step that is on its way: the token, where the share samples, is `learned` later."""
        state = share.state
        self.advance(share)
        if share.samples:
            state.expect()
            if state.awaits_its_last:
                state.clear_until = NOT_CLEAR

    def verified(self, share: Share, tokens: Sequence[int]) -> None:
        """As `advance` for a share with a draft: the tokens that it gave, of which all but the last were drafted."""
        state, start, num_tokens, _, drafted = share
        assert 1 <= len(tokens) <= drafted + 1 and not state.finished and state.computed == start, share
        assert all(token == drafted for token, drafted in zip(tokens[:-1], state.draft, strict=False)), share
        state.tokens.extend(tokens)
        state.computed = start + num_tokens - drafted + len(tokens) - 1
        state.draft = array("q")
        self.blocks.cut(state)

    def _refuse_late(self, now: float, draft: Draft) -> None:
        """Of the earliest deadline first: those that cannot end in time leave, before they cost anything."""
        if self.order != "deadline":
            return
        while (state := self._waiting.first()) is not None and state.terms.deadline != math.inf:
            # While nobody runs, an estimate that was once too large would stay so: then only the clock refuses.
            needed = self.pace.seconds_needed(state, len(self._running)) if self._running else 0.0
            # Whoever was preempted has begun, and is not to lose what it has.
            if state.generated or now + needed <= state.terms.deadline:
                break
            self.remove(state)
            draft.refused.append(state)

    def _prefill_budget(self) -> int:
        if not self.pace.bounds_prefill:
            return self.token_budget
        # Who awaits its last token gets no share, so that a step of prompts alone is beside nobody.
        decoding = sum(
            state.pending > 0 and not (state.in_prefill or state.awaits_its_last) for state in self._running.values()
        )
        return self.pace.prefill_budget(decoding)

    def _continue(self, draft: Draft, but: Container[int] = ()) -> None:
        """Shares for the running requests: one token where the last step generated one, else a chunk.

        Args:
            but: numbers of those that get none.
        """
        budget = draft.budget
        take, share = draft.shares.append, partial(tuple.__new__, Share)
        # A copy, since making room shortens the running requests from the end; those then have no blocks.
        running = list(self._running.values())
        if but:
            running = [state for state in running if state.number not in but]
        for place, state in enumerate(running):
            start = state.computed
            # Most requests, at most steps: one token in the midst of a block, or the first of the next one. By itself
            # this halves a step's cost.
            if budget and (start < state.clear_until or (start == state.clear_until and self._next_block(state))):
                take(share((state, start, 1, True, 0)))
                budget -= 1
                continue
            if budget == 0:
                break
            if not state.tables:  # it gave way
                continue
            if draft.prefill or not state.in_prefill:
                draft.budget = budget
                # Nobody is left without a token for the sake of another's draft.
                if not self._take(state, draft, most_drafted=budget - (len(running) - place)):
                    break
                budget = draft.budget
        draft.budget = budget

    def _next_block(self, state: RequestState) -> bool:
        """Get a block for a request that has filled the one that it decoded in; False: there is none to be had."""
        if state.outgrown or not self.blocks.cover(state, state.computed + 1):
            return False
        self._charge_generated(state)
        state.clear_until = min(state.clear_until + self.block_size, state.long_beyond)
        return True

    def _admit_to(self, draft: Draft) -> RequestState | None:
        state = self._admit(draft.budget)
        if state is not None:
            draft.admitted.append(state)
        return state

    def _admit_within_budget(self, draft: Draft) -> None:
        # Whoever has just been preempted may need less than it gave back, its first blocks being shared: it would
        # come and go at every step.
        while draft.budget and draft.prefill and not draft.preempted and (state := self._admit_to(draft)):
            self._take(state, draft)

    def _alternate(self, draft: Draft) -> None:
        """Prompts or those that decode: prompts first, but however many come, the others are not kept waiting."""
        # A static batch takes nobody in, whom the others could be kept waiting by.
        decoding = self.batching == "inflight" and len(self._running) > len(self._prefilling)
        if decoding and self._prefill_steps >= PREFILL_STEPS:
            self._prefill_steps = 0
            self._continue(draft, but=self._prefilling)
            if draft.shares:
                return
        self._prefill(draft)
        self._prefill_steps = self._prefill_steps + 1 if draft.shares and decoding else 0
        if not draft.shares:
            self._continue(draft)

    def _prefill(self, draft: Draft) -> None:
        """Shares for prompts, and none for those that decode; prompts come first."""
        if self.batching == "static" and not self._running:
            while self._admit_to(draft):
                pass
            self._batch = self._places
        for state in list(self._prefilling.values()):
            if draft.budget and state.tables:
                self._take(state, draft)
        if self.batching == "inflight":
            self._admit_within_budget(draft)

    def _take(self, state: RequestState, draft: Draft, most_drafted: int = 0) -> bool:
        """As much of a running request as budget allows; False: it had to give way itself."""
        start, pending = state.computed, len(state.tokens) - state.computed
        if not pending or state.awaits_its_last:
            return True  # until the others of its group are as far, or it ends
        if state.outgrown:
            draft.outgrown.append(self._preempt(state.members[0]))
            return True
        in_prefill = pending > 1 or start < state.prompt_length
        num_tokens = 1
        if in_prefill:
            num_tokens = max(state.least_at_once, min(state.most_at_once, draft.budget, draft.prefill))
        if num_tokens > draft.budget:
            return True  # until there is room for all of it
        if self.order == "fair":
            self._charge_generated(state)
        if not self._make_room(state, start + num_tokens, draft.preempted):
            return False
        # In front of the end of a prefix the last token would see what was drafted.
        drafts = bool(state.draft) and start + 1 >= state.prefix
        drafted = self._room_for_draft(state, start + num_tokens, most_drafted) if drafts else 0
        if in_prefill:
            draft.prefill = max(0, draft.prefill - num_tokens)
        elif state.group is None:
            state.clear_until = min(start - start % self.block_size + self.block_size, state.long_beyond)
        draft.budget -= num_tokens + drafted
        draft.shares.append(Share(state, start, num_tokens + drafted, num_tokens == pending, drafted))
        if num_tokens == pending and self._prefilling:
            self._prefilling.pop(state.number, None)
        if num_tokens > 1:
            self.blocks.filled(state, start + num_tokens)
        return True

    def _room_for_draft(self, state: RequestState, end: int, most: int) -> int:
        """How much of a request's draft can be computed, with the blocks for it taken; nobody is preempted for it."""
        if state.pending != 1 or most <= 0:
            return 0
        most = min(most, len(state.draft), state.long_beyond - end)
        drafted = self.blocks.room_for_draft(state, most, num_running=len(self._running))
        covered = self.blocks.cover(state, end + drafted)
        assert covered, state
        return drafted
