"""Choosing tokens where the logits are, in operations whose shapes depend on nothing but how many rows there are.

No value comes to the host, so that the next step can be enqueued, and the whole be captured as a graph, before anybody
knows a token. The definition is that of `selective_compile.runtime.draw`, from which the tokens differ by no more than
the last bits of a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selective_compile.runtime.generation import GenerationParams
from selective_compile.runtime.philox import uniform
from selective_compile.runtime.token_marks import BANNED, SEEN

# In place of a token: none can be drawn, since the scores hold a NaN or are infinite.
NO_TOKEN: Final = -1
# Of a row: temperature (0: the largest logit), 1 - top_p, min_p, top_k (0: all), and the share of the sum of the
# probabilities, in order of token id, that it is drawn at; the repetition penalty.
FIELDS: Final = 6


def choices(params: Sequence[GenerationParams], indices: Sequence[int]) -> NDArray[np.float64] | None:
    """What `choose` is to know of each of R rows, [FIELDS, R]; None: the largest logit of each is wanted.

    Args:
        indices: for each row, how many tokens its request has generated before this one.
    """
    if all(wanted.unchanged for wanted in params):
        return None
    found = np.empty((FIELDS, len(params)), dtype=np.float64)
    found[:4] = np.array([wanted.device_choice for wanted in params]).T
    found[4] = uniform([wanted.seed for wanted in params], indices)
    found[5] = [wanted.repetition_penalty for wanted in params]
    return found


def choose(logits: Tensor, rows: Tensor | None, marks: Tensor | None = None) -> Tensor:
    """A token for each row of logits [R, V], [R] int64 on their device; `NO_TOKEN` where there is none.

    Args:
        rows: [FIELDS, R] float64, as `choices` has them.
        marks: [R, V] uint8, as `TokenMarks` has them; None: nobody has a repetition penalty or a ban.
    """
    if rows is None:
        return logits.argmax(dim=-1)  # as they are: no copy of all of them is made
    scores = logits.float()
    temperature, limit, min_p, top_k, fraction, penalty = (row[:, None] for row in rows)
    if marks is not None:
        # As `RepetitionPenaltyLogitsProcessor`.
        factor = penalty.float()
        penalised = torch.where(scores < 0, scores * factor, scores / factor)
        scores = torch.where((marks & SEEN) != 0, penalised, scores).masked_fill((marks & BANNED) != 0, -torch.inf)
    largest = scores.argmax(dim=-1)
    greedy = temperature == 0
    scores = scores / torch.where(greedy, 1.0, temperature).float()
    ascending, order = scores.sort(dim=-1, stable=True)
    ascending = _without_unlikely(ascending, limit, min_p, top_k)
    kept = torch.empty_like(scores).scatter_(1, order, ascending)
    drawn = _draw(_weights(kept), fraction)
    return torch.where(greedy[:, 0], largest, drawn)


def _without_unlikely(ascending: Tensor, limit: Tensor, min_p: Tensor, top_k: Tensor) -> Tensor:
    """Scores [R, V] in ascending order, -inf where top-k, then top-p, then min-p removes them."""
    vocabulary = ascending.shape[1]
    place = vocabulary - torch.where(top_k == 0, vocabulary, top_k.clamp(max=vocabulary))
    ascending = ascending.masked_fill(ascending < ascending.gather(1, place.long()), -torch.inf)
    cumulative = _weights(ascending).cumsum(dim=-1)
    # Compared in float32, as transformers does: its rounding decides where probabilities are equal by construction.
    removed = ((cumulative / cumulative[:, -1:]).float() <= limit.float()) & (limit > 0)
    removed[:, -1] = False
    ascending = ascending.masked_fill(removed, -torch.inf)
    return ascending.masked_fill(_weights(ascending) < min_p, -torch.inf)


def _draw(weights: Tensor, fraction: Tensor) -> Tensor:
    """[R] int64: the first place where the running sum of weights [R, V] exceeds that share of the total."""
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    chosen = torch.searchsorted(cumulative, fraction * total, right=True)
    # Rounded, the product may reach the total; then it is the place where the sum gets there.
    last = torch.searchsorted(cumulative, total).clamp(max=weights.shape[1] - 1)
    # Not a number where the likeliest token has -inf or where a score is none.
    return torch.where(total > 0, torch.minimum(chosen, last), NO_TOKEN)[:, 0]


def _weights(scores: Tensor) -> Tensor:
    """exp(scores - largest of the row) in float64: the probabilities but for a factor."""
    scores = scores.double()
    return (scores - scores.amax(dim=-1, keepdim=True)).exp()
