"""The sampler: one token for each row of logits; every row is processed and chosen as its own request asks.

The draw for a token depends on its row of logits, the request's tokens and seed, and the token's index in the request,
and on nothing else: not on the batch around it, nor on how the prompt was chunked or the request preempted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from selective_compile.runtime.draw import draw
from selective_compile.runtime.generation import GenerationParams
from selective_compile.runtime.own_code import Failed, attempt
from selective_compile.runtime.penalties import penalise
from selective_compile.runtime.records import TokenRecord, recorded

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
    histories: Sequence[Sequence[int]] = (),
) -> SampledTokens:
    """Choose a token for each row.

    Args:
        logits: [R, V], any floating dtype and device; computed with as float32, as `generate` does.
        params: of the request that each row belongs to.
        indices: for each row, how many tokens its request has generated before this one.
        histories: for each row, its request's tokens so far, the prompt included; may be left out where no request
            has processors, criteria, penalties or bans.
    """
    logits = logits.float()
    if all(wanted.plain for wanted in params):
        return SampledTokens(tokens=logits.argmax(dim=-1).tolist(), records=[None] * len(params))
    rows = [row for row, wanted in enumerate(params) if not wanted.plain]
    chosen = _Chosen(
        scores=logits[rows],  # a copy, which what follows may write to
        params=[params[row] for row in rows],
        indices=[indices[row] for row in rows],
        histories=[histories[row] for row in rows] if histories else [],
    )
    found = chosen.tokens()
    tokens = found if len(rows) == len(params) else logits.argmax(dim=-1).tolist()
    records: list[TokenRecord | None] = [None] * len(params)
    for place, row in enumerate(rows):
        tokens[row] = found[place]
        records[row] = chosen.record(place, found[place], logits[row])
    return SampledTokens(tokens=tokens, records=records)


class _Chosen:
    """The rows that are not plainly greedy: S of them, with scores [S, V] that become the processed ones."""

    def __init__(
        self,
        *,
        scores: Tensor,
        params: Sequence[GenerationParams],
        indices: Sequence[int],
        histories: Sequence[Sequence[int]],
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
        drawn = [place for place, wanted in enumerate(self._params) if wanted.do_sample]
        tokens = [0] * len(self._params) if len(drawn) == len(self._params) else self._scores.argmax(dim=-1).tolist()
        # Two groups, because rows without top-k, and those whose scores are kept, have the whole vocabulary to sort
        # and sum up.
        narrow = [place for place in drawn if self._params[place].top_k and not self._keeps_scores(place)]
        wide = [place for place in drawn if not self._params[place].top_k or self._keeps_scores(place)]
        for places, keep in ((narrow, False), (wide, True)):
            if places:
                self._draw(places, tokens, keep)
        return tokens

    def record(self, place: int, token: int, logits: Tensor) -> TokenRecord | None:
        wanted = self._params[place]
        if place in self._errors:
            return TokenRecord(error=self._errors[place])
        scores = self._scores[place] if self._keeps_scores(place) else None
        stop = None
        if wanted.criteria is not None:
            copied = None if scores is None else scores.clone()
            ask = partial(wanted.criteria, self._histories[place], token, copied, logits.device)
            asked = attempt("stopping criteria", ask)
            if isinstance(asked, Failed):
                return TokenRecord(error=asked.error)
            stop = asked.result
        if not wanted.recorded and stop is None:
            return None
        return recorded(wanted, token, logits, scores, stop)

    def _run_processors(self) -> None:
        for place, wanted in enumerate(self._params):
            if wanted.processors is not None:
                row = self._scores[place : place + 1]
                asked = attempt("logits processors", partial(wanted.processors, self._histories[place], row))
                if isinstance(asked, Failed):
                    self._errors[place] = asked.error
                else:
                    self._scores[place] = asked.result[0]

    def _draw(self, places: Sequence[int], tokens: list[int], keep: bool) -> None:
        every = len(places) == len(self._params)
        scores = self._scores if every else self._scores[list(places)]
        wanted = [self._params[place] for place in places]
        found = draw(scores, wanted, [self._indices[place] for place in places], whole=keep)
        if keep and not every and any(self._keeps_scores(place) for place in places):
            self._scores[list(places)] = scores
        for place, token in zip(places, found, strict=True):
            if token is None:
                self._errors.setdefault(place, NO_TOKEN_LEFT)
            else:
                tokens[place] = token

    def _keeps_scores(self, place: int) -> bool:
        return self._params[place].output_scores or self._params[place].processed_logprobs
