"""The tokens of a step: one for each request that has a row of logits, and more for one whose draft is right."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from selective_compile.runtime.records import TokenRecord
from selective_compile.runtime.request import Request
from selective_compile.runtime.sampler import plain, sample

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
    found = [[outcome] for outcome in _sampled(logits, answering, 0)] if answering else []
    left = [place for place, (_, _, draft) in enumerate(answering) if draft]
    step = 0
    while left := [place for place in left if _goes_on(answering[place], found[place][step], step, ends)]:
        step += 1
        asked = [answering[place] for place in left]
        for place, outcome in zip(left, _sampled(logits, asked, step), strict=True):
            found[place].append(outcome)
    return found


def _sampled(logits: Tensor, answering: Sequence[Answering], step: int) -> list[Outcome]:
    """The token of each that comes after so many of its draft, which are right."""
    rows = [one.row + step for one in answering]
    params = [one.request.params for one in answering]
    simple = all(map(plain, params))
    sampled = sample(
        _of_rows(logits, rows),
        params,
        () if simple else [one.request.state.generated + step for one in answering],
        () if simple else [_history(one, step) for one in answering],
        scratch=True,  # each row is for one token
    )
    return list(zip(sampled.tokens, sampled.records, strict=True))


def _of_rows(logits: Tensor, rows: Sequence[int]) -> Tensor:
    if rows != list(range(len(rows))):
        return logits[rows]
    return logits if len(rows) == logits.shape[0] else logits[: len(rows)]


def _goes_on(one: Answering, outcome: Outcome, step: int, ends: Callable[[Request, int, Outcome], bool]) -> bool:
    """Whether the token is that of the draft, and the request wants another one."""
    request, _, draft = one
    right = step < len(draft) and draft[step] == outcome[0]
    return right and not ends(request, request.state.generated + step, outcome)


def _history(one: Answering, step: int) -> array[int]:
    tokens = one.request.state.history
    return tokens + array("q", one.draft[:step]) if step and not one.request.params.plain else tokens


def failed(outcome: Outcome) -> bool:
    """Whether it is the error of one of the request's own processors or criteria, in place of a token."""
    return outcome[1] is not None and outcome[1].error is not None
