"""The step program is that of the model as compiled: a model that became another is refused, never run wrong."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import selective_compile as sc
from tests.decoders import MAX_POSITIONS, Decoder
from tests.models import tiny
from tests.oracle import generated_alone

PROMPT = [1, 5, 9, 3, 7]
CONFIG = sc.EngineConfig(compile=False, max_kv_tokens=512)


def untie_head(model: nn.Module) -> None:
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))


def untie_embedding(model: nn.Module) -> None:
    model.model.embed_tokens.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))


def convert_a_norm(model: nn.Module) -> None:
    model.model.norm.to(torch.bfloat16)


def shorten_a_norm(model: nn.Module) -> None:
    model.model.norm.weight = nn.Parameter(torch.ones(8))


def drop_a_weight(model: nn.Module) -> None:
    model.model.norm.weight = None


def turn_a_weight(model: nn.Module) -> None:
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.T.contiguous().T


def replace_a_module(model: nn.Module) -> None:
    model.model.layers[0].mlp = copy.deepcopy(model.model.layers[0].mlp)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (untie_head, r"'model\.embed_tokens\.weight' and 'lm_head\.weight' must stay the one weight"),
        (untie_embedding, "must stay the one weight"),
        (convert_a_norm, "must stay torch.float32"),
        (shorten_a_norm, r"must stay torch.float32 \[64\]"),
        (drop_a_weight, "must stay torch.float32"),
        (turn_a_weight, r"strides of 'model\..*weight' must stay"),
        (replace_a_module, "must stay those it was compiled with"),
    ],
)
def test_model_that_became_another_ends_requests_with_an_error(change: Callable, message: str) -> None:
    """Also where none of them runs yet: nobody waits for ever."""
    model = tiny("llama", num_hidden_layers=1, tie_word_embeddings=True)
    engine = sc.Engine(model, CONFIG)
    running = engine.submit(PROMPT, max_new_tokens=8)
    engine.step()
    change(model)
    waiting = engine.submit(PROMPT, max_new_tokens=8)
    for request in (running, waiting, engine.submit(PROMPT)):
        result = request.result(timeout=30)
        assert result.finish_reason == "error"
        assert re.search(message, str(result.error))
    assert engine.stats().blocks_used == 0 and not engine.step()


def test_tied_weights_replaced_together_are_used() -> None:
    model = tiny("llama", num_hidden_layers=1, tie_word_embeddings=True)
    engine = sc.Engine(model, CONFIG)
    untie_head(model)
    model.tie_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert engine.submit(PROMPT, max_new_tokens=8).result().tokens == tuple(generated_alone(model, PROMPT, 8))


def test_generate_compiles_anew_when_weights_are_untied() -> None:
    model = tiny("llama", num_hidden_layers=1, tie_word_embeddings=True)
    ids = torch.tensor([PROMPT])
    for change in (lambda model: None, untie_head):
        change(model)
        ours = sc.generate(model, ids, max_new_tokens=8, do_sample=False, engine_config=CONFIG)
        assert torch.equal(ours, model.generate(ids, max_new_tokens=8, do_sample=False))


def test_prompt_beyond_the_learned_positions_is_refused_and_touches_nobody() -> None:
    """Of a decoder without a configuration that would say so."""
    engine = sc.Engine(Decoder(layers=1), CONFIG)
    other = engine.submit(PROMPT, max_new_tokens=4)
    engine.step()
    with pytest.raises(ValueError, match=f"at most {MAX_POSITIONS} tokens for the model's positions"):
        engine.submit([1] * (MAX_POSITIONS + 1), max_new_tokens=1)
    assert other.result().finish_reason == "length"
    assert engine.submit([1] * MAX_POSITIONS, max_new_tokens=1).result().finish_reason == "length"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_distribution_end_only_the_request_that_draws(value: float) -> None:
    model = tiny("llama", num_hidden_layers=1)
    engine = sc.Engine(model, CONFIG)
    with torch.no_grad():
        model.lm_head.weight[3] = value
    greedy = engine.submit(PROMPT, max_new_tokens=3)
    drawing = [
        engine.submit(PROMPT, max_new_tokens=3, do_sample=True, **more) for more in ({}, {"top_k": 0, "top_p": 0.5})
    ]
    assert list(greedy.result().tokens) == generated_alone(model, PROMPT, 3)
    for request in drawing:
        assert request.result().finish_reason == "error"
        assert "no token can be drawn" in str(request.error)
    assert engine.stats().blocks_used == 0


def test_what_is_no_model_or_no_configuration_is_a_value_error() -> None:
    with pytest.raises(ValueError, match=r"model must be a torch.nn.Module, got int"):
        sc.explain(5)
    with pytest.raises(ValueError, match="model must be a torch.nn.Module, got str"):
        sc.Engine("your/model")
    with pytest.raises(ValueError, match="config must be an EngineConfig or None, got {'token_budget': 4}"):
        sc.Engine(Decoder(layers=1), {"token_budget": 4})


def test_prompt_with_an_id_that_the_embedding_has_no_row_for_is_refused_and_touches_nobody() -> None:
    model: Any = tiny("llama")
    model.model.embed_tokens = nn.Embedding(150, 64)
    engine = sc.Engine(model, sc.EngineConfig(compile=False, max_kv_tokens=256))
    request = engine.submit([1, 149, 3], max_new_tokens=1)
    with pytest.raises(ValueError, match="less than the vocabulary size 150, got 150"):
        engine.submit([1, 150, 3], max_new_tokens=1)
    assert request.result().finish_reason == "length"
