"""How a request ended, and what it has come to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from selective_compile.runtime.beams import Hypothesis
from selective_compile.runtime.records import TopLogprobs
from selective_compile.runtime.request_state import RequestId

# An end-of-sequence id, a stop string or a criterion; max_new_tokens; `cancel`; what `error` says.
FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, kw_only=True)
class RequestTiming:
    """Seconds since `submit`, and between one token and the next on average; None for what did not happen."""

    queued: float | None
    first_token: float | None
    total: float | None
    between_tokens: float | None = None


@dataclass(frozen=True, kw_only=True)
class RequestResult:
    """How a request ended.

    Attributes:
        tokens: the generated token ids, the end-of-sequence id included where there was one; not the prompt.
        finish_reason: "stop" (an end-of-sequence id, a stop string, a criterion of the request's own), "length" (as
            many tokens, or as much time, as allowed), "cancelled" or "error".
        error: the message when finish_reason is "error", else None.
        logprobs: of each token under the model's own distribution, before temperature and filters; None
            unless the request asked for them with `logprobs=True`. With beams, of the best hypothesis.
        prompt_logprobs: of each token of the prompt but the first, given those before it, with `prompt_logprobs=True`.
        prompt_logits: the rows [prompt length, V] that the model gave for the prompt's tokens, float32, with
            `prompt_logits=True`; fewer where the request ended before, and None without any.
        processed_logprobs: of each token under the distribution that it was drawn from; with
            `processed_logprobs=True`.
        top_logprobs, processed_top_logprobs: of the likeliest tokens of each step, as many as `top_logprobs` asked
            for, under each of the two distributions that is kept.
        logits, scores: for each token the row [V] that the model gave, and what was made of it, float32; with
            `output_logits=True`, `output_scores=True`. With beams, for each step the rows of all [num_beams, V].
        hypotheses: with beams, the best `num_return_sequences` of them, the best first, whose tokens are `tokens`.
        beams: with `output_beams=True`, what the beams had generated before each step and after the last, each
            [num_beams, steps].
    """

    request_id: RequestId
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    error: str | None
    logprobs: tuple[float, ...] | None
    prompt_logprobs: tuple[float, ...] | None
    prompt_logits: Any
    processed_logprobs: tuple[float, ...] | None
    top_logprobs: tuple[TopLogprobs, ...] | None
    processed_top_logprobs: tuple[TopLogprobs, ...] | None
    logits: tuple[Any, ...] | None
    scores: tuple[Any, ...] | None
    hypotheses: tuple[Hypothesis, ...] | None
    beams: tuple[Any, ...] | None
    timing: RequestTiming
