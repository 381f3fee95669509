"""Drawing tokens: temperature, top-k, top-p and min-p over all sampled rows of a step, and one draw for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selective_compile.kernels import draw_cpu
from selective_compile.runtime.generation import GenerationParams
from selective_compile.runtime.philox import uniform

# Candidates that are looked at before a row's whole vocabulary is sorted for its top_p: for 64 rows of 32,000 scores
# with top_p 0.9 on one core, sorting took 210 ms, this 48.
NUCLEUS: Final = 1024
# Scores whose largest one stands for all of them where the k largest of a row are looked for: of 64 rows of 32,000 the
# 51 largest then come out of 51 * 64 candidates in place of 32,000, a fifth of the time on one core.
GROUP: Final = 64


def draw(scores: Tensor, params: Sequence[GenerationParams], indices: Sequence[int]) -> list[int | None]:
    """Sample each of S rows [S, V], which come to hold the processed scores; None where no token is left.

    Sums are running sums in float64 over the candidates in order of token id: terms of 0 leave them as they are, so
    that how many candidates there are, which depends on the other rows, does not show in any row's result.

    Args:
        scores: written to.
        indices: for each row, how many tokens its request has generated before this one.
    """
    _scale(scores, params)
    top_k = [wanted.top_k for wanted in params]
    if any(top_k):
        _remove_below_top_k(scores, top_k)
    _remove_above_top_p(scores, params, 0.0)
    _remove_below_min_p(scores, params)
    return _choose(scores, None, _fractions(params, indices, scores.device))


def draw_of_few(scores: Tensor, params: Sequence[GenerationParams], indices: Sequence[int]) -> list[int | None]:
    """As `draw` for rows that all have a top_k, looking at that many candidates of each; `scores` stays as it is."""
    fractions = _fractions(params, indices, scores.device)
    found = draw_cpu.draw_tokens(scores, [wanted.warping for wanted in params], fractions)
    if found is not None:
        return [None if token < 0 else token for token in found]
    candidates, vocabulary = _keep_top_k(scores, params)
    _remove_above_top_p(candidates, params, 0.0)
    _remove_below_min_p(candidates, params)
    return _choose(candidates, vocabulary, fractions)


def draw_of_nucleus(scores: Tensor, params: Sequence[GenerationParams], indices: Sequence[int]) -> list[int | None]:
    """As `draw` for rows that all have a top_p and no top_k, without sorting those that few tokens are enough for.

    Args:
        scores: written to.
    """
    _scale(scores, params)
    total = _weights(scores).cumsum(dim=-1)[:, -1:]
    vocabulary = scores.topk(min(NUCLEUS, scores.shape[1]), dim=-1).indices.sort(dim=-1).values
    candidates = scores.gather(1, vocabulary)
    least = candidates.amin(dim=-1)
    _remove_above_top_p(candidates, params, total - _weights(candidates).cumsum(dim=-1)[:, -1:])
    # Where the least of the candidates goes, and with it all that are as likely, so does what is no candidate.
    enough = (candidates.masked_fill(candidates == -torch.inf, torch.inf).amin(dim=-1) > least).tolist()
    _remove_below_min_p(candidates, params)
    found = _choose(candidates, vocabulary, _fractions(params, indices, scores.device))
    rest = [row for row, fine in enumerate(enough) if not fine]
    if rest:
        plain = [replace(params[row], temperature=1.0) for row in rest]  # scaled already
        for row, token in zip(rest, draw(scores[rest], plain, [indices[row] for row in rest]), strict=True):
            found[row] = token
    return found


def _scale(scores: Tensor, params: Sequence[GenerationParams]) -> None:
    temperatures = [wanted.temperature for wanted in params]
    if any(temperature != 1.0 for temperature in temperatures):
        scores.div_(_column(temperatures, torch.float32, scores.device))


def _fractions(params: Sequence[GenerationParams], indices: Sequence[int], device: torch.device) -> NDArray[np.float64]:
    seeds = [wanted.seed for wanted in params]
    found = draw_cpu.uniform(seeds, indices) if device.type == "cpu" else None
    return uniform(seeds, indices) if found is None else found


def _choose(scores: Tensor, vocabulary: Tensor | None, fractions: NDArray[np.float64]) -> list[int | None]:
    cumulative = _weights(scores).cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    # The first place where the running sum exceeds the drawn share of the total has a weight above 0.
    threshold = torch.from_numpy(fractions).to(scores.device)[:, None] * total
    chosen = torch.searchsorted(cumulative, threshold, right=True)
    # Rounded, the product may reach the total; then it is the place where the sum gets there.
    last = torch.searchsorted(cumulative, total).clamp_(max=scores.shape[1] - 1)
    chosen = torch.minimum(chosen, last)
    if vocabulary is not None:
        chosen = vocabulary.gather(1, chosen)
    # Not a number where the likeliest token has -inf or where a score is none.
    possible = (total > 0)[:, 0].tolist()
    return [token if fine else None for token, fine in zip(chosen[:, 0].tolist(), possible, strict=True)]


def _keep_top_k(scores: Tensor, params: Sequence[GenerationParams]) -> tuple[Tensor, Tensor]:
    """The candidates of each row, in order of token id: scores [S, C], scaled by the temperature, and token ids [S, C].

    As `TopKLogitsWarper`: whatever is not less than the k-th largest scaled score stays, ties of it included.
    """
    kept = [min(wanted.top_k, scores.shape[1]) for wanted in params]
    # Scaling keeps the order, so only candidates are scaled. One more than asked for shows whether ties reach further,
    # also those that scaling makes; only then all scores are compared.
    largest, vocabulary = _topk(scores, min(max(kept) + 1, scores.shape[1]))
    _scale(largest, params)
    limits = largest.gather(1, _column(kept, torch.int64, scores.device) - 1)
    # Where fewer than asked for are possible at all, the limit is -inf, and no tie with it matters.
    if ((largest[:, -1:] >= limits) & (limits > -torch.inf)).any():
        scaled = scores.clone()
        _scale(scaled, params)
        count = max(int(((scaled >= limits) & (limits > -torch.inf)).sum(dim=-1).max()), largest.shape[1])
        largest, vocabulary = scaled.topk(count, dim=-1)
    order = vocabulary.argsort(dim=-1)
    candidates = largest.gather(1, order)
    return candidates.masked_fill_(candidates < limits, -torch.inf), vocabulary.gather(1, order)


def _topk(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As `topk` along rows, but that which of the scores equal to the least of them are among them is open.

    The `count` largest are in the `count` groups with the largest maxima: a score elsewhere is at most that of its own
    group, and so at most those of all these.
    """
    groups = scores.shape[1] // GROUP
    if count >= groups // 2:
        found = scores.topk(count, dim=-1)
        return found.values, found.indices
    whole = groups * GROUP
    maxima = scores[:, :whole].unflatten(1, (groups, GROUP)).amax(dim=-1)
    chosen = maxima.topk(count, dim=-1).indices
    places = (chosen[..., None] * GROUP + torch.arange(GROUP, device=scores.device)).flatten(1)
    rest = torch.arange(whole, scores.shape[1], device=scores.device).expand(len(scores), -1)
    places = torch.cat([places, rest], dim=1)
    found = scores.gather(1, places).topk(count, dim=-1)
    return found.values, places.gather(1, found.indices)


