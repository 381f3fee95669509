"""The engine: the same tokens whatever the traffic, what it tells of itself, and nothing leaks."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from selective_compile.runtime import StepRecord
from tests.runtime.engine_checks import assert_nothing_left, check, expect, run_until_idle
from tests.runtime.simulated import (
    VOCAB_SIZE,
    SimulatedModel,
    SimulatedProgram,
    expected_tokens,
    simulated_engine,
)


def random_requests(count: int, seed: int) -> list[dict[str, Any]]:
    """Arguments of `submit`: short and long, greedy and sampled, some that stop early."""
    source = random.Random(seed)
    return [
        {
            "prompt_ids": [source.randrange(VOCAB_SIZE) for _ in range(source.randint(1, 40))],
            "request_id": f"r{number}",
            "max_new_tokens": source.randint(1, 20),
            "do_sample": source.random() < 0.5,
            "temperature": 0.7,
            "top_k": 20,
            "top_p": 0.95,
            "seed": number,
            "eos_token_id": source.sample(range(VOCAB_SIZE), 2) if source.random() < 0.5 else None,
        }
        for number in range(count)
    ]


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    token_budget=st.integers(1, 64),
    max_requests=st.integers(1, 10),
    block_size=st.integers(1, 9),
    spare_blocks=st.integers(0, 10),
)
def test_tokens_do_not_depend_on_traffic_budget_blocks_or_pool(
    seed: int, token_budget: int, max_requests: int, block_size: int, spare_blocks: int
) -> None:
    """Random arrivals on pools that hold one to a few requests, so that there is preemption too."""
    source = random.Random(seed)
    arguments = random_requests(10, seed)
    longest = max(len(one["prompt_ids"]) + one["max_new_tokens"] - 1 for one in arguments)
    engine = simulated_engine(
        token_budget=token_budget,
        max_requests=max_requests,
        block_size=block_size,
        max_kv_tokens=(-(-longest // block_size) + spare_blocks) * block_size,
    )
    source.shuffle(arguments)
    requests = []
    for one in arguments:
        requests.append(engine.submit(**one))
        for _ in range(source.randint(0, 4)):
            engine.step()
            check(engine)
    run_until_idle(engine)
    for request in requests:
        expect(request)


def test_preemption_changes_no_token_and_repeats_none() -> None:
    engine = simulated_engine(max_kv_tokens=48, block_size=4)
    requests = [engine.submit([number, 5], max_new_tokens=30, do_sample=number % 2 == 1) for number in range(6)]
    streams = [iter(request) for request in requests]
    streamed = [[next(stream)] for stream in streams]
    for tokens, stream in zip(streamed, streams, strict=True):
        tokens += stream
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.tokens_generated == 6 * 30
    # Every token but the last of each request is computed once, and some again.
    assert stats.tokens_computed > 6 * (2 + 30 - 1)
    for request, tokens in zip(requests, streamed, strict=True):
        expect(request)
        assert tokens == request.tokens
    assert_nothing_left(engine)


def test_stop_and_length() -> None:
    engine = simulated_engine()
    free = engine.submit([1, 2, 3], max_new_tokens=12)
    run_until_idle(engine)
    eos = free.tokens[6]
    first = free.tokens.index(eos)
    stopped = engine.submit([1, 2, 3], max_new_tokens=12, eos_token_id=[VOCAB_SIZE - 1, eos])
    at_the_end = engine.submit([1, 2, 3], max_new_tokens=first + 1, eos_token_id=eos)
    run_until_idle(engine)
    assert (free.finish_reason, stopped.finish_reason, at_the_end.finish_reason) == ("length", "stop", "stop")
    assert stopped.tokens == at_the_end.tokens == free.tokens[: first + 1]


def test_a_prompt_and_its_tokens_may_fill_the_pool() -> None:
    engine = simulated_engine(max_kv_tokens=16, block_size=4, token_budget=5)
    requests = [engine.submit(range(12), max_new_tokens=5), engine.submit([3], max_new_tokens=16)]
    run_until_idle(engine)
    for request in requests:
        expect(request)


def test_an_unfinished_prompt_is_not_sampled() -> None:
    engine = simulated_engine(token_budget=4)
    request = engine.submit(range(9), max_new_tokens=2)
    lengths = []
    while engine.step():
        lengths.append(len(request.tokens))
    assert lengths == [0, 0, 1, 2]


def test_new_weights_drop_what_the_old_ones_computed() -> None:
    program = SimulatedProgram()
    engine = simulated_engine(program)
    request = engine.submit([4, 5, 6], max_new_tokens=6)
    for _ in range(3):
        engine.step()
    before = request.tokens
    program.weights = 1
    run_until_idle(engine)
    assert request.tokens[:3] == before
    # As a prompt that contains what was generated, under the new weights alone.
    params = engine.submit([1], max_new_tokens=3).params
    assert request.tokens[3:] == expected_tokens([4, 5, 6, *before], params, weights=1)
    assert engine.stats().preemptions == 1


def test_the_default_seed_belongs_to_the_id() -> None:
    def tokens(seed: int, request_id: str, others: int) -> list[int]:
        engine = simulated_engine(seed=seed)
        for _ in range(others):
            engine.submit([1], max_new_tokens=2)
        request = engine.submit([1, 2], request_id=request_id, max_new_tokens=20, do_sample=True)
        return list(request)

    assert tokens(0, "a", 0) == tokens(0, "a", 3)
    assert len({tuple(tokens(seed, name, 0)) for seed in (0, 1) for name in "ab"}) == 4


def test_logprobs() -> None:
    engine = simulated_engine()
    asked = engine.submit([1, 2], max_new_tokens=4, logprobs=True)
    plain = engine.submit([1, 2], max_new_tokens=4)
    result = asked.result()
    assert result.logprobs is not None and len(result.logprobs) == 4
    assert all(-5 < logprob < 0 for logprob in result.logprobs)
    assert asked.logprobs == list(result.logprobs)
    assert plain.result().logprobs is None and plain.logprobs is None


def test_generation_config_of_request_and_model() -> None:
    model = SimulatedModel(max_new_tokens=3, eos_token_id=VOCAB_SIZE + 5)
    engine = simulated_engine(model=model)
    by_default = engine.submit([1])
    chosen = engine.submit([1], GenerationConfig(max_new_tokens=5))
    run_until_idle(engine)
    assert (len(by_default.tokens), len(chosen.tokens)) == (3, 5)
    assert by_default.params.eos_token_ids == {VOCAB_SIZE + 5}


def test_observers_see_every_share() -> None:
    records: list[StepRecord] = []
    engine = simulated_engine(observers=[records.append], token_budget=4, max_kv_tokens=16, block_size=2)
    requests = [
        engine.submit(range(5), request_id="a", max_new_tokens=8),
        engine.submit([1], max_new_tokens=8),
    ]
    run_until_idle(engine)
    stats = engine.stats()
    assert [record.step for record in records] == list(range(stats.steps))
    assert sum(share.tokens for record in records for share in record.shares) == stats.tokens_computed
    assert sum(len(record.preempted) for record in records) == stats.preemptions > 0
    assert records[0].shares == (("a", 4, True, False, 0),)
    assert records[1].shares == (("a", 1, True, True, 4), (requests[1].request_id, 1, True, True, 0))
    assert records[2].shares == (("a", 1, False, True, 5), (requests[1].request_id, 1, False, True, 1))
    assert records[-1].seconds == stats.last_step_seconds


def test_stats() -> None:
    engine = simulated_engine(max_kv_tokens=64, block_size=4, max_requests=1)
    assert engine.stats().last_step_seconds is None
    engine.submit([1, 2, 3, 4, 5], max_new_tokens=2)
    engine.submit([1], max_new_tokens=2)
    engine.step()
    stats = engine.stats()
    assert (stats.steps, stats.running, stats.waiting) == (1, 1, 1)
    assert (stats.blocks_free, stats.blocks_used, stats.blocks_max, stats.block_size) == (14, 2, 16, 4)
    assert (stats.tokens_computed, stats.tokens_generated, stats.preemptions, stats.graphs) == (5, 1, 0, 1)
    assert stats.last_step_seconds is not None and stats.last_step_seconds > 0


def test_nothing_to_do() -> None:
    engine = simulated_engine()
    assert not engine.step()
    assert engine.stats().steps == 0


def test_finished_requests_are_let_go() -> None:
    engine = simulated_engine()
    request = engine.submit([1], max_new_tokens=2)
    forgotten = weakref.ref(request)
    run_until_idle(engine)
    del request
    gc.collect()
    assert forgotten() is None


def test_dtype_must_be_that_of_the_model() -> None:
    simulated_engine(dtype=torch.float64)
    with pytest.raises(ValueError, match=r"must be that of the model's weights \(torch.float64\), got torch.float16"):
        simulated_engine(dtype=torch.half)


def test_two_engines_share_a_program() -> None:
    program = SimulatedProgram()
    engines = [simulated_engine(program) for _ in range(2)]
    requests = [engine.submit([number], max_new_tokens=5) for number, engine in enumerate(engines)]
    for _ in range(5):
        for engine in engines:
            engine.step()
    for request in requests:
        expect(request)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_engine_is_not_copied(copied: Any) -> None:
    with pytest.raises(TypeError, match="an Engine must not be copied or pickled: make one of the model"):
        copied(simulated_engine())
