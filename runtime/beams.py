"""Beam search for one request: which beams go on, which have ended and how well, as `generate` decides it.

The arithmetic is that of transformers 5.24 in its order and its dtype, float32, for a batch of this request alone:
equal scores are told apart by the same `topk` over tensors of the same shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from torch.torch_version import TorchVersion

from selective_compile.runtime.philox import uniform
from selective_compile.runtime.processors import RowProcessors

# What transformers takes off the score of what must not be chosen.
FAR = -1.0e9
# Whether it goes on with the best of those that it has drawn, and not with the first.
BEST_FIRST = TorchVersion(transformers.__version__) >= TorchVersion("5.24.0.dev0")


@dataclass(frozen=True, kw_only=True)
class BeamParams:
    """What a request asks of its beams.

    Attributes:
        num_beams, num_return_sequences, length_penalty, early_stopping, do_sample: as in `GenerationConfig`.
        max_new_tokens: that of the configuration, which the best score is estimated from.
        num_eos: how many end-of-sequence ids there are.
        processors: run on the rows of all beams at once, as there; None: there are none.
        criteria: a StoppingCriteriaList, which says of every candidate whether it has ended.
        keeps_scores, keeps_logits: of each step [num_beams, V].
        keeps_logprobs: of each token of a hypothesis, under the model's own distribution.
        keeps_beams: of each step the tokens that its beams have generated.
    """

    num_beams: int
    num_return_sequences: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    do_sample: bool
    max_new_tokens: int
    num_eos: int
    processors: RowProcessors | None
    criteria: Any
    keeps_scores: bool
    keeps_logits: bool
    keeps_logprobs: bool = False
    keeps_beams: bool = False

    @property
    def num_candidates(self) -> int:
        """Enough for as many beams as before to go on, if all that can end do."""
        return max(2, 1 + self.num_eos) * self.num_beams


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """A sequence that a search ended with.

    Attributes:
        tokens: those that were generated.
        score: the sum of their log probabilities, over their number to the power of the length penalty.
        beam_indices: for each token, from which beam of the step before it went on.
        logprobs: of each token under the model's own distribution; None unless asked for.
    """

    tokens: tuple[int, ...]
    score: float
    beam_indices: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class BeamResult:
    """How a search ended: the best hypotheses, the best first, and what was kept of its steps.

    Attributes:
        scores, logits: of each step [num_beams, V].
        beams: before each step, and after the last, the tokens that its beams have generated [num_beams, steps].
    """

    hypotheses: tuple[Hypothesis, ...]
    scores: tuple[Tensor, ...] | None
    logits: tuple[Tensor, ...] | None
    beams: tuple[Tensor, ...] | None


@dataclass(frozen=True, kw_only=True)
class Moves:
    """The next step's beams: the one that each goes on from, and the token that it goes on with."""

    parents: list[int]
    tokens: list[int]


@dataclass(kw_only=True)
class _Beams:
    """N sequences of one length, or of many; the lists are of each, `scores` is [1, N] float32.

    `logprobs` is empty for each where nobody asked for them.
    """

    tokens: list[Tensor]
    paths: list[Tensor]
    logprobs: list[Tensor]
    scores: Tensor

    def at(self, places: Tensor, scores: Tensor) -> _Beams:
        chosen = places[0].tolist()
        return _Beams(
            tokens=[self.tokens[place] for place in chosen],
            paths=[self.paths[place] for place in chosen],
            logprobs=[self.logprobs[place] for place in chosen],
            scores=scores.gather(1, places),
        )


@dataclass(kw_only=True)
class _Kept:
    scores: tuple[Tensor, ...] = ()
    logits: tuple[Tensor, ...] = ()
    beams: tuple[Tensor, ...] = ()


