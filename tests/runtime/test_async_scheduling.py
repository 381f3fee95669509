"""Steps that are scheduled before the tokens of the last one are known: the same tokens, nothing lost, nothing left."""

from __future__ import annotations

import random
from array import array
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from selective_compile import EngineConfig
from selective_compile.runtime import Engine, StepError
from selective_compile.runtime.block_names import extend_names
from selective_compile.runtime.iterations import Iterations
from tests.runtime.engine_checks import assert_nothing_left, expect, run_until_idle
from tests.runtime.played_stream import PlayedStream
from tests.runtime.simulated import SimulatedProgram, expected_tokens, simulated_engine


def played(**config: Any) -> tuple[Engine, PlayedStream]:
    stream = PlayedStream()
    return simulated_engine(stream=stream, **config), stream


@pytest.mark.parametrize("recorded", [False, True])
def test_a_step_that_gives_no_token_is_waited_for_though_none_is_ahead(recorded: bool, tmp_path: Path) -> None:
    """As a part of a long prompt: the next step's inputs are written where the copy of its own may still read."""
    config: dict[str, Any] = {"record": tmp_path / "run"} if recorded else {"async_scheduling": False}
    engine, _ = played(token_budget=4, block_size=16, **config)
    request = engine.submit(list(range(1, 20)), max_new_tokens=5)
    run_until_idle(engine)
    expect(request)


@pytest.mark.parametrize("new", [1, 2, 3])
def test_whoever_awaits_its_last_token_holds_up_no_prompt(new: int) -> None:
    """It gets no share, so that with room for none of the prompt the step would have none."""
    engine, _ = played(token_budget=8, prefill_slowdown=2.0)
    requests = [engine.submit([1, 2, 3], max_new_tokens=new), engine.submit(list(range(30)), max_new_tokens=3)]
    run_until_idle(engine)
    for request in requests:
        expect(request)


def test_the_next_step_is_given_to_the_device_before_the_tokens_are_known() -> None:
    engine, stream = played()
    request = engine.submit([1, 2, 3], max_new_tokens=4)
    assert engine.step() and stream.waits == 0 and request.tokens == []
    assert engine.step() and stream.waits == 1 and len(request.tokens) == 1
    assert stream.left > 0, "the second step is on its way"
    run_until_idle(engine)
    expect(request)


def test_a_request_that_ends_is_computed_once_more_and_no_length_is_overrun() -> None:
    computed: list[int] = []
    stream = PlayedStream()
    engine = simulated_engine(stream=stream)
    engine.add_observer(lambda record: computed.append(sum(share.tokens for share in record.shares)))
    to_the_end = engine.submit([1, 2], max_new_tokens=5)
    run_until_idle(engine)
    assert computed == [2, 1, 1, 1, 1]
    computed.clear()
    stop = to_the_end.tokens[2]
    stopped = engine.submit([1, 2], max_new_tokens=5, eos_token_id=stop)
    run_until_idle(engine)
    known = to_the_end.tokens.index(stop) + 1
    assert stopped.tokens == to_the_end.tokens[:known] and stopped.finish_reason == "stop"
    assert sum(computed) <= 2 + known, "one token more than it needs, at most"


@pytest.mark.parametrize("captures", [False, True])
def test_a_ban_ends_with_the_token_that_it_should(captures: bool) -> None:
    """Any token but one would end the request, or may not begin it."""
    engine = simulated_engine(SimulatedProgram(captured=captures), stream=PlayedStream(captures=captures))
    others = [token for token in range(61) if token != 5]
    for least in range(1, 7):
        request = engine.submit([1, 2, 3, least], max_new_tokens=9, min_new_tokens=least, eos_token_id=others)
        began = engine.submit([1, 2, 4, least], max_new_tokens=9, begin_suppress_tokens=others)
        run_until_idle(engine)
        assert request.tokens[:-1] == [5] * least and request.finish_reason == "stop"
        assert began.tokens[0] == 5 and set(began.tokens) != {5}
        for each in (request, began):
            expect(each)
    assert not captures or engine.stats().captured


