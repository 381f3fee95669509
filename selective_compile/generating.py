"""Texts in, texts out, through the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from selective_compile.checkpoints import Checkpoint
from selective_compile.options import EngineConfig
from selective_compile.progress import Stages
from selective_compile.runtime.engine import Engine
from selective_compile.runtime.request import Request

UNFINISHED = "\ufffd"  # what a tokenizer decodes the first bytes of a character to


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """What to continue and how; `options` are fields of a GenerationConfig."""

    texts: tuple[str, ...]
    options: dict[str, Any]

    @classmethod
    def of(
        cls,
        texts: Sequence[str],
        *,
        max_new_tokens: int,
        temperature: float | None,
        top_k: int | None,
        top_p: float | None,
    ) -> Self:
        """Greedy, unless something about sampling is given; what is not given is off, not the model's own.

        Raises:
            ValueError: there is no prompt, or an empty one, or sampling at temperature 0.
        """
        if not texts or not all(texts):
            got = "none" if not texts else "an empty one"
            raise ValueError(f"prompts must be given, as arguments or as lines of standard input, got {got}")
        if odd := [text for text in texts if text.encode("utf-8", "ignore").decode() != text]:
            raise ValueError(f"prompts must be text, got bytes that are no UTF-8: {odd[0]!r}")
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}
        filtered = top_k is not None or top_p is not None
        if temperature == 0 and filtered:
            raise ValueError("temperature must be above 0 with top-k or top-p, got 0")
        if temperature or filtered:
            options |= {
                "do_sample": True,
                "temperature": temperature if temperature is not None else 1.0,
                "top_k": top_k or 0,
                "top_p": top_p if top_p is not None else 1.0,
            }
        return cls(texts=tuple(texts), options=options)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A prompt and what came after it."""

    prompt: str
    text: str
    tokens: list[int]
    prompt_tokens: int
    finish_reason: str
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def generate_all(checkpoint: Checkpoint, config: EngineConfig, prompts: Prompts, stages: Stages) -> list[Answer]:
    """The answers, in the order of the prompts.

    Raises:
        ValueError: the model is refused, or a prompt does not fit it.
        StepError: a step failed.
    """
    engine, requests = submitted(checkpoint, config, prompts, stages)
    with stages("generating", len(requests)) as advance:
        done = 0
        while engine.step():
            finished = sum(request.finished for request in requests)
            advance(finished - done)
            done = finished
    return [answered(checkpoint, text, request) for text, request in zip(prompts.texts, requests, strict=True)]


def generate_streaming(checkpoint: Checkpoint, config: EngineConfig, prompts: Prompts, stages: Stages) -> Iterator[str]:
    """Pieces of the answer to the one prompt as they come, each of whole characters.

    Raises as `generate_all`.
    """
    assert len(prompts.texts) == 1, prompts
    engine, (request,) = submitted(checkpoint, config, prompts, stages)
    shown = 0
    while engine.step():
        # All of it anew: how a token reads may depend on the one before.
        text = checkpoint.decoded(request.tokens)
        if not text.endswith(UNFINISHED) or request.finished:
            yield text[shown:]
            shown = len(text)


def submitted(
    checkpoint: Checkpoint, config: EngineConfig, prompts: Prompts, stages: Stages
) -> tuple[Engine, list[Request]]:
    """An engine with every prompt queued under its number, which with the seed decides what is sampled."""
    with stages("proving and compiling" if config.compile else "proving"):
        engine = Engine(checkpoint.model, config)
    ids = [checkpoint.tokenizer(text).input_ids for text in prompts.texts]
    options = prompts.options | {"tokenizer": checkpoint.tokenizer}  # for stop strings of the checkpoint's own
    requests = [engine.submit(prompt, None, number, **options) for number, prompt in enumerate(ids)]
    return engine, requests


def answered(checkpoint: Checkpoint, prompt: str, request: Request) -> Answer:
    result = request.result()
    tokens = list(result.tokens)
    return Answer(
        prompt=prompt,
        text=checkpoint.decoded(tokens),
        tokens=tokens,
        prompt_tokens=len(request.prompt_ids),
        finish_reason=result.finish_reason,
        seconds=result.timing.total or 0.0,
    )