class BeamSearch:
    """The state of one search; `advance` it with the logits of each step until it gives no more moves."""

    def __init__(self, params: BeamParams, prompt: Sequence[int], *, seed: int, device: torch.device) -> None:
        self.params = params
        self._seed = seed
        self._device = device
        self._prompt_length = len(prompt)
        count = params.num_beams
        ids = torch.tensor(list(prompt), dtype=torch.int64, device=device)
        path = torch.empty(0, dtype=torch.int64, device=device)
        # All beams but the first are out of the question at first, or they would all be the same.
        first = torch.full((1, count), FAR, dtype=torch.float32, device=device)
        first[:, 0] = 0.0
        no_logprobs = [torch.empty(0, dtype=torch.float32, device=device)] * count
        self._running = _Beams(tokens=[ids] * count, paths=[path] * count, logprobs=no_logprobs, scores=first)
        none = torch.full((1, count), FAR, dtype=torch.float32, device=device)
        self._ended = _Beams(tokens=[ids] * count, paths=[path] * count, logprobs=no_logprobs, scores=none)
        self._has_ended = torch.zeros(1, count, dtype=torch.bool, device=device)
        self._improves = torch.ones(1, 1, dtype=torch.bool, device=device)
        self._kept = _Kept()

    @torch.no_grad()
    def advance(self, logits: Tensor) -> Moves | None:
        """Choose the next step's beams; None: the search has ended.

        Args:
            logits: [num_beams, V] of the beams in the order of the last moves; of the first step also [1, V].

        Raises:
            Whatever a processor or a criterion raises.
        """
        params = self.params
        logits = logits.float().expand(params.num_beams, -1)
        log_probs = own = logits.log_softmax(dim=-1)
        if params.processors is not None:
            own = log_probs.clone() if params.keeps_logprobs else own  # processors may write in place
            log_probs = params.processors.run(torch.stack(self._running.tokens), log_probs)
        self._keep(logits, log_probs)
        scores, indices = self._candidates((log_probs + self._running.scores[0][:, None]).reshape(1, -1))
        parents, tokens = indices // logits.shape[1], indices % logits.shape[1]
        candidates = _Beams(
            tokens=[torch.cat([self._running.tokens[p], t]) for p, t in _pairs(parents, tokens)],
            paths=[torch.cat([self._running.paths[p], q]) for p, q in _pairs(parents, parents)],
            logprobs=self._grown_logprobs(own, parents, tokens),
            scores=scores,
        )
        kept_scores = self._kept.scores if params.keeps_scores else None
        ends = params.criteria(torch.stack(candidates.tokens), kept_scores)[None]
        unfinished = scores + ends.float() * FAR
        places = unfinished.topk(params.num_beams)[1]
        self._running = candidates.at(places, unfinished)
        self._finish(candidates, ends)
        if self._is_over(ends):
            return None
        chosen = places[0]
        return Moves(parents=parents[0][chosen].tolist(), tokens=tokens[0][chosen].tolist())

    def result(self) -> BeamResult:
        ended = self._ended
        best = [
            Hypothesis(
                tokens=tuple(tokens[self._prompt_length :].tolist()),
                score=score,
                beam_indices=tuple(path.tolist()),
                logprobs=tuple(logprobs.tolist()) if self.params.keeps_logprobs else None,
            )
            for tokens, path, logprobs, score in zip(
                ended.tokens, ended.paths, ended.logprobs, ended.scores[0].tolist(), strict=True
            )
        ]
        return BeamResult(
            hypotheses=tuple(best[: self.params.num_return_sequences]),
            scores=self._kept.scores if self.params.keeps_scores else None,
            logits=self._kept.logits if self.params.keeps_logits else None,
            beams=(*self._kept.beams, self._generated_by_beams()) if self.params.keeps_beams else None,
        )

    @property
    def _generated(self) -> int:
        return len(self._running.paths[0])

    def _generated_by_beams(self) -> Tensor:
        return torch.stack(self._running.tokens)[:, self._prompt_length :]

    def _keep(self, logits: Tensor, log_probs: Tensor) -> None:
        if self.params.keeps_beams:
            self._kept.beams += (self._generated_by_beams(),)
        if self.params.keeps_logits:
            self._kept.logits += (logits.clone(),)
        if self.params.keeps_scores:
            self._kept.scores += (log_probs.clone(),)

    def _grown_logprobs(self, own: Tensor, parents: Tensor, tokens: Tensor) -> list[Tensor]:
        """Of the candidates: those of the beams that they go on from, and of the tokens that they go on with."""
        before = [self._running.logprobs[parent] for parent in parents[0].tolist()]
        if not self.params.keeps_logprobs:
            return before
        return [torch.cat(pair) for pair in zip(before, own[parents[0], tokens[0]].split(1), strict=True)]

    def _candidates(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The candidates' scores and places among all beams' tokens [1, num_beams * V], both [1, num_candidates]."""
        if not self.params.do_sample:
            found = scores.topk(self.params.num_candidates)
            return found.values, found.indices
        # One state of a generator for each seed and step, so that what is drawn depends on nothing else.
        state = int(uniform([self._seed], [self._generated])[0] * 2.0**53)
        generator = torch.Generator(device=self._device).manual_seed(state)
        drawn = torch.multinomial(scores.softmax(dim=-1), self.params.num_candidates, generator=generator)
        values = scores.gather(1, drawn)
        if BEST_FIRST:
            values, order = values.sort(dim=-1, descending=True)
            drawn = drawn.gather(1, order)
        return values, drawn

    def _finish(self, candidates: _Beams, ends: Tensor) -> None:
        """Take up those of the best candidates that ended, as far as they are better than what ended before."""
        params = self.params
        top = torch.arange(params.num_candidates, device=self._device)[None] < params.num_beams
        ended = ends & top
        scores = candidates.scores / (self._generated**params.length_penalty)
        full = self._has_ended.all(dim=-1, keepdim=True) & (params.early_stopping is True)
        scores = scores + full.float() * FAR
        scores = scores + (~self._improves).float() * FAR
        scores = scores + (~ended) * FAR
        both = _Beams(
            tokens=self._ended.tokens + candidates.tokens,
            paths=self._ended.paths + candidates.paths,
            logprobs=self._ended.logprobs + candidates.logprobs,
            scores=torch.cat([self._ended.scores, scores], dim=1),
        )
        places = both.scores.topk(params.num_beams)[1]
        self._has_ended = torch.cat([self._has_ended, ended], dim=1).gather(1, places)
        self._ended = both.at(places, both.scores)

    def _is_over(self, ends: Tensor) -> bool:
        params = self.params
        hopeful = params.early_stopping == "never" and params.length_penalty > 0.0
        length = params.max_new_tokens if hopeful else self._generated
        best = self._running.scores[:, :1] / (length**params.length_penalty)
        worst = torch.where(self._has_ended, self._ended.scores.min(dim=1, keepdim=True)[0], FAR)
        self._improves = self._improves & (best > worst).any(dim=-1, keepdim=True)
        full = bool(self._has_ended.all()) and params.early_stopping is True
        return not bool(self._improves.any()) or full or bool(ends.all())


def _pairs(parents: Tensor, values: Tensor) -> list[tuple[int, Tensor]]:
    return list(zip(parents[0].tolist(), values[0].split(1), strict=True))
