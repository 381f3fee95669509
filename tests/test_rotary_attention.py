"""Engines whose attention rotates its own queries and keys: Hugging Face's tokens, and logits as exact as its own."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

import selective_compile as sc
from selective_compile import programs
from selective_compile.backend import compile_step_program, report_of
from selective_compile.coverage.random_model import random_model, vocabulary_of
from selective_compile.step_program import StepProgram
from tests.exactness import TOLERANCE, engine_error, logits_in_chunks
from tests.longrope import longrope
from tests.models import tiny
from tests.oracle import assert_generated_alone

CONFIG = sc.EngineConfig(compile=False, max_kv_tokens=512, block_size=4, token_budget=9)
REFERENCE = replace(CONFIG, implementation="reference")
PROMPTS = [[(13 * place + 7 * n) % 97 for place in range(length)] for n, length in enumerate((11, 3, 1))]
PASS = "fuse rotary"


def fused(program: Any) -> int:
    """How many attention calls, by the report on the program."""
    counts = {record.name: record.count for record in report_of(program, torch.nn.Identity()).passes}
    return counts[PASS]


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph that the Triton kernels get, whatever runs it."""
    monkeypatch.setattr(programs, "runs_triton", lambda *_: True)


@pytest.mark.parametrize(("family", "layers"), (("llama", 1), ("qwen3", 2)))
def test_tokens_are_those_of_generate_in_the_interpreter(family: str, layers: int) -> None:
    """Chunked and batched."""
    pytest.importorskip("triton")
    model = tiny(family, attention="eager", num_hidden_layers=layers)
    config = replace(CONFIG, implementation="triton")
    program = compile_step_program(model, config)
    assert fused(program) == layers
    engine = sc.Engine(model, config, program=program)
    requests = [engine.submit(prompt, max_new_tokens=3, do_sample=False) for prompt in PROMPTS]
    for prompt, request in zip(PROMPTS, requests, strict=True):
        assert_generated_alone(model, prompt, request.result().tokens)


def test_the_native_path_stays_as_it_is() -> None:
    program = compile_step_program(tiny("llama", num_hidden_layers=1), CONFIG)
    assert isinstance(program, StepProgram)
    assert PASS not in {record.name for record in program.rewritten.records}


@pytest.mark.parametrize(
    ("family", "count"),
    [("gpt_neox", 2), ("cohere2", 1), ("glm", 2)],
)
def test_logits_are_the_models(family: str, count: int, on_triton: None) -> None:
    """Rotated in part, out of one projection; interleaved, in one of two layers; both, with a column for each pair."""
    model = random_model(family)
    program = compile_step_program(model, replace(REFERENCE, fallback="refuse"))
    assert isinstance(program, StepProgram) and fused(program) == count
    lengths = (1, 2, 23, 7)
    error = engine_error(model, vocabulary=vocabulary_of(model), lengths=lengths, chunk=5, program=program)
    assert error < TOLERANCE


@pytest.mark.parametrize("family", ["phi3", "llama"])
def test_each_request_is_rotated_in_its_own_form(family: str, on_triton: None) -> None:
    model = longrope(30, family)
    program = compile_step_program(model, replace(REFERENCE, fallback="refuse"))
    assert isinstance(program, StepProgram) and fused(program) == 2
    error = engine_error(model, vocabulary=100, lengths=(1, 30, 31, 60), chunk=7, program=program)
    assert error < TOLERANCE


def test_error_in_bfloat16(on_triton: None) -> None:
    """Of a model with norms: no larger than 1.1 times that of Hugging Face's own bfloat16 forward."""
    model: Any = tiny("qwen3", initializer_range=0.2).to(torch.bfloat16)
    exact = copy.deepcopy(model).float()
    program = compile_step_program(model, REFERENCE)
    assert isinstance(program, StepProgram) and fused(program) == 2
    prompts = [[(13 * place + 7 * n) % 97 for place in range(20 + n)] for n in range(8)]
    ours, theirs = 0.0, 0.0
    for prompt, logits in zip(prompts, logits_in_chunks(program, prompts, 9), strict=True):
        with torch.no_grad():
            truth, own = (each(torch.tensor([prompt])).logits[0].float() for each in (exact, model))
        ours += float((logits.float() - truth).square().sum())
        theirs += float((own - truth).square().sum())
    assert ours**0.5 <= 1.1 * theirs**0.5
