"""What is kept of a token beside the token itself, for the requests that ask for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from selective_compile.runtime.generation import GenerationParams

AT_A_TIME = 32  # rows of log probabilities: in float32, 16 MB with a vocabulary of 128,256


class TopLogprobs(NamedTuple):
    """The likeliest tokens of a step, the likeliest first, with their log probabilities."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class TokenRecord:
    """One step of one request; None for what it did not ask for.

    Attributes:
        error: what the request's own processors or criteria raised; the token is then none.
        stop: why a criterion of the request ends it with this token.
        logprob, top_logprobs: under the model's own distribution.
        processed_logprob, processed_top_logprobs: under the distribution that the token was drawn from.
        logits, scores: the two rows themselves, [V] float32.
    """

    error: str | None = None
    stop: Literal["stop", "length"] | None = None
    logprob: float | None = None
    top_logprobs: TopLogprobs | None = None
    processed_logprob: float | None = None
    processed_top_logprobs: TopLogprobs | None = None
    logits: Tensor | None = None
    scores: Tensor | None = None


@torch.no_grad()
def recorded(
    params: GenerationParams,
    token: int,
    logits: Tensor,
    scores: Tensor | None,
    stop: Literal["stop", "length"] | None,
) -> TokenRecord:
    """The record of a token.

    Args:
        logits: [V] float32, of the model; copied where they are kept.
        scores: [V] float32, processed; None where nothing that is asked for needs them.
    """
    logprob, top = _logprobs(logits, token, params.top_logprobs) if params.logprobs else (None, None)
    processed, processed_top = None, None
    if params.processed_logprobs:
        assert scores is not None
        processed, processed_top = _logprobs(scores, token, params.top_logprobs)
    return TokenRecord(
        stop=stop,
        logprob=logprob,
        top_logprobs=top,
        processed_logprob=processed,
        processed_top_logprobs=processed_top,
        logits=logits.clone() if params.output_logits else None,
        scores=scores.clone() if params.output_scores and scores is not None else None,
    )


@torch.no_grad()
def logprobs_of(logits: Tensor, tokens: Sequence[int]) -> list[float]:
    """Of each token under its row of logits [N, V]; bit for bit what the record of a generated token has.

    Some rows at a time: those of a prompt come to gigabytes in float32, of which no memory is kept free.
    """
    places = torch.tensor(tokens, device=logits.device)[:, None]
    pieces = zip(logits.split(AT_A_TIME), places.split(AT_A_TIME), strict=True)
    return torch.cat([_log_softmax(rows.float()).gather(1, each)[:, 0] for rows, each in pieces]).tolist()


def joined_rows(pieces: Sequence[Tensor]) -> Tensor | None:
    """Rows [N, V] that came in pieces; None where none came."""
    return torch.cat(list(pieces)) if pieces else None


def _logprobs(row: Tensor, token: int, count: int) -> tuple[float, TopLogprobs | None]:
    logprobs = _log_softmax(row)
    top = None
    if count:
        values, tokens = logprobs.topk(min(count, len(row)))
        top = TopLogprobs(tuple(tokens.tolist()), tuple(values.tolist()))
    return float(logprobs[token]), top


def _log_softmax(rows: Tensor) -> Tensor:
    """Of rows [..., V] float32, each as if it were alone."""
    return (_aligned(rows) if rows.is_cuda else rows).log_softmax(dim=-1)[..., : rows.shape[-1]]


def _aligned(rows: Tensor) -> Tensor:
    """Rows with as many entries without weight as make each begin at 16 bytes.

    A GPU shares out the sum of a row by where the first whole 16 bytes in it are, which without this depends on how
    many rows are in front of it.
    """
    missing = -rows.shape[-1] % 4
    return F.pad(rows, (0, missing), value=-math.inf) if missing else rows
