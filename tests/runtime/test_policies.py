"""The engine under every policy, order and way of batching: the same tokens, and what each of them promises."""

from __future__ import annotations

import random
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import selective_compile as sc
from selective_compile.backend import compile_step_program
from selective_compile.options import Batching, SchedulerPolicy, WaitingOrder
from selective_compile.runtime import Engine, StepRecord
from tests.models import tiny
from tests.oracle import assert_same_tokens
from tests.runtime.simulated import VOCAB_SIZE, SimulatedProgram, expected_tokens, simulated_engine


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    policy=st.sampled_from(get_args(SchedulerPolicy)),
    order=st.sampled_from(get_args(WaitingOrder)),
    batching=st.sampled_from(get_args(Batching)),
)
def test_the_tokens_are_the_same(seed: int, policy: SchedulerPolicy, order: WaitingOrder, batching: Batching) -> None:
    source = random.Random(seed)
    engine = simulated_engine(
        token_budget=source.randint(2, 20),
        max_requests=source.randint(1, 6),
        block_size=4,
        max_kv_tokens=60,
        scheduler_policy=policy,
        waiting_order=order,
        batching=batching,
        prefill_slowdown=source.choice([None, 1.01, 2.0]),
    )
    shared = [source.randrange(VOCAB_SIZE) for _ in range(20)]
    requests = []
    for number in range(12):
        prompt = [*shared[: source.randint(0, 20)], number]
        terms = {"priority": source.randint(-1, 1), "user": source.choice(["a", "b", None])}
        stop = source.sample(range(VOCAB_SIZE), 3)
        length = source.randint(1, 20)
        requests.append(engine.submit(prompt, max_new_tokens=length, eos_token_id=stop, **terms))
        for _ in range(source.randint(0, 3)):
            engine.step()
            engine._scheduler.check()
    while engine.step():
        engine._scheduler.check()
    for request in requests:
        assert request.tokens == expected_tokens(request.prompt_ids, request.params), request
    assert engine.stats().blocks_used == 0
    if policy == "guaranteed_no_evict":
        assert engine.stats().preemptions == 0


def serve_early_ends(policy: SchedulerPolicy) -> Engine:
    """Requests that might generate 40 tokens and end after a few."""
    engine = simulated_engine(block_size=4, max_kv_tokens=80, max_requests=16, scheduler_policy=policy)
    for number in range(40):
        engine.submit([number, 3, 4], max_new_tokens=40, eos_token_id=list(range(0, VOCAB_SIZE, 6)))
    while engine.step():
        pass
    return engine


def test_max_utilization_is_faster_and_preempts_where_outputs_end_early() -> None:
    packed, careful = serve_early_ends("max_utilization").stats(), serve_early_ends("guaranteed_no_evict").stats()
    assert packed.tokens_generated == careful.tokens_generated
    assert packed.preemptions > 0 and careful.preemptions == 0
    assert careful.steps / packed.steps > 1.5
    print(f"steps: {careful.steps} against {packed.steps}, {careful.steps / packed.steps:.2f}x")


@pytest.mark.parametrize("batching", get_args(Batching))
def test_llama_under_every_way_of_batching(batching: Batching) -> None:
    model = tiny("llama")
    config = sc.EngineConfig(compile=False, token_budget=32, max_kv_tokens=256, block_size=8, batching=batching)
    engine = sc.Engine(model, config, program=compile_step_program(model, config))
    prompts = [[(3 * i + n) % 199 for i in range(5 + 7 * n)] for n in range(6)]
    requests = [engine.submit(prompt, max_new_tokens=6 + 2 * n) for n, prompt in enumerate(prompts)]
    for prompt, request in zip(prompts, requests, strict=True):
        assert_same_tokens(model, prompt, request.result().tokens)


def records_of(batching: Batching) -> list[StepRecord]:
    records: list[StepRecord] = []
    engine = simulated_engine(batching=batching, token_budget=8, max_requests=3, observers=[records.append])
    for number in range(6):
        engine.submit([number] * 4, request_id=number, max_new_tokens=2 + number)
    while engine.step():
        pass
    return records


def test_prefill_and_decode_have_steps_of_their_own_unless_they_are_fused() -> None:
    mixed = [len({share.is_prefill for share in record.shares}) > 1 for record in records_of("inflight_fused")]
    assert any(mixed)
    for batching in ("inflight", "static"):
        assert all(len({share.is_prefill for share in record.shares}) == 1 for record in records_of(batching))


def test_a_static_batch_ends_with_its_longest_member() -> None:
    records = records_of("static")
    started = {share.request_id: record.step for record in reversed(records) for share in record.shares}
    ended = {share.request_id: record.step for record in records for share in record.shares}
    assert min(started[number] for number in (3, 4, 5)) > max(ended[number] for number in (0, 1, 2))
    assert [record.empty_slots for record in records if 0 in {share.request_id for share in record.shares}][0] == 0
    # Of the first three, one ends after a step of decode and another after two.
    assert [record.empty_slots for record in records if record.step <= ended[2]][-2:] == [1, 2]


