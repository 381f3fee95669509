"""The repetition penalty and the bans of tokens, over all rows of a step at once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selective_compile.kernels.penalties_cpu import Banned, Penalised, penalise_tokens
from selective_compile.runtime.generation import GenerationParams


def penalise(scores: Tensor, params: Sequence[GenerationParams], histories: Sequence[array[int]]) -> None:
    """Change scores [S, V] in place, as transformers' processors change each row.

    Args:
        histories: of each row, its request's tokens so far, the prompt included.
    """
    penalties = [
        Penalised(row, histories[row], wanted.repetition_penalty)
        for row, wanted in enumerate(params)
        if wanted.repetition_penalty != 1.0
    ]
    bans = [
        Banned(row, ban.tokens)
        for row, wanted in enumerate(params)
        for ban in wanted.bans
        if ban.first <= len(histories[row]) < ban.before
    ]
    if (penalties or bans) and not penalise_tokens(scores, penalties, bans):
        penalise_by_torch(scores, penalties, bans)


def penalise_by_torch(scores: Tensor, penalties: Sequence[Penalised], bans: Sequence[Banned]) -> None:
    """As `penalise_tokens`, on any device."""
    if penalties:
        owners, tokens, counts = _places(penalties, scores.device)
        values = np.array([each.penalty for each in penalties], dtype=np.float32)
        factors = torch.from_numpy(np.repeat(values, counts)).to(scores.device)
        # As `RepetitionPenaltyLogitsProcessor`: each place is read before any is written, since tokens repeat.
        found = scores[owners, tokens]
        scores[owners, tokens] = torch.where(found < 0, found * factors, found / factors)
    if bans:
        owners, tokens, _ = _places(bans, scores.device)
        scores[owners, tokens] = -torch.inf


def _places(
    wanted: Sequence[Penalised] | Sequence[Banned], device: torch.device
) -> tuple[Tensor, Tensor, NDArray[np.int64]]:
    """Row and token of each place, and how many there are of each entry."""
    counts = np.array([len(each.tokens) for each in wanted])
    owners = np.repeat(np.array([each.row for each in wanted]), counts)
    tokens = np.concatenate([np.asarray(each.tokens, dtype=np.int64) for each in wanted])
    return torch.from_numpy(owners).to(device), torch.from_numpy(tokens).to(device), counts
