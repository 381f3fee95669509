"""Drafts for the requests of an engine: who asks for them, and what is proposed before each step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial

from selective_compile.runtime.assistants import Assistant, Assistants
from selective_compile.runtime.drafts import Drafts, PromptLookup
from selective_compile.runtime.own_code import Failed, attempt
from selective_compile.runtime.request import Request
from selective_compile.runtime.request_state import RequestState
from selective_compile.runtime.scheduler import Scheduler

Wanted = dict[Assistant, list[tuple[RequestState, Drafts, int]]]


class Drafting:
    """The drafts of all requests that ask for them. The engine calls it under its guard, but for `propose`."""

    def __init__(
        self,
        scheduler: Scheduler,
        assistants: Assistants,
        guard: AbstractContextManager[object],
        *,
        vocab_size: int,
        allowed: bool,
    ) -> None:
        """
        Args:
            guard: of the scheduler's state, free while an assistant's model runs.
            allowed: whether the model can verify drafts; otherwise those who ask for them do without.
        """
        self._scheduler = scheduler
        self._assistants = assistants
        self._guard = guard
        self._vocab_size = vocab_size
        self._allowed = allowed
        self._drafts: dict[int, tuple[RequestState, Drafts]] = {}  # by number

    @property
    def wanted(self) -> bool:
        """Whether any request asks for drafts, which go by the tokens before them."""
        return bool(self._drafts)

    def enter(self, request: Request) -> None:
        drafts = self._drafts_of(request)
        if drafts is not None and self._allowed:
            self._drafts[request.state.number] = request.state, drafts

    def leave(self, request: Request) -> None:
        self._drafts.pop(request.state.number, None)

    def pass_on(self, request: Request, heir: Request) -> None:
        """The state of a request that has generated nothing yet is another's now, whose own goes with the request."""
        self.leave(request)
        self.leave(heir)
        self.enter(heir)

    def observe(self, state: RequestState, tokens: Sequence[int]) -> None:
        """These tokens came since the last proposal."""
        if state.number in self._drafts:
            self._drafts[state.number][1].observe(tokens)

    def propose(self) -> None:
        """Give drafts to the requests that ask for them and are to compute their last token next."""
        if not self._drafts:
            return
        with self._guard:
            running = self._scheduler.num_running
            worth = self._scheduler.pace.steps.worth_of_a_row(running) if running else 0.0
            asked = self._look_up(worth, self._scheduler.pace.steps.predict(running) or math.inf)
        for assistant, wanted in asked.items():
            # Without the guard: nobody but a step changes the tokens of a request.
            asked_for = [(state.history, count, state.terms.cache_salt) for state, _, count in wanted]
            proposed = attempt("drafting", partial(assistant.propose, asked_for))
            with self._guard:
                if isinstance(proposed, Failed):  # its requests do without from now on
                    for state, _, _ in wanted:
                        self._drafts.pop(state.number, None)
                    continue
                for (state, drafts, _), tokens in zip(wanted, proposed.result, strict=True):
                    if state.tables:
                        state.propose(drafts.take(tokens, worth))

    def _look_up(self, worth: float, step: float) -> Wanted:
        """Take drafts of the requests' own drafters; what the assistants are to be asked for.

        Args:
            worth: what a row of the next step costs, as a share of what each has cost.
            step: seconds that it is going to take.
        """
        asked: Wanted = {}
        for state, drafts in self._drafts.values():
            drafter = drafts.drafter
            if not (state.tables and state.generated and state.pending == 1):
                continue
            if isinstance(drafter, Assistant):
                count = drafts.wanted(state.generated, worth + drafter.seconds_per_token / step)
                asked.setdefault(drafter, []).append((state, drafts, min(count, state.final_length)))
            else:
                state.propose(drafts.take(drafter.propose(state.history, drafts.most), worth))
        return asked

    def _drafts_of(self, request: Request) -> Drafts | None:
        params = request.params
        if params.assistant is not None:
            assistant = self._assistants.of(params.assistant, self._vocab_size)
            return Drafts(assistant, most=params.assistant_tokens)
        if params.lookup_tokens:
            return Drafts(PromptLookup(ngram_size=params.lookup_ngram), most=params.lookup_tokens)
        return None
