"""Models whose attention sees keys that the cache of `generate` does not keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import selective_compile as sc
from selective_compile.cache_reach import kept_keys
from tests.models import tiny

CONFIG = sc.EngineConfig(compile=False)


def answers(model: Any, ids: torch.Tensor) -> tuple[list[int], list[int]]:
    """Of the model, and of the engine."""
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    own = model.generate(ids, **options)
    return own[0].tolist(), sc.generate(model, ids, engine_config=CONFIG, **options)[0].tolist()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(1, 199, (1, 33), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("window", [8, 20])
def test_a_window_that_the_cache_has_alone(window: int, ids: torch.Tensor) -> None:
    model = tiny("llama", attention="eager", initializer_range=0.25, sliding_window=window)
    assert kept_keys(model.config) == [window] * 2
    report = sc.explain(model)
    assert report.verdict == "sequential" and f"it keeps the last {window} keys, and attention sees all" in str(report)
    own, found = answers(model, ids)
    assert found == own


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text"])
def test_windows_that_both_have(family: str) -> None:
    model = tiny(family)
    assert any(kept_keys(model.config)) and sc.explain(model).verdict == "ragged"


def test_a_window_that_only_the_cache_gets_later(ids: torch.Tensor) -> None:
    model: Any = tiny("llama", attention="eager", initializer_range=0.25)
    engine = sc.Engine(model, CONFIG)
    before, found = answers(model, ids)
    assert found == before
    model.config.sliding_window = 4
    own, found = answers(model, ids)
    assert own != before and found == own
    engine.submit(ids[0], max_new_tokens=2)
    with pytest.raises(RuntimeError, match="what the configuration says of generate's cache must stay"):
        engine.step()
    del model.config.sliding_window
    assert answers(model, ids) == (before, before)


def test_steps_that_depart_behind_a_few_dozen_tokens(ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that scales a call's tokens by their number in it, in segments of 32: each step is a first token."""
    model: Any = tiny("llama", initializer_range=0.25)
    forward = model.model.layers[0].mlp.forward

    def in_segments(x: torch.Tensor) -> torch.Tensor:
        return forward(x) * (1 + 0.5 * (torch.arange(x.shape[1]) // 32))[None, :, None]

    monkeypatch.setattr(model.model.layers[0].mlp, "forward", in_segments)
    assert sc.explain(model).verdict == "sequential"
    own, found = answers(model, ids)
    assert found == own
