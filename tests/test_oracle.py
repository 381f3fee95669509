"""The whole engine against Hugging Face's own generate, on each request alone, with eager attention in float32."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

import selective_compile as sc
from selective_compile.backend import StepProgram
from selective_compile.coverage.recorder import Recorder
from tests.exactness import engine_error, step_program
from tests.models import FAMILIES, VOCABULARY, shallow, tiny
from tests.oracle import MARGIN, assert_generated_alone, assert_same_tokens, reference_logits

CONFIG = sc.EngineConfig(compile=False, token_budget=64, block_size=16, max_kv_tokens=16 * 14)
REQUESTS = 32
WITHOUT_CACHE = ("llama", "gemma3_text")  # whose padded calls are made without a cache, too


@dataclass(frozen=True, kw_only=True)
class Compiled:
    model: PreTrainedModel
    program: StepProgram


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def compiled(family: str) -> dict[str | None, Compiled]:
    """The family's model as it comes and, shallow, with eager attention: each traced once for all tests."""
    models = {None: tiny(family), "eager": tiny(family, attention="eager", **shallow(family))}
    return {name: Compiled(model=model, program=step_program(model)) for name, model in models.items()}


def test_engine_equals_generate_on_each_request_alone(family: str, compiled: dict[str | None, Compiled]) -> None:
    """Mixed lengths, random arrivals, 64 tokens a step, and a pool so small that requests are preempted."""
    model, program = compiled[None].model, compiled[None].program
    recorder = Recorder(program)
    # Where every layer has a window, a request holds the blocks of that window alone, and all fit.
    windowed = all(site.window for site in program.call_sites)
    engine = sc.Engine(model, CONFIG, program=recorder, observers=[recorder.observe])  # type: ignore[arg-type]
    draw = random.Random(family)
    prompts, requests = [], []
    for number in range(REQUESTS):
        prompts.append([draw.randrange(model.config.vocab_size) for _ in range(draw.randint(1, 60))])
        config = GenerationConfig(max_new_tokens=draw.randint(1, 40), do_sample=False)
        requests.append(engine.submit(prompts[-1], config, request_id=number))
        for _ in range(draw.randint(0, 3)):
            engine.step()
    results = [request.result() for request in requests]
    alone = tiny(family, attention="eager")
    stats = engine.stats()
    assert windowed or stats.preemptions > 0
    assert stats.blocks_used == 0
    for number, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        assert_same_tokens(alone, prompt, result.tokens)
        difference = torch.stack(recorder.logits[number]) - reference_logits(alone, prompt, result.tokens)
        assert float(difference.abs().max()) < MARGIN
        if number % 4 == 0:  # whose tokens are those that its logits ask for, as was looked at of each
            assert_generated_alone(alone, prompt, result.tokens)


@pytest.mark.parametrize("attention", [None, "eager"])
def test_every_attention_call_is_replaced(attention: str | None, compiled: dict[str | None, Compiled]) -> None:
    model, program = compiled[attention].model, compiled[attention].program
    targets = [str(node.target) for node in program.rewritten.flat.module.graph.nodes]  # type: ignore[union-attr]
    assert targets.count("selective.ragged_attention.default") == model.config.num_hidden_layers
    assert not any("softmax" in target or "scaled_dot" in target for target in targets)


def test_model_loaded_with_eager_attention_is_exact(compiled: dict[str | None, Compiled]) -> None:
    eager = compiled["eager"]
    assert engine_error(eager.model, vocabulary=VOCABULARY, program=eager.program) < MARGIN


def test_padded_call_equals_the_model(family: str, compiled: dict[str | None, Compiled]) -> None:
    """Padding left, right, on both sides, and none, in one batch; with the cache that comes back, and some without."""
    model, eager = tiny(family, **shallow(family)), compiled["eager"].model
    fast = torch.compile(model, backend="selective", options={"inductor": False})
    ids = torch.randint(0, model.config.vocab_size, (4, 23), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    mask[1, 14:] = 0
    mask[2, :3] = 0
    mask[2, 20:] = 0
    for options in [{}, {"use_cache": False}] if family in WITHOUT_CACHE else [{}]:
        with torch.no_grad():
            ours = fast(ids, attention_mask=mask, **options).logits
            theirs = eager(ids, attention_mask=mask, **options).logits
        assert sc.selective.reports[-1].ok, sc.selective.reports[-1]
        assert ours.shape == theirs.shape
        assert float((ours - theirs)[mask.bool()].abs().max()) < MARGIN
        assert not ours[~mask.bool()].any()
