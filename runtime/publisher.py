"""What becomes of the tokens of a step: requests get them, go on from them, or end with them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from selective_compile.runtime.beam_request import RequestSearch
from selective_compile.runtime.drafting import Drafting
from selective_compile.runtime.model_runner import ModelRunner
from selective_compile.runtime.outbox import Outbox
from selective_compile.runtime.plan import Share
from selective_compile.runtime.recording import Recording
from selective_compile.runtime.records import TokenRecord
from selective_compile.runtime.request import Request
from selective_compile.runtime.request_result import FinishReason
from selective_compile.runtime.request_state import RequestState, unknown_id
from selective_compile.runtime.roster import Roster
from selective_compile.runtime.scheduled_step import ScheduledStep
from selective_compile.runtime.scheduler import Scheduler
from selective_compile.runtime.step_log import StepLog
from selective_compile.runtime.verify import Outcome, failed

# A request, its token, what it keeps of that, and why it ends with it, if it does.
Handed = tuple[Request, int, TokenRecord | None, FinishReason | None]


class Publisher:
    """Tells the scheduler and the requests what a step came to. The engine calls it under its guard."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        *,
        roster: Roster,
        drafting: Drafting,
        outbox: Outbox,
        log: StepLog,
        recording: Recording,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._roster = roster
        self._drafting = drafting
        self._outbox = outbox
        self._log = log
        self._recording = recording

    def publish(self, step: ScheduledStep, sampled: list[list[Outcome]]) -> None:
        """Hand out the tokens; requests that are done leave, with their blocks."""
        outcomes = iter(sampled)
        searched: dict[Request, RequestSearch] = {}
        self._log.steps += 1
        self._log.tokens_computed += step.plan.num_tokens
        answered: list[tuple[Request, int, Outcome]] = []
        forks: list[list[RequestState]] = []
        for share, requests in zip(step.plan.shares, step.requests, strict=True):
            state, search, before = share.state, requests[0].search, share.state.generated
            found = [next(outcomes) for _ in requests] if share.samples and search is None else []
            # Where one was cancelled while the model ran, the next of its samples has its place.
            left = [place for place, each in enumerate(requests) if not each.finished]
            if left:
                self._advance(share, found[left[0]] if found else [])
                if found and state.width > 1:
                    forks.append(self._fork([(requests[place], found[place][0][0]) for place in left]))
                if search is not None and share.samples and search.ready:
                    searched[requests[0]] = search
            for each, own in zip(requests, found, strict=False):
                answered += [(each, before + place, outcome) for place, outcome in enumerate(own)]
        # Now that all are known to have computed what they have: the slots of others are not to be taken.
        for states in forks:
            self._runner.go_on_from(states, [states[0]] * len(states))
        for request, search in searched.items():
            self._go_on(request, search)
        ends = self._answer(answered)
        self._recording.computed(step.plan, [outcome[0] for _, _, outcome in answered], ends)

    def expect(self, step: ScheduledStep) -> None:
        """The step is on its way: what comes next is scheduled as if its tokens were there."""
        for share in step.plan.shares:
            self._scheduler.expect(share)

    def land(self, step: ScheduledStep, outcomes: Mapping[Request, Outcome]) -> None:
        """As `publish`, for a step that was expected: requests that have ended meanwhile get nothing of it."""
        assert step.rows is not None
        self._log.steps += 1
        self._log.tokens_computed += step.plan.num_tokens
        answered: list[tuple[Request, int, Outcome]] = []
        for request, generated in step.rows.chosen_for:
            if not request.finished:
                outcome = outcomes[request]
                if not failed(outcome):
                    request.state.learn(outcome[0])
                    self._drafting.observe(request.state, [outcome[0]])
                answered.append((request, generated, outcome))
        self._answer(answered)

    def _advance(self, share: Share, found: Sequence[Outcome]) -> None:
        tokens = [token for token, _ in found]
        if share.drafted:
            self._scheduler.verified(share, tokens)
        elif share.state.width > 1 or not any(map(failed, found)):  # whose request fails is not computed any more
            self._scheduler.advance(share, tokens[0] if tokens else None)
        if tokens:
            self._drafting.observe(share.state, tokens)

    def _go_on(self, request: Request, search: RequestSearch) -> None:
        """Move the beams of a search as it was decided, or end it."""
        state = request.state
        if search.moves is None:
            self._roster.leave(request)
            if search.error is not None:
                self._outbox.put(request.finish, "error", search.error)
            else:
                result = search.result()
                tokens = result.hypotheses[0].tokens
                self._log.tokens_generated += len(tokens)
                stopped = len(tokens) < request.params.max_new_tokens or tokens[-1] in request.params.eos_token_ids
                self._outbox.put(request.publish_search, result, "stop" if stopped else "length")
            return
        parents = [state.members[parent] for parent in search.moves.parents] if state.group else None
        if parents is None:
            parents = [state] * search.params.num_beams
            self._scheduler.fork(state, search.others, together=True)
        self._scheduler.rearrange(state.members, search.moves.parents, search.moves.tokens)
        self._runner.go_on_from(state.members, parents)

    def _fork(self, samples: Sequence[tuple[Request, int]]) -> list[RequestState]:
        """Those that are left of the samples of a prompt go on from that of the first, each with its token."""
        (first, _), *others = samples
        self._roster.requests.take_unforked(first.state)
        for other, token in others:
            other.state.tokens.append(token)
            other.start()
        children = [other.state for other, _ in others]
        self._scheduler.fork(first.state, children)
        return [first.state, *children]

    def _answer(self, answered: Sequence[tuple[Request, int, Outcome]]) -> list[FinishReason | None]:
        """Why each request, that has generated so many tokens, ends with this one, or had ended while the model ran."""
        ends: list[FinishReason | None] = []
        handed: list[Handed] = []
        try:
            for request, generated, (token, record) in answered:
                reason = request.finish_reason
                if reason is None:
                    reason = request.reason_to_end(generated, token, record)
                    if reason is not None:
                        self._roster.leave(request)
                    if reason == "error" and not failed((token, record)):
                        record = TokenRecord(error=unknown_id(token, request.state.known_ids))
                    handed.append((request, token, record, reason))
                ends.append(reason)
        finally:  # whoever has left gets its reason, also where the step is interrupted
            self._log.tokens_generated += sum([reason != "error" for _, _, _, reason in handed])
            self._outbox.put(hand_out, handed)
        return ends


def hand_out(tokens: Sequence[Handed]) -> None:
    """Each request gets its token, and its reason to end, or the error that it has in place of a token."""
    moment = time.perf_counter()
    for request, token, record, reason in tokens:
        if reason == "error":
            assert record is not None, request
            request.finish("error", record.error)
        else:
            request.publish(token, record, reason, moment)
