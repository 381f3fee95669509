"""`max_attention_window` next to Hugging Face: the model whose configuration has that sliding window."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import selective_compile as sc
from selective_compile.backend import Program, compile_step_program
from selective_compile.passes.attention_calls import MaskFamily
from selective_compile.passes.narrow_windows import narrow_windows
from tests.models import WINDOW, tiny
from tests.oracle import assert_same_tokens
from tests.test_isolation import Decay, Mixed

BLOCK = 4


def config(window: int | None, **others: Any) -> sc.EngineConfig:
    chosen = {"block_size": BLOCK, "token_budget": 12, "max_requests": 4, "max_kv_tokens": 160, **others}
    return sc.EngineConfig(compile=False, max_attention_window=window, **chosen)


@pytest.fixture(scope="module")
def whole() -> Any:
    return tiny("mistral", sliding_window=None)


@pytest.fixture(scope="module")
def narrowed(whole: Any) -> dict[int, tuple[Program, Any]]:
    """For each window the program of the model that sees everything, and the model with that sliding window."""
    found = {}
    for window in (1, 5):
        other = tiny("mistral", sliding_window=window)
        other.load_state_dict(whole.state_dict())
        found[window] = compile_step_program(whole, config(window)), other
    return found


PROMPTS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=40), min_size=1, max_size=5)


@settings(max_examples=15, deadline=None)
@given(data=st.data(), prompts=PROMPTS, tokens=st.integers(1, 20), budget=st.integers(3, 16))
def test_tokens_are_those_of_the_model_with_that_sliding_window(
    whole: Any, narrowed: dict[int, tuple[Program, Any]], data: Any, prompts: list[list[int]], tokens: int, budget: int
) -> None:
    """Under chunks, prefixes that are found and pools so small that requests give way."""
    window = data.draw(st.sampled_from(sorted(narrowed)))
    program, other = narrowed[window]
    engine = sc.Engine(whole, config(window, token_budget=budget, max_kv_tokens=80), program=program)
    requests = [engine.submit(prompt, max_new_tokens=tokens) for prompt in prompts]
    while engine.step():
        engine._scheduler.check()
    for prompt, request in zip(prompts, requests, strict=True):
        assert_same_tokens(other, prompt, request.tokens)
    assert engine.stats().blocks_used == 0


def test_a_request_of_any_length_holds_a_window(whole: Any, narrowed: dict[int, tuple[Program, Any]]) -> None:
    program, other = narrowed[5]
    engine = sc.Engine(whole, config(5, max_kv_tokens=32), program=program)
    held = []
    engine.add_observer(lambda record: held.append(engine.stats().blocks_used))
    request = engine.submit([n % 199 for n in range(200)], max_new_tokens=100)
    assert_same_tokens(other, request.prompt_ids, list(request.result().tokens))
    assert max(held) <= 32 // BLOCK


def test_a_layer_that_sees_less_stays_as_it_is() -> None:
    """Of windowed and full layers the full ones are narrowed; the oracle gets their masks by hand."""
    model = tiny("gemma2", attention="eager")
    window = WINDOW + 4
    report = sc.explain(model, max_attention_window=window)
    assert report.ok
    assert [call.mask for call in report.calls] == [
        f"causal, window {WINDOW}",
        f"causal, window {window} by max_attention_window",
    ]
    assert f"window {window} by max_attention_window" in str(report) and "narrow windows" in report.to_json()
    engine = sc.Engine(model, config(window))
    prompt = [(7 * n) % 199 for n in range(30)]
    result = engine.submit(prompt, max_new_tokens=6, output_logits=True).result()
    tokens = [*prompt, *result.tokens]
    masks = {"full_attention": sliding(len(tokens), window), "sliding_attention": sliding(len(tokens), WINDOW)}
    with torch.no_grad():
        wanted = model(torch.tensor([tokens]), attention_mask=masks).logits[0, len(prompt) - 1 : -1]
        unlike = model(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1]
    assert result.logits is not None
    assert torch.allclose(torch.stack(result.logits), wanted, atol=1e-4)
    assert not torch.allclose(unlike, wanted, atol=1e-2)


def sliding(length: int, window: int) -> Tensor:
    behind = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (behind < 0) | (behind >= window)
    return torch.zeros(1, 1, length, length).masked_fill(hidden, torch.finfo(torch.float32).min)


def test_a_window_that_no_layer_exceeds_changes_nothing() -> None:
    report = sc.explain(tiny("mistral", num_hidden_layers=1), max_attention_window=WINDOW)
    assert [call.mask for call in report.calls] == [f"causal, window {WINDOW}"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"window": 0}, {"window": 6, "narrowed": True}),
        ({"window": 6}, {"window": 6}),
        ({"window": 7}, {"window": 6, "narrowed": True}),
        ({"window": 0, "chunk": 6}, {"window": 0, "chunk": 6}),
        ({"window": 0, "chunk": 9}, {"window": 6, "chunk": 9, "narrowed": True}),
        ({"window": 4, "chunk": 9}, {"window": 4, "chunk": 9}),
        ({"window": 0, "slopes": (0.5,)}, {"window": 6, "slopes": (0.5,), "narrowed": True}),
    ],
)
def test_what_is_narrowed(before: dict[str, Any], after: dict[str, Any]) -> None:
    class Call:
        family: Any = MaskFamily(padding=None, **before)
        selection = None

    class Traced:
        calls = (Call(),)

    traced: Any = Traced()
    assert narrow_windows(traced, 6) == int("narrowed" in after)
    assert traced.calls[0].family == MaskFamily(padding=None, **after)
    assert narrow_windows(traced, 6) == 0


def test_it_is_logged_and_refused_where_attention_is_not_ragged(caplog: pytest.LogCaptureFixture) -> None:
    whole = tiny("llama", num_hidden_layers=1)
    with caplog.at_level(logging.WARNING):
        program = compile_step_program(whole, config(6))
    assert "1 attention calls of LlamaForCausalLM see the last 6 positions at most" in caplog.text
    with pytest.raises(ValueError, match="must be that which the program was compiled for, 6, got 7"):
        sc.Engine(whole, config(7), program=program)
    with pytest.raises(ValueError, match="max_attention_window must be None for a model in which not every attention"):
        compile_step_program(Mixed(Decay), config(6))
    with pytest.raises(ValueError, match="max_attention_window must be an integer of at least 1, got 0"):
        config(0)


def test_through_inductor(whole: Any, narrowed: dict[int, tuple[Program, Any]]) -> None:
    _, other = narrowed[5]
    engine = sc.Engine(whole, sc.EngineConfig(block_size=BLOCK, max_kv_tokens=400, max_attention_window=5))
    prompt = [(5 * n) % 199 for n in range(40)]
    assert_same_tokens(other, prompt, list(engine.submit(prompt, max_new_tokens=10).result().tokens))


def test_guidance_that_sees_everything_is_refused(whole: Any, narrowed: Any) -> None:
    program, _ = narrowed[5]
    engine = sc.Engine(whole, config(5), program=program)
    assert len(engine.submit([1, 2], max_new_tokens=2, guidance_scale=1.0).result().tokens) == 2
    with pytest.raises(ValueError, match="guidance_scale must be None with EngineConfig.max_attention_window, got 1.5"):
        engine.submit([1, 2], max_new_tokens=2, guidance_scale=1.5)