def test_a_step_that_fails_takes_those_on_their_way_with_it() -> None:
    program = SimulatedProgram()
    engine = simulated_engine(program, stream=PlayedStream(), max_requests=1)
    first, second = (engine.submit([1, n], max_new_tokens=6) for n in range(2))
    engine.step()

    def fail() -> None:
        raise MemoryError("no more")

    program.before_run = fail
    with pytest.raises(StepError, match="no more"):
        engine.step()
        engine.step()
    assert first.finish_reason == "error"
    program.before_run = lambda: None
    run_until_idle(engine)
    expect(second)
    assert_nothing_left(engine)


@pytest.mark.parametrize("first", range(5))
def test_who_waits_when_a_step_fails_is_not_penalised_for_a_token_that_was_lost(first: int) -> None:
    """It had been preempted with a token on its way, which the device has marked and nobody has got."""
    engine, _ = played(block_size=2, max_kv_tokens=24, max_requests=2, scheduler_policy="max_utilization")
    launch, lost = engine._runner.launch, []

    def failing(step: Any) -> Any:
        if step.plan.preempted and not lost:
            lost.extend(state.unknown for state in step.plan.preempted)
            raise MemoryError("no more")
        return launch(step)

    engine._runner.launch = failing  # type: ignore[method-assign]
    requests = [engine.submit([first, n], max_new_tokens=18, repetition_penalty=9.0) for n in range(2)]
    with pytest.raises(StepError, match="no more"):
        run_until_idle(engine)
    run_until_idle(engine)
    assert lost == [1] and [request.finish_reason for request in requests] == ["error", "length"]
    expect(requests[1])


def test_scores_from_which_nothing_can_be_drawn_end_their_request_alone() -> None:
    program = SimulatedProgram()
    logits_of = program._logits

    def without(*arguments: Any) -> Any:
        found = logits_of(*arguments)
        inputs, keys, _, row = arguments
        return found * float("nan") if int(inputs.input_ids[row]) == 60 else found

    program._logits = without  # type: ignore[method-assign]
    engine = simulated_engine(program, stream=PlayedStream())
    bad, good = (engine.submit([token], max_new_tokens=4, do_sample=True, seed=1) for token in (60, 7))
    run_until_idle(engine)
    assert bad.finish_reason == "error" and "no token can be drawn" in str(bad.error) and bad.tokens == []
    assert len(good.tokens) == 4 or good.finish_reason == "error"


def test_where_it_cannot_be() -> None:
    with pytest.raises(ValueError, match="async_scheduling must be None or False with record"):
        EngineConfig(async_scheduling=True, record="log.jsonl")
    program = SimulatedProgram()
    program.keeps_requests = True
    with pytest.raises(ValueError, match="async_scheduling must be None or False for a model"):
        simulated_engine(program, async_scheduling=True)


def test_a_cpu_can_do_it_too_and_does_not_by_itself() -> None:
    engine = simulated_engine(async_scheduling=True)
    request = engine.submit([4, 5], max_new_tokens=3)
    engine.step()
    assert request.tokens == []
    run_until_idle(engine)
    expect(request)
    engine = simulated_engine()
    request = engine.submit([4, 5], max_new_tokens=3)
    engine.step()
    assert len(request.tokens) == 1


def test_a_step_that_the_host_chooses_for_leaves_the_one_before_what_it_reads() -> None:
    engine, _ = played(max_requests=4)
    first, second = engine.submit([1, 2, 3], max_new_tokens=12), engine.submit([4, 5], max_new_tokens=12)
    for _ in range(3):
        engine.step()
    first.cancel()  # the rows of the next step are others
    third = engine.submit([9, 9, 9, 9], max_new_tokens=4, logprobs=True)
    run_until_idle(engine)
    expect(second)
    expect(third)


