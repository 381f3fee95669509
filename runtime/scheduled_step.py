"""A step that is scheduled: its plan, its requests and its inputs, and the tokens that its logits give."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from selective_compile.runtime.beam_request import RequestSearch
from selective_compile.runtime.device_rows import DeviceRows
from selective_compile.runtime.device_stream import Work
from selective_compile.runtime.plan import Share, StepPlan
from selective_compile.runtime.records import logprobs_of
from selective_compile.runtime.request import Request
from selective_compile.runtime.step_graphs import CapturedInputs
from selective_compile.runtime.verify import Answering, Outcome, answers
from selective_compile.step import StepInputs

NO_DRAFT: Final = array("q")


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A step that has been given to the device.

    Attributes:
        logits: gives them, [R, V] on the device, once `wait` has returned and until another step is launched; None
            where the host has nothing to choose.
        tokens: in the host's memory, which those that the device has chosen come to; there once `wait` has returned.
        places: of the token for each of `DeviceRows.chosen_for`, in `tokens`.
        wait: returns when the step has been computed.
        aside: within, code of the user's is asked about it while the next one is computed; see `DeviceStream.aside`.
    """

    logits: Callable[[], Tensor] | None
    tokens: Tensor = torch.empty(0, dtype=torch.int64, device="cpu")
    places: Sequence[int] = ()
    wait: Work = lambda: None
    aside: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True, kw_only=True)
class ScheduledStep:
    """A step that is about to run.

    Attributes:
        requests: for each of the plan's shares its request, and behind it the samples that start from its prompt.
        rows: from which the device chooses; None: steps do not leave that to it.
        sources: as `flights.Flights.sources`.
        marked: as `ModelRunner.marked`.
    """

    plan: StepPlan
    requests: tuple[tuple[Request, ...], ...]
    inputs: StepInputs | CapturedInputs
    rows: DeviceRows | None = None
    sources: array[int] | None = None
    marked: Sequence[int] | None = None

    @property
    def expected(self) -> bool:
        """Whether the device chooses all of its tokens: what comes next is scheduled as if they were there."""
        return self.rows is not None and self.rows.every

    def sample(self, logits: Tensor, chosen: Mapping[Request, Outcome]) -> list[list[Outcome]]:
        """The tokens of each request of a share that samples; those of searches go to them.

        Args:
            logits: [R, V].
            chosen: what the device has chosen already.
        """
        answering: list[Answering] = []
        asked: list[Request] = []
        searched: dict[Request, RequestSearch] = {}
        end = 0
        for requests, share, rows in zip(self.requests, self.plan.shares, self.plan.rows, strict=True):
            state, _, _, samples, drafted = share
            end += rows
            if state.rows_from is not None:
                _keep_of_prompt(requests, share, logits[end - rows : end])
            if not samples:
                continue
            row, search = end - 1 - drafted, requests[0].search
            if search is not None:
                search.give(state, logits[row])
                searched[requests[0]] = search
            else:
                draft = state.draft[:drafted] if drafted else NO_DRAFT
                asked += requests
                answering += [Answering(each, row, draft) for each in requests if each not in chosen]
        if searched:
            computed = {share.state for share in self.plan.shares if share.samples}
            for search in searched.values():
                search.advance(computed)
        answered = iter(answers(logits, answering, _ends))
        return [[chosen[each]] if each in chosen else next(answered) for each in asked]


def _keep_of_prompt(requests: Sequence[Request], share: Share, rows: Tensor) -> None:
    """Keep what is asked for of the logits of the prompt's tokens, the last of which are those of the share."""
    params = requests[0].params
    if params.prompt_logprobs:
        _score(requests, share, rows)
    if params.prompt_logits:
        first = share.start + share.num_tokens - len(rows)
        # Computed again after a preemption, they are there already.
        skipped = max(0, sum(map(len, requests[0].prompt_logits)) - first)
        fresh = rows[skipped : max(0, share.state.prompt_length - first)]
        if len(fresh):
            fresh = fresh.float().clone()
            for request in requests:
                request.prompt_logits.append(fresh)


def _score(requests: Sequence[Request], share: Share, rows: Tensor) -> None:
    """Keep the log probabilities of a prompt's tokens, each given by the row of the token before it."""
    state = share.state
    first = share.start + share.num_tokens - len(rows) + 1
    # Computed again after a preemption, they are known already.
    skipped = (state.rows_from or 0) + 1 + len(requests[0].prompt_logprobs) - first
    tokens = state.tokens[first + skipped : min(first + len(rows), state.prompt_length)].tolist()
    if tokens:
        found = logprobs_of(rows[skipped : skipped + len(tokens)], tokens)
        for request in requests:
            request.prompt_logprobs += found


def _ends(request: Request, generated: int, outcome: Outcome) -> bool:
    """Whether a request that had generated so many tokens ends with this one."""
    return request.reason_to_end(generated, *outcome) is not None
