"""What `explain` says: every attention with its mask, or every refusal with the user's line."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import selective_compile as sc
from tests.decoders import MAX_POSITIONS, Decoder, by_einsum, tril_mask, window_mask
from tests.exactness import step_program
from tests.models import WINDOW, tiny


def future_visible(ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    return tril_mask(ids, attention_mask) | (torch.arange(ids.shape[1]) == 9)  # planted: all see position 9


def line_of(text: str) -> str:
    with open(__file__) as file:
        return str(next(number for number, line in enumerate(file, 1) if text in line))


def test_calls_are_grouped_by_kind() -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    report = sc.explain(tiny("gemma3_text", num_hidden_layers=3, layer_types=kinds))
    assert report.ok and report.verdict == "ragged" and not report.refusals
    masks = [call.mask for call in report.calls]
    window = f"causal, window {WINDOW}"
    assert masks == [window, window, "causal"]
    assert {(call.query_heads, call.kv_heads, call.head_size) for call in report.calls} == {(4, 2, 16)}
    text = str(report)
    assert "2 x" in text and "1 x" in text and window in text
    passes = [record.name for record in report.passes]
    assert passes[passes.index("recognise attention") + 1] == "prove masks"


def test_an_end_that_the_configuration_does_not_say_is_told() -> None:
    """A table of positions ends, or the model goes another way for longer requests."""
    model = Decoder(layers=1)
    report = sc.explain(model)
    assert report.longest == MAX_POSITIONS
    assert f"at most {MAX_POSITIONS} tokens" in str(report)
    model.config = SimpleNamespace(max_position_embeddings=MAX_POSITIONS)  # type: ignore[assignment]
    assert sc.explain(model).longest is None
    assert sc.explain(tiny("llama")).longest is None


@pytest.mark.parametrize("window", [0, -1, True, "x", 1.5, 2**40])
def test_a_window_is_checked_as_that_of_the_engine(window: Any) -> None:
    with pytest.raises(ValueError, match="^max_attention_window must be an integer of at .*, got ") as raised:
        sc.explain(tiny("llama"), max_attention_window=window)
    with pytest.raises(ValueError) as of_engine:
        sc.EngineConfig(max_attention_window=window)
    assert str(raised.value) == str(of_engine.value)


def test_report_exports_as_json() -> None:
    exported = json.loads(sc.explain(Decoder(layers=1, attend=by_einsum, mask=window_mask(5))).to_json())
    assert exported["model"] == "Decoder"
    (call,) = exported["calls"]
    assert call["mask"].startswith("causal, window 5")
    assert "tests/decoders.py" in call["source_line"]


def test_planted_mask_is_refused_naming_the_line() -> None:
    model = Decoder(mask=future_visible)
    report = sc.explain(model)
    assert not report.ok and report.calls == ()
    for refusal in report.refusals:
        assert "the token at position 0 sees the one at 9" in refusal.reason
        assert f"{__file__}:{line_of('planted: all see position 9')}" in refusal.source_line
    with pytest.raises(sc.RefusedError, match="sees the one at 9") as refused:
        step_program(model)
    assert refused.value.refusals == report.refusals


def test_refused_operation_names_file_line_and_module() -> None:
    def shifted(x: Tensor) -> Tensor:
        return x + x.roll(1, 1)  # planted: mixes tokens

    report = sc.explain(Decoder(layers=1, mix=shifted))
    (refusal,) = report.refusals
    assert refusal.operator == "aten.roll.default"
    assert f"{__file__}:{line_of('planted: mixes tokens')}" in refusal.source_line
    assert "x.roll(1, 1)" in refusal.source_line
    assert refusal.module == "blocks.0"
    assert refusal.source_line in str(report)
