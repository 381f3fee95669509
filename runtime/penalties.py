"""The repetition penalty and the bans of tokens, over all rows of a step at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selective_compile.runtime.generation import GenerationParams


def penalise(scores: Tensor, params: Sequence[GenerationParams], histories: Sequence[Sequence[int]]) -> None:
    """Change scores [S, V] in place, as transformers' processors change each row.

    Args:
        histories: of each row, its request's tokens so far, the prompt included.
    """
    repeated = [row for row, wanted in enumerate(params) if wanted.repetition_penalty != 1.0]
    if repeated:
        where = _places(repeated, [np.array(histories[row], dtype=np.int64) for row in repeated])
        _penalise_repetition(scores, where, [params[row].repetition_penalty for row in repeated])
    rows, banned = [], []
    for row, wanted in enumerate(params):
        for ban in wanted.bans:
            if ban.first <= len(histories[row]) < ban.before:
                rows.append(row)
                banned.append(ban.tokens)
    if rows:
        owners, tokens, _ = _places(rows, banned)
        scores[owners.to(scores.device), tokens.to(scores.device)] = -torch.inf


def _penalise_repetition(
    scores: Tensor, where: tuple[Tensor, Tensor, NDArray[np.int64]], penalties: list[float]
) -> None:
    """As `RepetitionPenaltyLogitsProcessor`: each place is read before any is written, since tokens repeat."""
    owners, tokens, counts = where
    factors = torch.from_numpy(np.repeat(np.array(penalties, dtype=np.float32), counts))
    owners, tokens, factors = (each.to(scores.device) for each in (owners, tokens, factors))
    found = scores[owners, tokens]
    scores[owners, tokens] = torch.where(found < 0, found * factors, found / factors)


def _places(rows: Sequence[int], tokens: Sequence[NDArray[np.int64]]) -> tuple[Tensor, Tensor, NDArray[np.int64]]:
    """Row and token of each place, and how many there are of each row."""
    counts = np.array([len(each) for each in tokens])
    return torch.from_numpy(np.repeat(np.array(rows), counts)), torch.from_numpy(np.concatenate(tokens)), counts
