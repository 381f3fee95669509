"""Drawing tokens: temperature, top-k, top-p and min-p over all sampled rows of a step, and one draw for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selective_compile.runtime.generation import GenerationParams
from selective_compile.runtime.philox import uniform


def draw(
    scores: Tensor, params: Sequence[GenerationParams], indices: Sequence[int], *, whole: bool
) -> list[int | None]:
    """Sample each of S rows [S, V]; None where no token is left.

    Sums are running sums in float64 over the candidates in order of token id: terms of 0 leave them as they are, so
    that how many candidates there are, which depends on the other rows, does not show in any row's result.

    Args:
        scores: written to.
        indices: for each row, how many tokens its request has generated before this one.
        whole: False: every row has a top_k, and only that many candidates of each are looked at. True: `scores` come
            to hold all processed scores.
    """
    device = scores.device
    temperatures = [wanted.temperature for wanted in params]
    if any(temperature != 1.0 for temperature in temperatures):
        scores.div_(_column(temperatures, torch.float32, device))
    filtered, vocabulary = scores, None
    top_k = [wanted.top_k for wanted in params]
    if not whole:
        filtered, vocabulary = _keep_top_k(scores, top_k)
    elif any(top_k):
        _remove_below_top_k(scores, top_k)
    if any(wanted.top_p < 1.0 for wanted in params):
        _remove_above_top_p(filtered, [wanted.top_p for wanted in params])
    if any(wanted.min_p > 0.0 for wanted in params):
        _remove_below_min_p(filtered, [wanted.min_p for wanted in params])
    return _choose(filtered, vocabulary, uniform([wanted.seed for wanted in params], indices).tolist())


def _choose(scores: Tensor, vocabulary: Tensor | None, fractions: list[float]) -> list[int | None]:
    cumulative = _weights(scores).cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    # The first place where the running sum exceeds the drawn share of the total has a weight above 0.
    threshold = _column(fractions, torch.float64, scores.device) * total
    chosen = torch.searchsorted(cumulative, threshold, right=True)
    # Rounded, the product may reach the total; then it is the place where the sum gets there.
    last = torch.searchsorted(cumulative, total).clamp_(max=scores.shape[1] - 1)
    chosen = torch.minimum(chosen, last)
    if vocabulary is not None:
        chosen = vocabulary.gather(1, chosen)
    # Not a number where the likeliest token has -inf or where a score is none.
    possible = (total > 0)[:, 0].tolist()
    return [token if fine else None for token, fine in zip(chosen[:, 0].tolist(), possible, strict=True)]


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
    return scores.masked_fill_(scores < limits, -torch.inf), vocabulary


def _remove_below_top_k(scores: Tensor, top_k: Sequence[int]) -> None:
    """As `_keep_top_k`, in place over the whole vocabulary; 0 keeps all."""
    kept = [min(k, scores.shape[1]) or scores.shape[1] for k in top_k]
    most = max((k for k in kept if k < scores.shape[1]), default=0)
    if most:
        places = [min(k, most) - 1 for k in kept]
        limits = scores.topk(most, dim=-1).values.gather(1, _column(places, torch.int64, scores.device))
        everything = _column([k == scores.shape[1] for k in kept], torch.bool, scores.device)
        scores.masked_fill_((scores < limits) & ~everything, -torch.inf)


def _remove_above_top_p(scores: Tensor, top_p: Sequence[float]) -> None:
    """Scores [S, C] become -inf outside of the smallest set of the likeliest tokens that has probability `top_p`.

    As `TopPLogitsWarper`; the likeliest always stays. Where equal scores straddle the limit, as many of them stay as
    there, but which of them is left to an unstable sort there; here it is those with the larger token ids.
    """
    ascending, order = scores.sort(dim=-1, stable=True)
    cumulative = _weights(ascending).cumsum(dim=-1)
    # Compared in float32, as transformers does: its rounding decides where probabilities are equal by construction.
    limits = _column([1 - p for p in top_p], torch.float32, scores.device)
    removed = (cumulative / cumulative[:, -1:]).float() <= limits
    removed[:, -1] = False
    removed &= _column([p < 1.0 for p in top_p], torch.bool, scores.device)
    scores.masked_fill_(torch.empty_like(removed).scatter_(1, order, removed), -torch.inf)


def _remove_below_min_p(scores: Tensor, min_p: Sequence[float]) -> None:
    """As `MinPLogitsWarper`: tokens less likely than that share of the likeliest token's probability."""
    scores.masked_fill_(_weights(scores) < _column(min_p, torch.float64, scores.device), -torch.inf)


def _weights(scores: Tensor) -> Tensor:
    """exp(scores - largest of the row) in float64: the probabilities but for a factor."""
    scores = scores.double()
    return (scores - scores.amax(dim=-1, keepdim=True)).exp()


def _column(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """[S, 1], to broadcast along rows."""
    return torch.tensor(values, dtype=dtype, device=device)[:, None]
