"""Models whose attention sees the keys that an indexer selects: ragged, and exactly the model's own."""

from __future__ import annotations

from typing import Any

import torch

import selective_compile as sc
from selective_compile.backend import compile_step_program
from selective_compile.coverage.random_model import random_model, vocabulary_of
from tests.exactness import TOLERANCE, engine_error, padded_error
from tests.oracle import assert_generated_alone


def test_logits_in_chunks_and_in_a_padded_call() -> None:
    """Of a model with sinks, in whose second layer the selection of the first is used again."""
    model = random_model("hy_v4")
    assert engine_error(model, vocabulary=vocabulary_of(model), lengths=(1, 2, 13, 21, 7)) < TOLERANCE
    error, report = padded_error(model, vocabulary=vocabulary_of(model))
    assert report.ok and error < TOLERANCE
    assert {call.mask.partition("best ")[2] for call in report.calls} == {"4 keys by 8 heads of 8"}


def test_tokens_under_preemption_and_with_shared_prefixes() -> None:
    """Index keys lie in blocks beside the keys and values: they are found again, and computed again, with them."""
    model: Any = random_model("deepseek_v32")
    config = sc.EngineConfig(token_budget=7, max_requests=4, block_size=4, max_kv_tokens=56, compile=False)
    program = compile_step_program(model, config)
    sites = [(site.key_head_size, site.value_head_size) for site in program.call_sites]
    assert sites == [(20, 0), (20, 0), (8, 0), (8, 0)]
    engine = sc.Engine(model, config, program=program)
    generator = torch.Generator().manual_seed(3)
    shared = torch.randint(1, vocabulary_of(model), (12,), generator=generator).tolist()
    # With n = 2, two keys have the score 0 for one token, and the model leaves open which of them it selects.
    prompts = [shared[: 3 + n] + shared[n : n + 5] for n in (0, 1, 3, 4, 5, 6)] + [[*shared, 5, 6], [*shared, 7]]
    requests = [engine.submit(prompt, max_new_tokens=12) for prompt in prompts]
    for prompt, request in zip(prompts, requests, strict=True):
        assert_generated_alone(model, prompt, request.result().tokens)
    assert engine.stats().preemptions > 0
    again = engine.submit(prompts[-2], max_new_tokens=6)
    assert_generated_alone(model, prompts[-2], again.result().tokens)
    assert engine.stats().tokens_reused > 0
