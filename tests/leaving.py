"""Requests that leave between the plan of a step and its run, by which time a program may keep something of them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import selective_compile as sc
from selective_compile.backend import Program

GONE, STAYS = [1, 2, 3], [3, 5, 7]


def served_while_one_leaves(
    model: Any, program: Program, config: sc.EngineConfig, step: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, ...]:
    """The tokens of `STAYS`; `GONE` is cancelled before run ``step``, and another engine of the program runs a step."""
    engine, other = (sc.Engine(model, config, program=program) for _ in range(2))
    run, steps = engine._runner.run, []

    def cancelled_before(inputs: Any) -> Tensor:
        steps.append(inputs)
        if len(steps) == step:
            gone.cancel()
            other.submit([5, 7], max_new_tokens=1).result()
        return run(inputs)

    monkeypatch.setattr(engine._runner, "run", cancelled_before)
    gone, stays = (engine.submit(prompt, max_new_tokens=9, do_sample=False) for prompt in (GONE, STAYS))
    tokens = stays.result().tokens
    assert gone.finish_reason == "cancelled"
    return tuple(tokens)
