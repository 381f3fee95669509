"""What a model's steps make of the limits that its scan of a prompt has: `generate` computes with or without them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers.models.nemotron_h import modeling_nemotron_h

import selective_compile as sc
from selective_compile.coverage.random_model import random_model
from selective_compile.model_recurrences import recurrences_of
from tests.exactness import TOLERANCE, engine_error, padded_error
from tests.oracle import generated_alone

LIMIT = 0.9  # in the midst of the time steps that these weights give: half of them are less
PROMPTS = ([5], [3, 1], [7, 2, 9, 4, 11, 3, 2], list(range(1, 22)))
NEW = 9


def limited(family: str = "nemotron_h") -> Any:
    model = random_model(family)
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (LIMIT, float("inf"))
    return model


def requests_of(model: Any, **options: Any) -> tuple[list[list[int]], int]:
    """The tokens of requests that are preempted and cut, and how often one was preempted."""
    config = sc.EngineConfig(compile=False, block_size=4, max_kv_tokens=36, token_budget=6, fallback="refuse")
    engine = sc.Engine(model, config)
    asked = [engine.submit(prompt, max_new_tokens=NEW, do_sample=False, **options) for prompt in PROMPTS]
    return [list(request.result().tokens) for request in asked], engine.stats().preemptions


@pytest.mark.parametrize("family", ["nemotron_h", "zamba2"])
def test_what_is_generated_is_computed_without_limits_as_by_generate(family: str) -> None:
    model = limited(family)
    assert all(known.unlimited_steps == (known.limits is not None) for known in recurrences_of(model).values())
    found, preempted = requests_of(model)
    assert preempted
    assert found == [generated_alone(model, prompt, NEW) for prompt in PROMPTS]
    whole, _ = requests_of(model, use_cache=False)  # each step computes all tokens as those of a prompt
    assert whole != found
    ids = [torch.tensor([prompt]) for prompt in PROMPTS]
    given: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "use_cache": False}
    assert whole == [model.generate(each, **given)[0, each.shape[1] :].tolist() for each in ids]


def test_its_forward_limits_all_tokens() -> None:
    model = limited()
    assert str(sc.explain(model)).count("time step limited in prompts alone") == 1
    assert engine_error(model, vocabulary=model.config.vocab_size) < TOLERANCE
    assert padded_error(model, vocabulary=model.config.vocab_size)[0] < TOLERANCE


def test_steps_that_have_the_limits_too_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    mixer, step = modeling_nemotron_h.NemotronHMamba2Mixer, modeling_nemotron_h.mamba2_selective_state_update
    forward, running = mixer.forward, []

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        running[:] = [self]
        return forward(self, *args, **kwargs)

    def limiting(state: Any, hidden: Any, dt: Any, *args: Any, **kwargs: Any) -> Any:
        assert kwargs.pop("dt_softplus")
        dt = torch.nn.functional.softplus(dt + kwargs.pop("dt_bias")).clamp(*running[0].time_step_limit)
        return step(state, hidden, dt, *args, **kwargs)

    model = limited()
    with monkeypatch.context() as patched:
        patched.setattr(mixer, "forward", noted)
        patched.setattr(modeling_nemotron_h, "mamba2_selective_state_update", limiting)
        assert not any(known.unlimited_steps for known in recurrences_of(model).values())
        theirs = [generated_alone(model, prompt, NEW) for prompt in PROMPTS]
        found, _ = requests_of(model)
        assert found == theirs
    assert found != [generated_alone(model, prompt, NEW) for prompt in PROMPTS]


def test_where_the_limits_come_from_elsewhere_the_model_runs_its_own_steps() -> None:
    """A forward that somebody has put in its place runs the model's modules, whatever a copy of them has."""
    model = limited()
    forward = model.forward
    model.forward = functools.wraps(forward)(lambda *args, **kwargs: forward(*args, **kwargs))
    assert not any(known.limits for known in recurrences_of(model).values())
    assert sc.explain(model).verdict != "ragged"
    engine = sc.Engine(model, sc.EngineConfig(compile=False))
    found = [engine.submit(prompt, max_new_tokens=NEW, do_sample=False).result().tokens for prompt in PROMPTS]
    assert list(map(list, found)) == [generated_alone(model, prompt, NEW) for prompt in PROMPTS]


def test_modules_beside_them_may_run_isolated() -> None:
    model = limited()
    attention = next(module for module in model.modules() if type(module).__name__.endswith("Attention"))

    class Sorting(type(attention)):  # type: ignore[misc]
        def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            mixed, *rest = super().forward(hidden_states, *args, **kwargs)
            return mixed + torch.cummax(hidden_states.double(), 1).values.to(mixed.dtype) * 0, *rest

    attention.__class__ = Sorting
    engine = sc.Engine(model, sc.EngineConfig(compile=False))
    assert engine.report.verdict in ("isolated", "sequential")
    found = [engine.submit(prompt, max_new_tokens=NEW, do_sample=False).result().tokens for prompt in PROMPTS]
    assert list(map(list, found)) == [generated_alone(model, prompt, NEW) for prompt in PROMPTS]


def test_a_score_is_that_of_tokens_that_were_generated() -> None:
    engine = sc.Engine(limited(), sc.EngineConfig(compile=False))
    for prompt in PROMPTS[:3]:
        result = engine.submit(prompt, max_new_tokens=NEW, do_sample=False, logprobs=True).result()
        assert result.logprobs is not None
        assert engine.score(prompt, list(result.tokens)) == pytest.approx(result.logprobs, abs=1e-4)


def test_limits_that_change_nothing_are_none() -> None:
    assert {known.limits for known in recurrences_of(random_model("mamba2")).values()} == {None}


def test_a_prompt_cut_so_that_a_token_is_stepped_alone_is_refused() -> None:
    engine = sc.Engine(limited(), sc.EngineConfig(compile=False))
    with pytest.raises(ValueError, match="prefill_chunk_size must"):
        engine.submit([1, 2, 3, 4, 5], max_new_tokens=2, prefill_chunk_size=2)
    engine.submit([1, 2, 3, 4, 5], max_new_tokens=2, prefill_chunk_size=3).result()
