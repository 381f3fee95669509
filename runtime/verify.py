"""The tokens of a step: one for each request that has a row of logits, and more for one whose draft is right."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from selective_compile.runtime.records import TokenRecord
from selective_compile.runtime.request import Request
from selective_compile.runtime.sampler import sample

Outcome = tuple[int, TokenRecord | None]


class Answering(NamedTuple):
    """A request whose token, or tokens, a step gives: from `row` on, one row for the last token and each of `draft`."""

    request: Request
    row: int
    draft: Sequence[int]


def answers(
    logits: Tensor, answering: Sequence[Answering], ends: Callable[[Request, int, Outcome], bool]
) -> list[list[Outcome]]:
    """What comes of each: at least one token, and no more than its draft has and one.

    Every token is chosen as if the one before it had been computed alone, so that processors and criteria that keep a
    state are called for the tokens of the request in turn, and for no others.

    Args:
        logits: [R, V].
        ends: whether a request ends with this token, having generated so many before it.
    """
    found: list[list[Outcome]] = [[] for _ in answering]
    left = list(range(len(answering)))
    step = 0
    while left:
        rows = [answering[place].row + step for place in left]
        requests = [answering[place].request for place in left]
        sampled = sample(
            logits[: len(rows)] if rows == list(range(len(rows))) else logits[rows],
            [request.params for request in requests],
            [request.state.generated + step for request in requests],
            [_history(answering[place], step) for place in left],
            scratch=True,  # each row is for one token
        )
        going = []
        for place, outcome in zip(left, zip(sampled.tokens, sampled.records, strict=True), strict=True):
            request, _, draft = answering[place]
            found[place].append(outcome)
            right = step < len(draft) and draft[step] == outcome[0]
            if right and not ends(request, request.state.generated + step, outcome):
                going.append(place)
        left = going
        step += 1
    return found


def _history(one: Answering, step: int) -> array[int]:
    tokens = one.request.state.history
    return tokens + array("q", one.draft[:step]) if step and not one.request.params.plain else tokens


def failed(outcome: Outcome) -> bool:
    """Whether it is the error of one of the request's own processors or criteria, in place of a token."""
    return outcome[1] is not None and outcome[1].error is not None
