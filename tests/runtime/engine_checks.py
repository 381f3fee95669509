"""What holds of an engine after every step, and of its requests once they have ended."""

from __future__ import annotations

from torch import Tensor

from selective_compile.runtime import Engine, Request
from tests.runtime.simulated import (
    expected_tokens,
)


def run_until_idle(engine: Engine) -> None:
    while engine.step():
        check(engine)
    check(engine)
    assert_nothing_left(engine)


def check(engine: Engine) -> None:
    engine._scheduler.check()
    stats = engine.stats()
    assert stats.blocks_free + stats.blocks_used == stats.blocks_max
    assert stats.running + stats.waiting == len(engine._requests)


def assert_nothing_left(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
    assert not engine._requests


def expect(request: Request) -> None:
    assert request.tokens == expected_tokens(request.prompt_ids, request.params), request


class EndsAt:
    """A criterion that looks at the last token, and must have been told all."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __call__(self, input_ids: Tensor, scores: None) -> bool:
        assert (input_ids >= 0).all()
        return int(input_ids[0, -1]) in self._tokens
