"""Which calls of `generate` wait for one another: those that would make an engine of the same model."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch import nn

from selective_compile import kept_engines
from selective_compile.kept_engines import KeptEngines
from selective_compile.options import EngineConfig


class Compiled:
    """In place of a `KeptEngine`: takes until it may end."""

    made: list[nn.Module]
    begun: threading.Event
    may_end: threading.Event

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        self.made.append(model)
        self.begun.set()
        assert self.may_end.wait(60)

    def fits(self, model: nn.Module, config: EngineConfig) -> bool:
        return True

    def engine_for(self, model: nn.Module, lengths: list[int]) -> Any:
        return self


@pytest.mark.parametrize("same", [True, False], ids=["same model", "another"])
def test_a_model_is_compiled_once_and_others_do_not_wait(same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_engines, "KeptEngine", Compiled)
    Compiled.made, Compiled.begun, Compiled.may_end = [], threading.Event(), threading.Event()
    engines, model, config = KeptEngines(), nn.Linear(1, 1), EngineConfig()
    other = model if same else nn.Linear(1, 1)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(engines.engine_for, model, config, [1])
        assert Compiled.begun.wait(60)
        Compiled.begun.clear()
        second = threads.submit(engines.engine_for, other, config, [1])
        assert Compiled.begun.wait(0.5 if same else 60) is not same
        Compiled.may_end.set()
        assert (first.result(60) is second.result(60)) is same
    assert len(Compiled.made) == (1 if same else 2)
