"""Several samples of a prompt: each the same as by itself, the prompt computed once, blocks copied when written to."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

import selective_compile as sc
from selective_compile.backend import compile_step_program
from selective_compile.runtime import Request
from selective_compile.runtime.replay import EventLog, replay_schedule
from selective_compile.runtime.replay_engine import replay_engine
from selective_compile.runtime.samples import Asked
from selective_compile.step import StepInputs
from tests.models import tiny
from tests.runtime.engine_checks import assert_nothing_left, check, expect, run_until_idle
from tests.runtime.simulated import VOCAB_SIZE, SimulatedModel, SimulatedProgram, simulated_engine
from tests.test_whole_functions import Recurrent

PROMPT = [1, 2, 3, 4, 5, 6, 7]
SAMPLED = {"do_sample": True, "temperature": 0.7, "max_new_tokens": 9}


def test_samples_are_those_of_requests_of_their_own_and_the_prompt_is_computed_once() -> None:
    engine = simulated_engine(block_size=4, block_reuse=False)
    request = engine.submit(PROMPT, request_id="a", num_return_sequences=np.int64(3), seed=np.int64(8), **SAMPLED)
    assert [each.request_id for each in request.samples] == ["a", "a/1", "a/2"]
    assert [each.params.seed for each in request.samples] == [8, 9, 10]
    assert engine.stats().waiting == 3
    engine.step()
    stats = engine.stats()
    assert (stats.tokens_computed, stats.tokens_generated, stats.running, stats.blocks_used) == (7, 3, 3, 2)
    engine.step()  # the last block of the prompt has been copied for two of them
    assert engine.stats().blocks_used == 4
    run_until_idle(engine)
    for each in request.samples:
        expect(each)
    assert engine.stats().tokens_computed == 7 + 3 * 8
    assert len({tuple(each.tokens) for each in request.samples}) == 3


def test_samples_of_the_engines_own_seeds_differ() -> None:
    engine = simulated_engine()
    request = engine.submit(PROMPT, num_return_sequences=2, **SAMPLED)
    run_until_idle(engine)
    assert request.samples[0].tokens != request.samples[1].tokens


@pytest.mark.parametrize("seed", range(12))
def test_samples_among_others_in_a_small_pool_with_cancellations(seed: int) -> None:
    rng = random.Random(seed)
    program = SimulatedProgram()
    engine = simulated_engine(
        program,
        block_size=rng.choice([1, 3, 4]),
        max_kv_tokens=rng.choice([60, 90, 4096]),
        token_budget=rng.choice([3, 8, 40]),
        max_requests=rng.choice([2, 4, 9]),
        block_reuse=rng.random() < 0.5,
        scheduler_policy=rng.choice(["max_utilization", "guaranteed_no_evict"]),
        batching=rng.choice(["inflight_fused", "inflight", "static"]),
    )
    requests: list[Request] = []

    def cancel_one() -> None:
        if requests and rng.random() < 0.15:
            rng.choice(requests).cancel()

    program.before_run = cancel_one
    for _ in range(8):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 12))]
        count = rng.randint(1, 5)
        eos = [rng.randrange(VOCAB_SIZE) for _ in range(6)]
        options = {**SAMPLED, "eos_token_id": eos, "max_new_tokens": rng.randint(1, 12)}
        requests += engine.submit(prompt, num_return_sequences=count, **options).samples
        for _ in range(rng.randint(0, 3)):
            engine.step()
            check(engine)
    run_until_idle(engine)
    ended = [request for request in requests if request.finish_reason != "cancelled"]
    assert ended and not engine._requests.num_unforked
    for request in ended:
        expect(request)


def test_a_sample_that_fails_or_ends_at_once_leaves_the_others() -> None:
    def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise OSError("gone")

    for broken in (0, 1):
        engine = simulated_engine()
        objects = [{"logits_processor": [fails]} if place == broken else {} for place in range(3)]
        asked = [Asked(config=None, options={**SAMPLED, **each, "seed": 3}) for each in objects]
        requests = engine.submit_samples(PROMPT, asked)
        run_until_idle(engine)
        assert [request.finish_reason == "error" for request in requests] == [place == broken for place in range(3)]
        expect(requests[2])


def test_a_step_that_fails_ends_all_samples() -> None:
    program = SimulatedProgram()

    def fail() -> None:
        raise OSError("lost")

    program.before_run = fail
    engine = simulated_engine(program)
    request = engine.submit(PROMPT, num_return_sequences=3, **SAMPLED)
    engine.drive()
    assert [each.finish_reason for each in request.samples] == ["error"] * 3
    assert_nothing_left(engine)


def test_refusals() -> None:
    engine = simulated_engine()
    with pytest.raises(ValueError, match="num_return_sequences must be 1 for greedy decoding, got 2"):
        engine.submit(PROMPT, num_return_sequences=2)
    with pytest.raises(ValueError, match="num_return_sequences must be an integer of at least 1, got 0"):
        engine.submit(PROMPT, num_return_sequences=0, do_sample=True)
    with pytest.raises(ValueError, match="num_return_sequences must be at most 1024, got 1000000000000"):
        engine.submit(PROMPT, num_return_sequences=10**12, do_sample=True)
    engine.submit(PROMPT, request_id="a/1")
    with pytest.raises(ValueError, match="request_id must not be that of an unfinished request, got 'a/1'"):
        engine.submit(PROMPT, request_id="a", num_return_sequences=2, **SAMPLED)
    assert engine.submit(PROMPT, request_id="a").samples[0].request_id == "a"


def test_samples_that_are_recorded_compute_their_own_prompts_and_are_replayed(tmp_path: Path) -> None:
    engine = simulated_engine(record=tmp_path / "run.jsonl", block_reuse=False)
    request = engine.submit(PROMPT, request_id="a", num_return_sequences=3, **SAMPLED)
    run_until_idle(engine)
    assert engine.stats().tokens_computed == 3 * (7 + 8)
    for each in request.samples:
        expect(each)
    log = EventLog.read(tmp_path / "run.jsonl")
    assert replay_schedule(log).difference is None
    again = replay_engine(log, SimulatedModel(), program=cast(Any, SimulatedProgram()))
    assert (again.difference, again.requests) == (None, 3)


def test_samples_of_a_program_whose_requests_cannot_go_on_from_others_compute_their_own_prompts() -> None:
    program = SimulatedProgram()
    program.forks_requests = False
    engine = simulated_engine(program, block_reuse=False)
    request = engine.submit(PROMPT, num_return_sequences=3, **SAMPLED)
    run_until_idle(engine)
    assert engine.stats().tokens_computed == 3 * (7 + 8)
    for each in request.samples:
        expect(each)


def test_samples_go_on_from_the_recurrent_states_of_their_prompt() -> None:
    model = Recurrent().eval()
    assert_samples_are_those_of_requests_alone(model, list(range(1, 20)), token_budget=8, max_requests=4)


def test_samples_share_the_blocks_of_every_window() -> None:
    model = tiny("gemma3_text")
    assert_samples_are_those_of_requests_alone(model, list(range(1, 20)), token_budget=8, block_size=4)


def assert_samples_are_those_of_requests_alone(model: nn.Module, prompt: list[int], **config: Any) -> None:
    """Three beside one another, and beside one that is in the midst of its prompt when they fork."""
    program = compile_step_program(model, sc.EngineConfig(compile=False))
    engine = sc.Engine(model, sc.EngineConfig(compile=False, block_reuse=False, **config), program=program)
    sampled = engine.submit(prompt, num_return_sequences=3, seed=5, **SAMPLED)
    other = engine.submit(list(reversed(prompt)), max_new_tokens=6, do_sample=False)
    while engine.step():
        engine._scheduler.check()
    assert engine.stats().tokens_computed == 2 * len(prompt) + 3 * 8 + 5
    for place, each in enumerate(sampled.samples):
        alone = sc.Engine(model, engine.config, program=program)
        assert alone.submit(prompt, seed=5 + place, **SAMPLED).result().tokens == each.result().tokens
    alone = sc.Engine(model, engine.config, program=program)
    assert alone.submit(other.prompt_ids, max_new_tokens=6, do_sample=False).result().tokens == other.result().tokens


@pytest.mark.parametrize("batching", ["inflight_fused", "inflight", "static"])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_the_others_go_on_in_the_place_of_a_first_that_is_cancelled(batching: str, steps: int) -> None:
    """With what it has computed, and before whoever came later."""
    engine = simulated_engine(token_budget=4, block_size=2, block_reuse=False, batching=batching, max_requests=4)
    first, second, third = engine.submit(PROMPT + PROMPT, num_return_sequences=3, seed=2, **SAMPLED).samples
    engine.submit([9] * 5, max_new_tokens=3)
    for _ in range(steps):
        engine.step()
    computed = engine.stats().tokens_computed
    first.cancel()
    check(engine)
    engine.step()
    check(engine)
    assert second.timing.queued is not None
    second.cancel()
    check(engine)
    run_until_idle(engine)
    expect(third)
    assert first.tokens == [] and third.finish_reason == "length"
    assert computed == 4 * steps and engine.stats().tokens_computed == 14 + 8 + 5 + 2


def test_a_first_that_is_cancelled_while_the_prompt_is_computed_gives_the_others_one_first_token() -> None:
    program = SimulatedProgram()
    engine = simulated_engine(program)
    samples = engine.submit(PROMPT, num_return_sequences=4, seed=2, logprobs=True, **SAMPLED).samples

    def cancel() -> None:
        samples[2].cancel()
        samples[0].cancel()

    program.before_run = cancel
    engine.step()
    program.before_run = lambda: None
    check(engine)
    assert [len(each.tokens) for each in samples] == [0, 1, 0, 1]
    run_until_idle(engine)
    expect(samples[1])
    expect(samples[3])
    assert engine.stats().tokens_computed == 7 + 2 * 8


def test_drafts_are_those_of_the_sample_that_goes_on() -> None:
    engine = simulated_engine(token_budget=4)
    options = {**SAMPLED, "max_new_tokens": 30, "top_k": 2}
    asked = [Asked(config=None, options={**options, **lookup}) for lookup in ({}, {"prompt_lookup_num_tokens": 3})]
    first, second = engine.submit_samples([1, 2] * 6, asked)
    engine.step()
    assert [state for state, _ in engine._drafting._drafts.values()] == [second.state]
    first.cancel()
    assert [state for state, _ in engine._drafting._drafts.values()] == [second.state]
    run_until_idle(engine)
    expect(second)
    assert not engine._drafting._drafts


@pytest.mark.parametrize("during_step", [1, 2, 3])
def test_recurrent_states_and_slots_are_those_of_the_sample_that_goes_on(
    during_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is cancelled while the model runs: in the midst of the prompt, and at its end."""
    model = Recurrent().eval()
    config = sc.EngineConfig(compile=False, token_budget=8, max_requests=3)
    program = compile_step_program(model, config)
    engine, prompt, steps = sc.Engine(model, config, program=program), list(range(1, 20)), []
    first, second, third = engine.submit(prompt, num_return_sequences=3, seed=5, **SAMPLED).samples
    run = engine._runner.run

    def cancelled_meanwhile(inputs: StepInputs) -> torch.Tensor:
        steps.append(inputs)
        if len(steps) == during_step:
            first.cancel()
        return run(inputs)

    monkeypatch.setattr(engine._runner, "run", cancelled_meanwhile)
    while engine.step():
        engine._scheduler.check()
    assert engine.stats().tokens_computed == len(prompt) + 2 * 8 and not engine._runner._slots._slots
    for place, each in ((1, second), (2, third)):
        alone = sc.Engine(model, config, program=program)
        assert alone.submit(prompt, seed=5 + place, **SAMPLED).result().tokens == each.result().tokens
