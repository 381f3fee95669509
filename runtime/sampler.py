"""The sampler: one token for each row of logits; every row is processed and chosen as its own request asks.

The draw for a token depends on its row of logits, the request's tokens and seed, and the token's index in the request,
and on nothing else: not on the batch around it, nor on how the prompt was chunked or the request preempted.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor

from selective_compile.kernels.largest_cpu import largest
from selective_compile.runtime.criteria import RowCriteria
from selective_compile.runtime.draw import NUCLEUS, draw, draw_of_few, draw_of_nucleus
from selective_compile.runtime.generation import GenerationParams
from selective_compile.runtime.grammar import NONE_LEFT, mask
from selective_compile.runtime.own_code import Failed, attempt
from selective_compile.runtime.penalties import penalise
from selective_compile.runtime.records import TokenRecord, recorded

Draw = Callable[[Tensor, Sequence[GenerationParams], Sequence[int]], list[int | None]]
plain = attrgetter("plain")
NO_TOKEN_LEFT = "no token can be drawn: its scores hold a NaN or are infinite"


@dataclass(frozen=True, kw_only=True)
class SampledTokens:
    """One entry a row; the record is None for a request that asks for nothing but tokens."""

    tokens: list[int]
    records: list[TokenRecord | None]


def sample(
    logits: Tensor,
    params: Sequence[GenerationParams],
    indices: Sequence[int],
    histories: Sequence[array[int]] = (),
    *,
    scratch: bool = False,
) -> SampledTokens:
    """Choose a token for each row.

    Args:
        logits: [R, V], any floating dtype and device; computed with as float32, as `generate` does.
        params: of the request that each row belongs to.
        indices: for each row, how many tokens its request has generated before this one.
        histories: for each row, its request's tokens so far, the prompt included; may be left out where no request
            has processors, criteria, penalties or bans.
        scratch: the logits may be written to.
    """
    if all(map(plain, params)):
        return SampledTokens(tokens=largest(logits), records=[None] * len(params))
    scratch = scratch or logits.dtype != torch.float32
    logits = logits.float()
    rows = [row for row, wanted in enumerate(params) if not wanted.plain]
    whole = len(rows) == len(params) and (
        not any(wanted.changes_scores for wanted in params)
        or (scratch and not any(wanted.logprobs or wanted.output_logits for wanted in params))
    )
    chosen = _Chosen(
        # A copy, where what follows writes to it.
        scores=logits if whole else logits.clone() if len(rows) == len(params) else logits[rows],
        params=[params[row] for row in rows],
        indices=[indices[row] for row in rows],
        histories=[histories[row] for row in rows] if histories else [],
    )
    found = chosen.tokens()
    tokens = found if len(rows) == len(params) else largest(logits)
    records: list[TokenRecord | None] = [None] * len(params)
    for place, row in enumerate(rows):
        tokens[row] = found[place]
        records[row] = chosen.record(place, found[place], logits, row)
    return SampledTokens(tokens=tokens, records=records)


def asked_to_stop(
    criteria: RowCriteria, history: Sequence[int], token: int, scores: Tensor | None = None
) -> TokenRecord | None:
    """What a request's criteria say of its token; None: it goes on."""
    asked = attempt("stopping criteria", partial(criteria, history, token, scores))
    if isinstance(asked, Failed):
        return TokenRecord(error=asked.error)
    return None if asked.result is None else TokenRecord(stop=asked.result)


class _Chosen:
    """The rows that are not plainly greedy: S of them, with scores [S, V] that become the processed ones."""

    def __init__(
        self,
        *,
        scores: Tensor,
        params: Sequence[GenerationParams],
        indices: Sequence[int],
        histories: Sequence[array[int]],
    ) -> None:
        self._scores = scores
        self._params = params
        self._indices = indices
        self._histories = histories
        self._errors: dict[int, str] = {}

    def tokens(self) -> list[int]:
        """Process and choose; what stands at a place with an error is no token."""
        self._run_processors()
        penalise(self._scores, self._params, self._histories)
        self._follow_grammars()
        drawn = [place for place, wanted in enumerate(self._params) if wanted.do_sample]
        tokens = [0] * len(self._params) if len(drawn) == len(self._params) else largest(self._scores)
        groups: dict[Draw, list[int]] = {}
        for place in drawn:
            groups.setdefault(self._way(place), []).append(place)
        for way, places in groups.items():
            self._draw(way, places, tokens)
        self._refuse_the_impossible(tokens)
        return tokens

    def record(self, place: int, token: int, logits: Tensor, row: int) -> TokenRecord | None:
        wanted = self._params[place]
        if place in self._errors:
            return TokenRecord(error=self._errors[place])
        if not wanted.recorded and wanted.criteria is None:
            return None
        scores = self._scores[place] if self._keeps_scores(place) else None
        stopped = None
        if wanted.criteria is not None:
            copied = None if scores is None else scores.clone()
            stopped = asked_to_stop(wanted.criteria, self._histories[place], token, copied)
        if not wanted.recorded or (stopped is not None and stopped.error is not None):
            return stopped
        return recorded(wanted, token, logits[row], scores, None if stopped is None else stopped.stop)

    def _run_processors(self) -> None:
        for place, wanted in enumerate(self._params):
            if wanted.processors is not None:
                row = self._scores[place : place + 1]
                asked = attempt("logits processors", partial(wanted.processors, self._histories[place], row))
                if isinstance(asked, Failed):
                    self._errors[place] = asked.error
                else:
                    self._scores[place] = asked.result[0]

    def _follow_grammars(self) -> None:
        # A request that has failed already is not asked for more.
        grammars = [None if place in self._errors else each.grammar for place, each in enumerate(self._params)]
        self._errors |= mask(self._scores, grammars, self._histories)

    def _refuse_the_impossible(self, tokens: Sequence[int]) -> None:
        """A grammar and other options may have left no token; then a greedy one stands for that, with -inf."""
        places = [place for place, wanted in enumerate(self._params) if wanted.grammar and not wanted.do_sample]
        if places:
            found = self._scores[places, [tokens[place] for place in places]].tolist()
            for place, score in zip(places, found, strict=True):
                if score == -math.inf:
                    self._errors.setdefault(place, NONE_LEFT)

    def _way(self, place: int) -> Draw:
        """Depends on nothing but the row: the ways agree in what they draw, but for the last bits of sums."""
        wanted = self._params[place]
        if self._keeps_scores(place):
            return draw
        if wanted.top_k:
            return draw_of_few
        return draw_of_nucleus if wanted.top_p < 1.0 and self._scores.shape[1] > NUCLEUS else draw

    def _draw(self, way: Draw, places: Sequence[int], tokens: list[int]) -> None:
        every = len(places) == len(self._params)
        scores = self._scores if every else self._scores[list(places)]
        found = way(scores, [self._params[place] for place in places], [self._indices[place] for place in places])
        if not every and way is draw:
            self._scores[list(places)] = scores
        for place, token in zip(places, found, strict=True):
            if token is None:
                self._errors.setdefault(place, NONE_LEFT if self._params[place].grammar else NO_TOKEN_LEFT)
            else:
                tokens[place] = token

    def _keeps_scores(self, place: int) -> bool:
        return self._params[place].keeps_scores
