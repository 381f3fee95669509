"""Log probabilities of given tokens: the model's own, whatever chunks, preemption and found prefixes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import selective_compile as sc
from selective_compile.backend import compile_step_program
from selective_compile.runtime.replay import EventLog, replay_schedule
from selective_compile.runtime.replay_engine import replay_engine
from tests.models import tiny
from tests.runtime.simulated import SimulatedModel, SimulatedProgram, simulated_engine
from tests.test_isolation import Decay, Mixed
from tests.test_sequential_program import unproved, whole
from tests.test_whole_functions import Recurrent

CONFIG = sc.EngineConfig(compile=False, max_kv_tokens=256, block_size=4)


@pytest.fixture(scope="module")
def llama() -> Any:
    model = tiny("llama", attention="eager")
    return model, compile_step_program(model, CONFIG)


def alone(model: Any, tokens: list[int]) -> torch.Tensor:
    """Of each token but the first."""
    with torch.no_grad():
        found = model(torch.tensor([tokens]))
        logprobs = getattr(found, "logits", found)[0, :-1].float().log_softmax(-1)
    return logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


@pytest.mark.parametrize("budget", [512, 7])
def test_scores_are_the_models_own(llama: Any, budget: int) -> None:
    model, program = llama
    engine = sc.Engine(model, sc.EngineConfig(**{**vars(CONFIG), "token_budget": budget}), program=program)
    tokens = [(7 * place + 3) % 199 for place in range(40)]
    wanted = alone(model, tokens)
    others = [engine.submit(tokens[:9], max_new_tokens=30) for _ in range(3)]
    for cut in (1, 8, 13, 39):  # the second and later ones find blocks of the first
        found = engine.score(tokens[:cut], tokens[cut:])
        assert len(found) == 40 - cut
        assert torch.allclose(torch.tensor(found), wanted[cut - 1 :], atol=1e-4)
    assert engine.stats().tokens_reused > 0
    assert all(request.result().error is None for request in others)


def test_scores_do_not_ask_for_what_the_models_own_configuration_does(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, program = llama
    fields = {"stop_strings": ["a"], "guidance_scale": 2.0, "do_sample": True, "cache_implementation": "quantized"}
    monkeypatch.setattr(model, "generation_config", GenerationConfig())
    for name, value in fields.items():
        setattr(model.generation_config, name, value)
    engine = sc.Engine(model, CONFIG, program=program)
    with pytest.raises(ValueError, match="cache_implementation"):
        engine.submit([1, 2])
    assert torch.allclose(torch.tensor(engine.score([5], [6, 7])), alone(model, [5, 6, 7]), atol=1e-4)


def test_log_probabilities_of_the_prompt_with_samples_and_preemption(llama: Any) -> None:
    model, program = llama
    engine = sc.Engine(model, sc.EngineConfig(**{**vars(CONFIG), "token_budget": 9}), program=program)
    tokens = [(11 * place + 5) % 199 for place in range(30)]
    engine.submit(tokens, max_new_tokens=2)
    request = engine.submit(tokens, prompt_logprobs=True, do_sample=True, num_return_sequences=2, max_new_tokens=6)
    for _ in range(3):
        engine.step()
    engine.drop_computed()
    for sample in request.samples:
        result = sample.result()
        assert result.prompt_logprobs is not None and len(result.prompt_logprobs) == 29
        assert torch.allclose(torch.tensor(result.prompt_logprobs), alone(model, tokens), atol=1e-4)
    assert engine.submit(tokens, max_new_tokens=1).result().prompt_logprobs is None
    assert engine.submit([5], prompt_logprobs=True, max_new_tokens=1).result().prompt_logprobs == ()


@pytest.mark.parametrize(
    "make", [partial(tiny, "gemma3_text"), Recurrent, partial(Mixed, Decay)], ids=["windows", "recurrent", "isolated"]
)
def test_scores_where_blocks_are_given_back_and_where_requests_keep_more_than_blocks(make: Any) -> None:
    model = make().eval()
    engine = sc.Engine(model, sc.EngineConfig(compile=False, token_budget=8, block_size=4, max_kv_tokens=256))
    tokens = [(7 * place + 3) % 29 for place in range(30)]
    wanted = alone(model, tokens)
    for cut in (1, 9, 29):
        engine.submit(tokens, max_new_tokens=3, do_sample=False)
        found = engine.score(tokens[:cut], tokens[cut:])
        assert torch.allclose(torch.tensor(found), wanted[cut - 1 :], atol=1e-4)


def test_recorded_scores_are_replayed(tmp_path: Path) -> None:
    engine = simulated_engine(record=tmp_path / "run.jsonl", block_size=2)
    tokens = list(range(1, 20))
    first = engine.score(tokens[:5], tokens[5:])
    assert engine.score(tokens[:9], tokens[9:]) == first[4:]
    assert engine.stats().tokens_reused == 8, "up to the first row that is wanted"
    engine.submit(
        tokens, prompt_logprobs=True, max_new_tokens=3, logits_processor=[lambda ids, scores: scores]
    ).result()
    log = EventLog.read(tmp_path / "run.jsonl")
    assert replay_schedule(log).difference is None
    program: Any = SimulatedProgram()
    assert replay_engine(log, SimulatedModel(), program=program).difference is None


def test_refusals(llama: Any) -> None:
    model, program = llama
    engine = sc.Engine(model, CONFIG, program=program)
    with pytest.raises(ValueError, match="continuation_ids must hold at least one token id, got none"):
        engine.score([1], [])
    with pytest.raises(ValueError, match="prompt_logprobs must be True or False, got 'all'"):
        engine.submit([1], prompt_logprobs="all")
    with pytest.raises(ValueError, match="prompt_logprobs must be None with num_beams=2, got True"):
        engine.submit([1], prompt_logprobs=True, num_beams=2)
    sequential = whole(unproved("mamba"))
    with pytest.raises(ValueError, match="prompt_logprobs must be False for a model that runs whole"):
        sequential.score([1], [2])
