"""Drafts by a smaller model: an engine of its own, which all requests that name the model share."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from selective_compile.runtime.engine import Engine
    from selective_compile.runtime.request import Request

# Of requests whose drafts do not pay, one token is drafted at every so many, to see whether they would pay again.
PROBE = 16

# Of drafts: greedy, and without anything that would end one.
OPTIONS: Mapping[str, Any] = {
    "do_sample": False,
    "num_beams": 1,
    "num_return_sequences": 1,
    "eos_token_id": None,
    "assistant_early_exit": None,
    "prompt_lookup_num_tokens": None,
}


class Assistant:
    """Drafts of one model, for all requests of a step in one batch.

    What it computed of a request's tokens it finds by their blocks at the next step.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.seconds_per_token = 0.0  # of a draft, whatever the number of requests; over about the last ten

    def propose(self, asked: Sequence[tuple[Sequence[int], int, str | None]]) -> list[list[int]]:
        """For each of these tokens, so many that may follow; none where the assistant's engine has no room for them.

        The third of each is the request's cache salt: here, too, it shares blocks with requests of that salt only.
        """
        started = time.perf_counter()
        requests: list[Request | None] = []
        try:
            for tokens, count, salt in asked:
                roomy = self._has_room(tokens, count)
                requests.append(self._submit(tokens, count, salt) if roomy else None)
            while self._engine.step():
                pass
        finally:  # where that failed, nothing is to be left for the next time
            for request in requests:
                if request is not None:
                    request.cancel()
        longest = max(1, *(count for _, count, _ in asked))
        self.seconds_per_token += ((time.perf_counter() - started) / longest - self.seconds_per_token) / 10
        return [[] if request is None else request.tokens for request in requests]

    def check(self) -> None:
        """Raises ValueError: the model's own generation_config does not go with drafts."""
        try:
            self._submit([0], 1, None).cancel()
        except ValueError as error:
            raise ValueError(f"assistant_model must have a generation_config that goes with drafts: {error}") from error

    def _submit(self, tokens: Sequence[int], count: int, salt: str | None) -> Request:
        return self._engine.submit(tokens, **OPTIONS, max_new_tokens=count, cache_salt=salt)

    def _has_room(self, tokens: Sequence[int], count: int) -> bool:
        return count > 0 and len(tokens) + count - 1 <= self._engine.longest


class Assistants:
    """An `Assistant` for each model, kept for as long as the model lives."""

    def __init__(self, make: Callable[[Any], Engine]) -> None:
        """make: an engine that does not hold the model."""
        self._make = make
        self._kept: WeakKeyDictionary[Any, Assistant] = WeakKeyDictionary()

    def of(self, model: Any, vocab_size: int) -> Assistant:
        """Compiled when first asked for.

        Raises:
            ValueError: it is no model, or has another vocabulary.
        """
        if not callable(getattr(model, "forward", None)):
            raise ValueError(f"assistant_model must be a torch.nn.Module, got {type(model).__name__}")
        if model not in self._kept:
            engine = self._make(model)
            if engine.vocab_size != vocab_size:
                raise ValueError(
                    f"assistant_model must have a vocabulary of {vocab_size}, got {engine.vocab_size}: "
                    "prompt_lookup_num_tokens drafts without a model"
                )
            self._kept[model] = Assistant(engine)
        return self._kept[model]
