"""The sampler: one token for each row of logits, greedy and sampled rows side by side.

The draw for a token depends on its row of logits, the request's seed and the token's index in the request,
and on
nothing else: not on the batch around it, nor on how the prompt was chunked or the request preempted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selective_compile.runtime.generation import GenerationParams
from selective_compile.runtime.philox import uniform


@dataclass(frozen=True, kw_only=True)
class SampledTokens:
    """One entry a row; `logprobs` is 0 for rows whose request did not ask for it.

    A token is None where one was to be drawn from logits that hold a NaN or are infinite: they are no distribution.
    """

    tokens: list[int | None]
    logprobs: list[float]


def sample(logits: Tensor, params: Sequence[GenerationParams], indices: Sequence[int]) -> SampledTokens:
    """Choose a token for each row.

    Args:
        logits: [R, V], any floating dtype and device; computed with as float32, as `generate` does.
        params: of the request that each row belongs to.
        indices: for each row, how many tokens its request has generated before this one.
    """
    logits = logits.float()
    tokens = logits.argmax(dim=-1)
    wanting = [row for row, wanted in enumerate(params) if wanted.do_sample]
    drawn = [row for row, sound in zip(wanting, _distributions(logits, wanting), strict=True) if sound]
    # Two groups, because rows without top-k have the whole vocabulary to sort and sum up.
    narrow = [row for row in drawn if params[row].top_k]
    wide = [row for row in drawn if not params[row].top_k]
    for rows in (narrow, wide):
        if rows:
            where = torch.tensor(rows, device=logits.device)
            wanted = [params[row] for row in rows]
            tokens[where] = _draw(logits[where], wanted, [indices[row] for row in rows])
    chosen: list[int | None] = tokens.tolist()
    for row in set(wanting) - set(drawn):
        chosen[row] = None
    return SampledTokens(tokens=chosen, logprobs=_logprobs(logits, tokens, params))


def _distributions(logits: Tensor, rows: Sequence[int]) -> list[bool]:
    """For each of the rows, whether its logits are a distribution; the largest of them is a NaN if any is."""
    return logits[torch.tensor(rows, device=logits.device)].amax(dim=-1).isfinite().tolist() if rows else []


def _draw(logits: Tensor, params: Sequence[GenerationParams], indices: Sequence[int]) -> Tensor:
    """Sample each of S rows [S, V]; either all or none of them have a top_k. Gives [S] int64.

    Sums are running sums in float64 over the candidates in a fixed order: terms of 0 leave them as they are,
    so the number of candidates, which is that of the widest row of the group, does not show in any row's
    result.
    """
    device = logits.device
    scores = logits / _column([wanted.temperature for wanted in params], torch.float32, device)
    vocabulary = None
    if params[0].top_k:
        scores, vocabulary = _keep_top_k(scores, [wanted.top_k for wanted in params])
    if any(wanted.top_p < 1.0 for wanted in params):
        scores = _keep_top_p(scores, [wanted.top_p for wanted in params])
    cumulative = _weights(scores).cumsum(dim=-1)
    fractions = uniform([wanted.seed for wanted in params], indices)
    # The first place where the running sum exceeds the drawn share of the total has a weight above 0.
    threshold = torch.from_numpy(fractions)[:, None].to(device) * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, threshold, right=True)
    # Rounded, the product may reach the total; then it is the place where the sum gets there.
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    chosen = torch.minimum(chosen, last)
    return (chosen if vocabulary is None else vocabulary.gather(1, chosen))[:, 0]


def _keep_top_k(scores: Tensor, top_k: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The candidates of each row, in order of token id: scores [S, C] and token ids [S, C].

    As `TopKLogitsWarper`: whatever is not less than the k-th largest score stays, ties of it included.
    """
    kept = [min(k, scores.shape[1]) for k in top_k]
    # One more than asked for shows whether ties reach further; only then all scores are compared.
    largest, vocabulary = scores.topk(min(max(kept) + 1, scores.shape[1]), dim=-1)
    limits = largest.gather(1, _column(kept, torch.int64, scores.device) - 1)
    if (largest[:, -1:] >= limits).any():
        vocabulary = scores.topk(int((scores >= limits).sum(dim=-1).max()), dim=-1).indices
    vocabulary = vocabulary.sort(dim=-1).values
    scores = scores.gather(1, vocabulary)
    return scores.masked_fill(scores < limits, -torch.inf), vocabulary


def _keep_top_p(scores: Tensor, top_p: Sequence[float]) -> Tensor:
    """Scores [S, C] with -inf outside of the smallest set of the likeliest tokens that has probability
    `top_p`.

    As `TopPLogitsWarper`; the likeliest always stays. Where equal scores straddle the limit, as many of them
    stay as there, but which of them is left to an unstable sort there; here it is those with the larger token
    ids.
    """
    ascending, order = scores.sort(dim=-1, stable=True)
    cumulative = _weights(ascending).cumsum(dim=-1)
    # Compared in float32, as transformers does: its rounding decides where probabilities are equal by
    # construction.
    limits = _column([1 - p for p in top_p], torch.float32, scores.device)
    removed = (cumulative / cumulative[:, -1:]).float() <= limits
    removed[:, -1] = False
    return scores.masked_fill(torch.empty_like(removed).scatter_(1, order, removed), -torch.inf)


def _weights(scores: Tensor) -> Tensor:
    """exp(scores - largest of the row) in float64: the probabilities but for a factor."""
    scores = scores.double()
    return (scores - scores.amax(dim=-1, keepdim=True)).exp()


def _logprobs(logits: Tensor, tokens: Tensor, params: Sequence[GenerationParams]) -> list[float]:
    """Under the model's own distribution, of the rows that ask for it."""
    logprobs = [0.0] * len(params)
    rows = [row for row, wanted in enumerate(params) if wanted.logprobs]
    if rows:
        where = torch.tensor(rows, device=logits.device)
        chosen = logits[where].log_softmax(dim=-1).gather(1, tokens[where, None])[:, 0]
        for row, value in zip(rows, chosen.tolist(), strict=True):
            logprobs[row] = value
    return logprobs


def _column(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """[S, 1], to broadcast along rows."""
    return torch.tensor(values, dtype=dtype, device=device)[:, None]
