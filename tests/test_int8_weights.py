"""``EngineConfig(weights="int8")``: logits of the rounded model, updates that are seen, and what is refused."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn
from transformers import GenerationConfig

from selective_compile.backend import compile_step_program
from selective_compile.coverage.random_model import random_model
from selective_compile.int8_ops import as_int8
from selective_compile.options import EngineConfig
from selective_compile.runtime.engine import Engine

CONFIG = EngineConfig(compile=False, weights="int8", max_kv_tokens=1024)
PROMPTS = [[5, 6, 7, 8, 9], [3], [9, 4, 2, 11, 13, 1, 7]]


def rounded(model: nn.Module) -> nn.Module:
    """The model whose linear layers have the weights that int8 stands for."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for layer in [module for module in other.modules() if isinstance(module, nn.Linear)]:
            numbers, scales = as_int8(layer.weight)
            layer.weight = nn.Parameter(numbers * scales[:, None])
    return other


def tokens_of(engine: Engine) -> list[list[int]]:
    config = GenerationConfig(max_new_tokens=12, do_sample=False)
    handles = [engine.submit(prompt, config) for prompt in PROMPTS]
    while engine.step():
        pass
    return [list(handle.result().tokens) for handle in handles]


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_neox"])
def test_tokens_are_those_of_the_model_with_rounded_weights(model_type: str, caplog: pytest.LogCaptureFixture) -> None:
    model = random_model(model_type)
    with caplog.at_level(logging.INFO, "selective_compile"):
        engine = Engine(model, CONFIG)
    assert "weights are int8" in caplog.text and "relative error" in caplog.text
    expected = rounded(model)  # embeddings, tied ones too, are not rounded
    assert tokens_of(engine) == tokens_of(Engine(expected, EngineConfig(compile=False, max_kv_tokens=1024)))
    errors = compile_step_program(model, CONFIG).int8_weights.errors  # type: ignore[union-attr]
    assert errors and 0.001 < max(errors) < 0.02


def test_a_changed_weight_is_seen() -> None:
    model = random_model("llama")
    engine = Engine(model, CONFIG)
    before = tokens_of(engine)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-3)
        model.lm_head.weight.data = torch.randn_like(model.lm_head.weight)
    after = tokens_of(engine)
    assert after != before
    assert after == tokens_of(Engine(rounded(model), EngineConfig(compile=False, max_kv_tokens=1024)))


def test_inductor_compiles_it_and_the_weights_take_a_fourth_of_the_bytes() -> None:
    model = random_model("llama")
    program = compile_step_program(model, EngineConfig(weights="int8"))
    linear = sum(m.weight.nbytes for m in model.modules() if isinstance(m, nn.Linear))
    assert linear / 4 < program.int8_weights.num_bytes < 0.5 * linear  # type: ignore[union-attr]
    compiled = Engine(model, EngineConfig(weights="int8", max_kv_tokens=1024), program=program)
    assert tokens_of(compiled) == tokens_of(Engine(model, CONFIG))


def test_models_without_a_linear_layer_of_their_own_are_refused() -> None:
    with pytest.raises(ValueError, match="weights must be 'model' for a model that runs whole"):
        Engine(random_model("reformer"), EngineConfig(compile=False, weights="int8"))
    with pytest.raises(ValueError, match="weights must be one of 'model', 'int8', got 'int4'"):
        EngineConfig(weights="int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weights must be 'model' on cpu for a model without linear layers"):
        Engine(random_model("llama").half(), EngineConfig(compile=False, weights="int8"))
