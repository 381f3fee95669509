"""A model that many tests share, and a count of what is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn
from transformers import GenerationConfig

from selective_compile import kept_engines
from selective_compile.options import EngineConfig
from tests.huggingface.models import tiny


@pytest.fixture(scope="module")
def shared_model() -> Any:
    return tiny()


@pytest.fixture
def model(shared_model: Any) -> Iterator[Any]:
    """One model for many tests, so that it is compiled once; its configuration is put back."""
    yield shared_model
    shared_model.generation_config = GenerationConfig()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The models and configurations that were compiled."""
    calls: list[Any] = []
    original = kept_engines.compile_step_program

    def counted(model: nn.Module, config: EngineConfig) -> Any:
        calls.append(config)
        return original(model, config)

    monkeypatch.setattr(kept_engines, "compile_step_program", counted)
    return calls