def _remove_below_top_k(scores: Tensor, top_k: Sequence[int]) -> None:
    """As `_keep_top_k`, in place over the whole vocabulary; 0 keeps all."""
    kept = [min(k, scores.shape[1]) or scores.shape[1] for k in top_k]
    most = max((k for k in kept if k < scores.shape[1]), default=0)
    if most:
        places = [min(k, most) - 1 for k in kept]
        limits = scores.topk(most, dim=-1).values.gather(1, _column(places, torch.int64, scores.device))
        everything = _column([k == scores.shape[1] for k in kept], torch.bool, scores.device)
        scores.masked_fill_((scores < limits) & ~everything, -torch.inf)


def _remove_above_top_p(scores: Tensor, params: Sequence[GenerationParams], rest: Tensor | float) -> None:
    """Scores [S, C] become -inf outside of the smallest set of the likeliest tokens that has probability `top_p`.

    As `TopPLogitsWarper`; the likeliest always stays. Where equal scores straddle the limit, as many of them stay as
    there, but which of them is left to an unstable sort there; here it is those with the larger token ids.

    Args:
        rest: the weight of tokens that are less likely and not among the scores, for each row [S, 1].
    """
    top_p = [wanted.top_p for wanted in params]
    if all(p == 1.0 for p in top_p):
        return
    ascending, order = scores.sort(dim=-1, stable=True)
    cumulative = _weights(ascending).cumsum(dim=-1) + rest
    # Compared in float32, as transformers does: its rounding decides where probabilities are equal by construction.
    limits = _column([1 - p for p in top_p], torch.float32, scores.device)
    removed = (cumulative / cumulative[:, -1:]).float() <= limits
    removed[:, -1] = False
    removed &= _column([p < 1.0 for p in top_p], torch.bool, scores.device)
    scores.masked_fill_(torch.empty_like(removed).scatter_(1, order, removed), -torch.inf)


def _remove_below_min_p(scores: Tensor, params: Sequence[GenerationParams]) -> None:
    """As `MinPLogitsWarper`: tokens less likely than that share of the likeliest token's probability."""
    min_p = [wanted.min_p for wanted in params]
    if any(min_p):
        scores.masked_fill_(_weights(scores) < _column(min_p, torch.float64, scores.device), -torch.inf)


def _weights(scores: Tensor) -> Tensor:
    """exp(scores - largest of the row) in float64: the probabilities but for a factor."""
    scores = scores.double()
    return (scores - scores.amax(dim=-1, keepdim=True)).exp()


def _column(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """[S, 1], to broadcast along rows."""
    return torch.tensor(values, dtype=dtype, device=device)[:, None]
