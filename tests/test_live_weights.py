"""What a compiled graph reads of the live model, while several engines look."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import selective_compile as sc
from selective_compile import live_weights
from selective_compile.backend import compile_step_program
from selective_compile.tensor_state import states
from tests.decoders import Decoder

CONFIG = sc.EngineConfig(compile=False, max_kv_tokens=512)


def test_what_an_earlier_look_has_found_is_not_put_in_the_place_of_a_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines share a program, and a weight is replaced while the first of them looks the tensors up."""
    model = Decoder(layers=1)
    weights = compile_step_program(model, CONFIG).weights  # type: ignore[union-attr]
    looking, go_on = threading.Event(), threading.Event()

    def slow(*given: Any) -> Any:
        if threading.current_thread() is first:
            looking.set()
            assert go_on.wait(10)
        return states(*given)

    monkeypatch.setattr(live_weights, "states", slow)
    first, second = threading.Thread(target=weights.version), threading.Thread(target=weights.version)
    first.start()
    assert looking.wait(10)
    model.head.weight = nn.Parameter(torch.randn_like(model.head.weight))
    second.start()
    second.join(0.1)
    go_on.set()
    first.join(10)
    second.join(10)
    tensors, seen = weights.seen
    assert any(tensor is model.head.weight for tensor in tensors) and seen.hold(tensors)