# Deadlines


def test_what_cannot_be_met_is_refused_before_it_costs_anything() -> None:
    engine = simulated_engine(waiting_order="deadline", max_requests=2)
    running = engine.submit([1], max_new_tokens=8)
    engine.step()
    a_slow_machine(engine)
    late = engine.submit([1, 2], max_new_tokens=50, deadline=5.0)
    whenever = engine.submit([1, 2], max_new_tokens=5)
    before = engine.stats().tokens_computed
    result = late.result()
    assert (result.finish_reason, result.tokens) == ("error", ())
    assert result.error is not None and "deadline" in result.error
    assert whenever.result().finish_reason == "length"
    assert running.result().finish_reason == "length"
    assert engine.stats().tokens_computed - before == 7 + 2 + 4
    assert not engine._requests


def a_slow_machine(engine: Any) -> None:
    for tokens in (1, 2):
        engine._scheduler.pace.steps.observe(tokens, tokens * 1e6)


@pytest.mark.parametrize("slow", [False, True])
def test_what_was_measured_once_does_not_refuse_for_ever(slow: bool) -> None:
    """Where nobody runs nothing is measured: the estimate would stay as it is."""
    engine = simulated_engine(waiting_order="deadline")
    a_slow_machine(engine) if slow else engine._scheduler.pace.steps.observe(512, 1e6)
    assert engine.submit([1], max_new_tokens=2, deadline=5.0).result().finish_reason == "length"


@pytest.mark.parametrize("order", ["first_come", "priority", "fair"])
def test_other_orders_refuse_nobody(order: Any) -> None:
    engine = simulated_engine(waiting_order=order)
    engine.submit([1], max_new_tokens=8)
    engine.step()
    a_slow_machine(engine)
    assert engine.submit([2], max_new_tokens=2, deadline=5.0).result().finish_reason == "length"


def test_only_refused_requests_leave_nothing_to_do() -> None:
    now = [0.0]
    engine = simulated_engine(waiting_order="deadline", clock=lambda: now[0])
    request = engine.submit([1], deadline=1.0)
    now[0] = 2.0
    assert not engine.step()
    assert request.finish_reason == "error"
    engine.submit([1], request_id=request.request_id, max_new_tokens=2).result()


def test_a_deadline_that_can_be_met_is_served_first() -> None:
    engine = simulated_engine(waiting_order="deadline", max_requests=1)
    later = engine.submit([1], max_new_tokens=3)
    soon = engine.submit([2], max_new_tokens=3, deadline=30.0)
    engine.step()
    assert (len(later.tokens), len(soon.tokens)) == (0, 1)


def test_before_the_first_step_nothing_is_refused() -> None:
    engine = simulated_engine(waiting_order="deadline")
    assert engine.submit([1], max_new_tokens=2, deadline=5.0).result().finish_reason == "length"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"priority": 0.5}, "priority must be an integer, got 0.5"),
        ({"priority": True}, "priority must be an integer, got True"),
        ({"priority": 10**400}, "priority must be of at most 53 bits, got one of 1329"),
        ({"priority": -(2**53)}, "priority must be of at most 53 bits, got one of 54"),
        ({"deadline": 10**400}, "deadline must be a number that a float can hold, got one of 1329 bits"),
        ({"deadline": 0}, "deadline must be more than 0 seconds from now, got 0"),
        ({"deadline": float("nan")}, "deadline must be more than 0 seconds from now, got nan"),
        ({"deadline": "soon"}, "deadline must be a number of seconds or None, got 'soon'"),
        ({"user": 1.5}, "user must be a string, an integer or None, got 1.5"),
        ({"user": 10**5000}, "user must be of at most 256 bits, got one of 16610"),
        ({"request_id": 10**5000}, "request_id must be of at most 256 bits, got one of 16610"),
    ],
)
def test_terms_that_are_none(arguments: dict[str, Any], message: str) -> None:
    engine = simulated_engine(SimulatedProgram())
    with pytest.raises(ValueError, match=message):
        engine.submit([1], **arguments)
    assert not engine._requests and not engine._scheduler.has_work


def test_a_user_with_many_requests_does_not_keep_others_waiting() -> None:
    engine = simulated_engine(waiting_order="fair", max_requests=2)
    greedy = [engine.submit([number], max_new_tokens=5, user="greedy") for number in range(20)]
    modest = engine.submit([1], max_new_tokens=5, user="modest")
    modest.result()
    assert sum(request.finished for request in greedy) <= 4
