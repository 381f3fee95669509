"""In bfloat16 the engine is no further from the float32 model than Hugging Face's own bfloat16 forward is."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from transformers import GenerationConfig

import selective_compile as sc
from selective_compile.backend import compile_step_program
from selective_compile.coverage.recorder import Recorder
from tests.models import LATENT_OWN, tiny
from tests.oracle import reference_logits

ALLOWED = 1.1
CONFIG = sc.EngineConfig(compile=False, token_budget=64, max_kv_tokens=16 * 60)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", *LATENT_OWN])
def test_error_against_float32(family: str) -> None:
    """Over about 500 rows of logits of 16 requests, chunked and batched."""
    exact = tiny(family, num_hidden_layers=4) if family == "llama" else tiny(family)
    model = copy.deepcopy(exact).to(torch.bfloat16)
    rounded = copy.deepcopy(model).float()  # the same weights, computed with in float32
    recorder = Recorder(compile_step_program(model, CONFIG))
    engine = sc.Engine(model, CONFIG, program=recorder, observers=[recorder.observe])  # type: ignore[arg-type]
    draw = random.Random(1)
    prompts = [[draw.randrange(199) for _ in range(draw.randint(5, 80))] for _ in range(16)]
    requests = [engine.submit(p, GenerationConfig(max_new_tokens=32), request_id=i) for i, p in enumerate(prompts)]
    ours, theirs = 0.0, 0.0
    for number, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        tokens = request.result().tokens
        truth = reference_logits(rounded, prompt, tokens)
        ours += float((torch.stack(recorder.logits[number]).float() - truth).square().sum())
        theirs += float((reference_logits(model, prompt, tokens) - truth).square().sum())
    assert ours**0.5 <= ALLOWED * theirs**0.5
