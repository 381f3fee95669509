"""A checkpoint whose `config.json` has lists where its configuration had tuples is compiled as before it was saved."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import selective_compile as sc
from selective_compile.backend import compile_step_program, report_of
from tests.models import VOCABULARY
from tests.oracle import assert_generated_alone

NEW = 9
CONFIG = sc.EngineConfig(compile=False, token_budget=7, max_requests=4)


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Mamba-2 with several groups, saved and loaded again: its limits of the time step are a list."""
    folder: Path = tmp_path_factory.mktemp("mamba2")
    torch.manual_seed(0)
    sizes = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 4, "chunk_size": 8}
    config = AutoConfig.for_model("mamba2", vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.generation_config.eos_token_id = None
    assert model.config.time_step_limit == [0.0, float("inf")]
    return model


def test_prompts_cut_into_steps_give_the_tokens_of_generate(reloaded: Any) -> None:
    program = compile_step_program(reloaded, CONFIG)
    report = report_of(program, reloaded)
    assert report.verdict == "ragged", str(report)
    assert [call.family for call in report.recurrences].count("ssd") == 2
    draw = random.Random(3)
    prompts = [[draw.randrange(VOCABULARY) for _ in range(length)] for length in (1, 2, 19, 8, 41, 5)]
    engine = sc.Engine(reloaded, CONFIG, program=program)
    requests = [engine.submit(prompt, max_new_tokens=NEW, do_sample=False) for prompt in prompts]
    for prompt, request in zip(prompts, requests, strict=True):
        assert_generated_alone(reloaded, prompt, request.result().tokens)
