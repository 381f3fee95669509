"""How requests end other than by their tokens: refused, cancelled, or with a step that failed."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest

from selective_compile.runtime import Request, StepError
from tests.runtime.engine_checks import assert_nothing_left, check, expect, run_until_idle
from tests.runtime.simulated import (
    VOCAB_SIZE,
    SimulatedProgram,
    expected_tokens,
    simulated_engine,
)


def test_a_request_of_another_engine_is_refused() -> None:
    one, other = simulated_engine(), simulated_engine()
    theirs, ours = one.submit([1, 2], max_new_tokens=4), other.submit([3], max_new_tokens=4)
    other.step()
    for wrong in (theirs, "request-0", None):
        with pytest.raises(ValueError, match="request must be one of this engine, got"):
            other.cancel(cast(Any, wrong))
    run_until_idle(one)
    run_until_idle(other)
    assert theirs.finish_reason == ours.finish_reason == "length"
    one.cancel(theirs)
    other.cancel(theirs)  # it has finished
    assert_nothing_left(other)


def test_any_time_may_be_waited() -> None:
    engine = simulated_engine()
    with engine.running():
        for timeout in (math.inf, 1e30):
            assert engine.submit([1, 2], max_new_tokens=4).result(timeout=timeout).finish_reason == "length"
    for wrong in ("a", True, math.nan):
        with pytest.raises(ValueError, match="timeout must be seconds or None, got"):
            engine.submit([1, 2], max_new_tokens=4).result(timeout=cast(Any, wrong))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_ids": []}, "prompt_ids must hold at least one token id, got none"),
        ({"prompt_ids": [VOCAB_SIZE]}, f"less than the vocabulary size {VOCAB_SIZE}, got {VOCAB_SIZE}"),
        ({"prompt_ids": [-1]}, "prompt_ids must be at least 0 .*got -1"),
        ({"prompt_ids": [0.5]}, "prompt_ids must be integers in one dimension, got 0.5"),
        ({"prompt_ids": [[1, 2, 3]]}, "in one dimension, got 3 ids in one place, as in a batch: give one of its rows"),
        ({"prompt_ids": {"input_ids": [1]}}, "a sequence of token ids, got a dict, of which its 'input_ids' are those"),
        ({"prompt_ids": "hello"}, "prompt_ids must be a sequence of token ids, got 'hello'"),
        ({"prompt_ids": [1] * 65}, "prompt_ids must be at most 50 tokens for the model's positions, got 65"),
        ({"prompt_ids": [1] * 51}, "prompt_ids must be at most 50 tokens for the model's positions, got 51"),
        ({"max_new_tokens": 99}, "max_new_tokens must be at most 50 for the model's positions .*got 99"),
        ({"max_new_tokens": 60}, "max_new_tokens must be at most 50 for the model's positions .*got 60"),
        ({"request_id": "taken"}, "request_id must not be that of an unfinished request, got 'taken'"),
        ({"request_id": 1.5}, "request_id must be a string or an integer, got 1.5"),
        ({"max_tokens": 5}, "must be a known one, got 'max_tokens' where 'max_new_tokens' is one; known"),
        ({"num_beams": -4}, "num_beams must be an integer of at least 1, got -4"),
        ({"num_beams": 70}, "num_beams must be at most .* for .* tokens each in .* blocks of .*got 70"),
        (
            {"generation_config": {"max_new_tokens": 4}},
            "generation_config must be a transformers.GenerationConfig",
        ),
        ({"do_sample": True, "temperature": 0}, "temperature must be a number above 0, got 0"),
        ({"seed": -1}, "seed must be an integer of at least 0 and less than .*, got -1"),
    ],
)
def test_bad_input_is_refused_and_touches_nobody_else(arguments: dict[str, Any], message: str) -> None:
    engine = simulated_engine(SimulatedProgram(max_positions=50), max_kv_tokens=64, block_size=16)
    other = engine.submit([1, 2, 3], request_id="taken", max_new_tokens=6)
    engine.step()
    before = engine.stats()
    with pytest.raises(ValueError, match=message):
        engine.submit(**{"prompt_ids": [1], **arguments})
    assert engine.stats() == before
    run_until_idle(engine)
    expect(other)


def test_an_id_may_be_used_again_once_its_request_has_ended() -> None:
    engine = simulated_engine()
    first = engine.submit([1], request_id=7, max_new_tokens=2)
    run_until_idle(engine)
    second = engine.submit([2], request_id=7, max_new_tokens=2)
    run_until_idle(engine)
    expect(first)
    expect(second)


def test_made_up_ids_avoid_those_of_the_user() -> None:
    engine = simulated_engine()
    taken = engine.submit([1], request_id="request-1")
    made_up = [engine.submit([1]).request_id for _ in range(3)]
    assert len({taken.request_id, *made_up}) == 4
    run_until_idle(engine)


def test_cancel_running_waiting_and_finished() -> None:
    engine = simulated_engine(max_requests=2)
    requests = [engine.submit([number], max_new_tokens=8) for number in range(4)]
    for _ in range(3):
        engine.step()
    requests[1].cancel()
    requests[3].cancel()
    check(engine)
    assert engine.stats().blocks_used == 1
    run_until_idle(engine)
    requests[0].cancel()
    assert [request.finish_reason for request in requests] == ["length", "cancelled", "length", "cancelled"]
    assert [len(request.tokens) for request in requests] == [8, 3, 8, 0]
    assert requests[1].tokens == expected_tokens([1], requests[1].params)[:3]
    assert requests[1].result().finish_reason == "cancelled"


def test_cancelling_all_lets_everybody_go() -> None:
    engine = simulated_engine(max_requests=1)
    done = engine.submit([1], max_new_tokens=1)
    done.result()
    samples = engine.submit([2], do_sample=True, num_return_sequences=2, seed=1).samples
    requests = [*samples, engine.submit([1], max_new_tokens=9)]
    for _ in range(3):
        engine.step()
    engine.cancel_all()
    assert {request.finish_reason for request in requests} == {"cancelled"} and done.finish_reason == "length"
    assert samples[0].tokens and engine.stats().running == engine.stats().waiting == 0
    engine.cancel_all()
    assert engine.submit([1], max_new_tokens=2).result().error is None


def test_cancelled_and_its_id_used_again_while_the_model_runs() -> None:
    program = SimulatedProgram()
    engine = simulated_engine(program)
    old = engine.submit([1], request_id="a", max_new_tokens=8)
    other = engine.submit([2], max_new_tokens=8)
    engine.step()
    replaced: list[Request] = []

    def replace() -> None:
        if not replaced:
            old.cancel()
            replaced.append(engine.submit([3], request_id="a", max_new_tokens=8))

    program.before_run = replace
    run_until_idle(engine)
    assert (old.finish_reason, len(old.tokens)) == ("cancelled", 1)
    for request in (other, *replaced):
        expect(request)


def test_a_failed_step_ends_its_running_requests_and_the_engine_goes_on() -> None:
    program = SimulatedProgram()
    engine = simulated_engine(program, max_requests=2)
    requests = [engine.submit([number], max_new_tokens=4) for number in range(3)]
    engine.step()

    def fail() -> None:
        raise RuntimeError("out of memory")

    program.before_run = fail
    with pytest.raises(StepError, match="step 1 failed: RuntimeError: out of memory") as error:
        engine.step()
    assert isinstance(error.value.__cause__, RuntimeError)
    check(engine)
    program.before_run = lambda: None
    run_until_idle(engine)
    for request in requests[:2]:
        result = request.result()
        assert (result.finish_reason, result.error) == ("error", "step 1 failed: RuntimeError: out of memory")
        assert list(result.tokens) == expected_tokens(request.prompt_ids, request.params)[:1]
        stream = iter(request)
        assert next(stream) == result.tokens[0]
        with pytest.raises(RuntimeError, match="failed: step 1 failed: RuntimeError: out of memory"):
            next(stream)
    expect(requests[2])
    assert requests[2].error is None


def test_a_reader_that_drives_learns_of_a_failure_from_its_request(caplog: pytest.LogCaptureFixture) -> None:
    program = SimulatedProgram()
    engine = simulated_engine(program, max_requests=1)
    first, second = (engine.submit([number], max_new_tokens=4) for number in range(2))
    failures = iter([RuntimeError("once")])

    def fail_once() -> None:
        for failure in failures:
            raise failure

    program.before_run = fail_once
    assert second.result().finish_reason == "length"
    assert first.result().error == "step 0 failed: RuntimeError: once"
    assert "a step failed" in caplog.text


def test_an_interrupt_is_passed_on_and_leaves_the_engine_whole() -> None:
    program = SimulatedProgram()
    engine = simulated_engine(program)
    request = engine.submit([1], max_new_tokens=4)

    def interrupt() -> None:
        raise KeyboardInterrupt

    program.before_run = interrupt
    with pytest.raises(KeyboardInterrupt):
        request.result()
    program.before_run = lambda: None
    assert request.finish_reason == "error"
    assert engine.submit([1], max_new_tokens=4).result().finish_reason == "length"
    assert_nothing_left(engine)