@pytest.mark.parametrize("steps", range(1, 8))
def test_no_block_is_named_by_a_token_that_nobody_knows(steps: int) -> None:
    """Of one that leaves when a step has just been launched more is computed than is known."""
    engine, _ = played(block_size=2)
    request, launch, launched = engine.submit([1, 2, 3], max_new_tokens=12), engine._runner.launch, []

    def leaving(step: Any) -> Any:
        launched.append(launch(step))
        if len(launched) == steps:
            request.cancel()
        return launched[-1]

    engine._runner.launch = leaving  # type: ignore[method-assign]
    run_until_idle(engine)
    assert request.finish_reason == "cancelled"
    tokens, names = array("q", [1, 2, 3, *expected_tokens([1, 2, 3], request.params)]), list[bytes]()
    extend_names(names, tokens, None, len(tokens) // 2, 2)
    (group,) = engine._scheduler.blocks.groups
    assert set(group.pool._blocks) <= set(names)


def test_an_interrupt_while_a_step_is_waited_for_leaves_nobody_waiting_for_ever() -> None:
    engine, stream = played()
    request = engine.submit([1, 2, 3], max_new_tokens=1)
    engine.step()
    run = stream._run

    def interrupted(count: int) -> None:
        stream._run = run  # type: ignore[method-assign]
        raise KeyboardInterrupt

    stream._run = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.drop_computed()
    assert request.finish_reason == "error"
    again = engine.submit([1, 2, 3], max_new_tokens=3)
    run_until_idle(engine)
    expect(again)


def test_nothing_is_left_on_the_device_when_the_last_request_has_ended() -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.001
        return now[0]

    seconds: list[float] = []
    engine = simulated_engine(stream=PlayedStream(), clock=clock)
    engine.add_observer(lambda record: seconds.append(record.seconds))
    known = engine.submit([1, 2], max_new_tokens=8)
    known.result()
    engine.submit([1, 2], max_new_tokens=8, eos_token_id=known.tokens[3]).result()
    assert not engine._steps._flights
    running = engine.submit([5, 6], max_new_tokens=8)
    engine.step()
    now[0] += 3600  # whoever calls takes a break
    run_until_idle(engine)
    expect(running)
    assert max(seconds) < 1


def test_steps_have_numbers_of_their_own_and_a_batch_manager_tells_of_each() -> None:
    numbers: list[int] = []
    engine, _ = played()
    engine.add_observer(lambda record: numbers.append(record.step))
    engine.submit([1, 2, 3], max_new_tokens=10)
    engine.step()
    engine.step()
    engine.submit([4, 5], max_new_tokens=3, logprobs=True)  # the host chooses: two steps land in one call
    iterations = Iterations(engine)
    told = []
    while engine._scheduler.has_work:
        told += [iteration.record.step for iteration in iterations.run()]
    iterations.close()
    assert (
        numbers == list(range(engine.stats().steps)) and told == numbers[-len(told) :] and len(told) >= len(numbers) - 2
    )


def test_drafts_that_do_not_pay_are_still_judged() -> None:
    observed: list[int] = []
    engine, _ = played()
    engine.submit([1, 2, 1, 2, 1, 2], max_new_tokens=30, prompt_lookup_num_tokens=3)
    observe = engine._drafting.observe
    engine._drafting.observe = lambda state, tokens: (observed.extend(tokens), observe(state, tokens))[1]  # type: ignore
    run_until_idle(engine)
    assert len(observed) == 30


@pytest.mark.parametrize("made_within", [True, False])
def test_inference_mode_changes_nothing(made_within: bool) -> None:
    with torch.inference_mode(made_within):
        engine = simulated_engine(stream=PlayedStream(captures=True), program=SimulatedProgram(captured=True))
    for within in (not made_within, made_within):
        with torch.inference_mode(within):
            request = engine.submit([1, 2, 3], max_new_tokens=4, repetition_penalty=1.2)
            run_until_idle(engine)
        expect(request)


def test_failures_leave_memory_alone_that_the_device_still_reads() -> None:
    moods = random.Random(5)
    program = SimulatedProgram()
    engine = simulated_engine(program, stream=PlayedStream(lambda: moods.choice((0, 0, 1))), max_requests=4)

    def now_and_then() -> None:
        if moods.random() < 0.05:
            raise MemoryError("no more")

    program.before_run = now_and_then
    requests = []
    for place in range(60):
        kind = {"logprobs": True} if place % 5 == 0 else {}
        prompt = [moods.randrange(3) for _ in range(moods.randint(1, 9))]
        requests.append(engine.submit(prompt, max_new_tokens=moods.randint(1, 9), **kind))
        for _ in range(3):
            with suppress(StepError):
                engine.step()
    program.before_run = lambda: None
    run_until_idle(engine)
    ended = [request for request in requests if request.finish_reason == "length"]
    assert 10 < len(ended) < 60
    for request in ended:
        expect(request)
