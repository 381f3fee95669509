"""Falcon, which repeats the heads of keys and values before it rotates the keys: exact, and each head kept once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

import selective_compile as sc
from selective_compile.step_program import StepProgram
from tests.exactness import TOLERANCE, engine_error, padded_error, step_program
from tests.models import VOCABULARY, tiny
from tests.oracle import assert_generated_alone

PROMPTS = [[5, 7, 9], [11], list(range(20, 61)), list(range(3, 20))]
NEW = 12
# Changes of the configuration, and the heads that are kept.
RELEASED: dict[str, tuple[dict[str, Any], int]] = {
    "falcon-40b": ({}, 2),
    "falcon2-11b": ({"num_ln_in_parallel_attn": 1, "rope_theta": 500042.0, "ffn_hidden_size": 256}, 2),
    "without multi_query": ({"multi_query": False}, 2),
    "bias": ({"bias": True}, 2),
    "one head": ({"num_kv_heads": 1}, 1),
    "as many heads": ({"num_kv_heads": 4}, 4),
    "falcon-7b": ({"new_decoder_architecture": False, "multi_query": True}, 1),
    "every head its own": ({"new_decoder_architecture": False, "multi_query": False, "num_kv_heads": 4}, 4),
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", RELEASED)
def test_a_released_configuration_is_exact_and_keeps_each_head_once(name: str, attention: str) -> None:
    changes, heads = RELEASED[name]
    model = tiny("falcon", attention=attention, **changes)
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    for bias in biases:
        torch.nn.init.normal_(bias, std=0.1, generator=torch.Generator().manual_seed(0))
    program = step_program(model)
    assert [site.num_kv_heads for site in program.call_sites] == [heads] * 2
    assert engine_error(model, vocabulary=VOCABULARY, program=program) < TOLERANCE
    assert_served(model, program)


def assert_served(model: Any, program: StepProgram) -> None:
    """Requests in steps of 16 tokens, with a pool in which not all have room."""
    config = sc.EngineConfig(compile=False, token_budget=16, block_size=8, max_kv_tokens=96)
    engine = sc.Engine(model, config, program=program)
    requests = [engine.submit(p, GenerationConfig(max_new_tokens=NEW, do_sample=False)) for p in PROMPTS]
    for prompt, request in zip(PROMPTS, requests, strict=True):
        assert_generated_alone(model, prompt, request.result().tokens)
    assert engine.stats().preemptions > 0


class Padded(torch.nn.Module):
    """A model whose second argument is no mask."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.model(ids, attention_mask=mask).logits
        return logits


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_padded_call_is_exact(attention: str) -> None:
    error, report = padded_error(Padded(tiny("falcon", attention=attention)), vocabulary=VOCABULARY)
    assert error < TOLERANCE
    assert report.ok, report
    assert {call.kv_heads for call in report.calls} == {2}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_linear_bias_that_is_rounded_is_refused_by_name(attention: str) -> None:
    """Slopes times positions are rounded to bfloat16, whatever the model's type: from position 257 on no line is."""
    model = tiny("falcon", attention=attention, alibi=True, **RELEASED["every head its own"][0])
    with pytest.raises(sc.RefusedError, match="no linear function of the distance"):
        step_program(model)
