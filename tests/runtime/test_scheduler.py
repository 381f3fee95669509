"""The scheduler by example: order, budget, chunks, preemption; `test_traffic.py` has its invariants."""

from __future__ import annotations

import random
from array import array
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selective_compile.options import Batching
from selective_compile.runtime.block_pool import BlockPool
from selective_compile.runtime.plan import Share, StepPlan
from selective_compile.runtime.request_state import RequestState
from selective_compile.runtime.scheduler import Scheduler


def make_scheduler(
    num_blocks: int = 64, token_budget: int = 8, max_requests: int = 4, block_size: int = 4
) -> Scheduler:
    return Scheduler(BlockPool(num_blocks), token_budget=token_budget, max_requests=max_requests, block_size=block_size)


def add(scheduler: Scheduler, number: int, prompt_length: int) -> RequestState:
    """A request whose tokens nobody else has, and which may generate as many as the pool has room for."""
    new_tokens = max(1, scheduler.pool.num_blocks * scheduler.block_size - prompt_length + 1)
    state = RequestState(number, number, [number] * prompt_length, max_new_tokens=new_tokens)
    scheduler.add(state)
    return state


def run(scheduler: Scheduler, ends: dict[int, int] | None = None) -> StepPlan:
    """One step; a request whose `ends` it reaches, in generated tokens, leaves."""
    plan = scheduler.schedule()
    for share in plan.shares:
        scheduler.advance(share, 1 if share.samples else None)
        if share.state.generated == (ends or {}).get(share.state.number):
            scheduler.remove(share.state)
    scheduler.check()
    return plan


def shape(plan: StepPlan) -> list[tuple[int, int]]:
    return [(share.state.number, share.num_tokens) for share in plan.shares]


def test_prompts_are_chunked_and_mix_with_decode_in_one_step() -> None:
    scheduler = make_scheduler(token_budget=8)
    add(scheduler, 0, 3)
    add(scheduler, 1, 10)
    assert shape(run(scheduler)) == [(0, 3), (1, 5)]
    plan = run(scheduler)
    assert shape(plan) == [(0, 1), (1, 5)]
    assert [share.is_prefill for share in plan.shares] == [False, True]
    assert [share.samples for share in plan.shares] == [True, True]
    assert shape(run(scheduler)) == [(0, 1), (1, 1)]


def test_only_the_chunk_that_ends_the_prompt_samples() -> None:
    scheduler = make_scheduler(token_budget=4)
    add(scheduler, 0, 9)
    shares = [run(scheduler).shares[0] for _ in range(4)]
    assert [(share.start, share.num_tokens, share.samples) for share in shares] == [
        (0, 4, False),
        (4, 4, False),
        (8, 1, True),
        (9, 1, True),
    ]
    assert [share.is_prefill for share in shares] == [True, True, True, False]


def test_a_prompt_of_one_token_is_prefill() -> None:
    scheduler = make_scheduler()
    add(scheduler, 0, 1)
    assert run(scheduler).shares[0].is_prefill
    assert not run(scheduler).shares[0].is_prefill


def test_max_requests_holds_and_a_place_is_filled_at_the_next_step() -> None:
    scheduler = make_scheduler(max_requests=2)
    for number in range(4):
        add(scheduler, number, 1)
    assert shape(run(scheduler, ends={0: 1})) == [(0, 1), (1, 1)]
    assert shape(run(scheduler)) == [(1, 1), (2, 1)]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)


def test_nobody_overtakes_the_request_that_waits_first() -> None:
    scheduler = make_scheduler(num_blocks=3, block_size=4)
    add(scheduler, 0, 5)
    add(scheduler, 1, 8)  # two blocks, one is free
    add(scheduler, 2, 1)  # would fit
    assert shape(run(scheduler)) == [(0, 5)]


def test_the_youngest_is_preempted_and_computed_again() -> None:
    scheduler = make_scheduler(num_blocks=2, block_size=2)
    old, young = add(scheduler, 0, 2), add(scheduler, 1, 1)
    run(scheduler)
    plan = scheduler.schedule()
    assert shape(plan) == [(0, 1)]
    assert plan.preempted == (young,)
    assert (list(young.blocks), young.computed, young.tokens.tolist()) == ([], 0, [1, 1])
    scheduler.advance(plan.shares[0], 1)
    scheduler.remove(old)
    plan = run(scheduler)
    assert shape(plan) == [(1, 2)]
    assert plan.shares[0].is_prefill and plan.shares[0].samples
    assert scheduler.preemptions == 1


def test_a_preempted_request_is_ahead_of_those_that_came_later() -> None:
    scheduler = make_scheduler(num_blocks=3, block_size=2, max_requests=2)
    for number in range(3):
        add(scheduler, number, 1)
    while not scheduler.preemptions:
        run(scheduler)
    scheduler.remove(next(scheduler.running()))
    assert shape(run(scheduler))[0][0] == 1


def test_a_request_may_have_to_give_way_itself() -> None:
    scheduler = make_scheduler(num_blocks=2, block_size=2)
    add(scheduler, 0, 1)
    second = add(scheduler, 1, 2)
    run(scheduler)
    plan = run(scheduler)
    assert shape(plan) == [(0, 1)]
    assert plan.preempted == (second,)


def test_admission_leaves_running_requests_room_to_grow() -> None:
    scheduler = make_scheduler(num_blocks=6, block_size=2)
    for number in range(5):
        add(scheduler, number, 2)
    assert len(run(scheduler).shares) == 4
    assert scheduler.pool.num_free == 2


def test_preempt_all_keeps_order_and_tokens() -> None:
    scheduler = make_scheduler()
    states = [add(scheduler, number, 2) for number in range(3)]
    run(scheduler)
    scheduler.preempt_all()
    scheduler.check()
    assert scheduler.pool.num_free == 64
    assert shape(run(scheduler)) == [(0, 3), (1, 3), (2, 2)]
    assert [state.tokens.tolist() for state in states] == [[0, 0, 1, 1], [1, 1, 1, 1], [2, 2, 1]]


def test_what_never_fits_is_our_mistake() -> None:
    scheduler = make_scheduler(num_blocks=2, block_size=4)
    assert scheduler.blocks.fits(8) and not scheduler.blocks.fits(9)
    with pytest.raises(AssertionError):
        add(scheduler, 0, 9)


@pytest.mark.parametrize("batching", get_args(Batching))
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), slowdown=st.sampled_from([None, 1.5]))
def test_whole_requests_are_computed_as_generate_would(batching: Batching, seed: int, slowdown: float | None) -> None:
    """The prompt in one step and each further token in its own, after a preemption again."""
    source = random.Random(seed)
    options: dict[str, Any] = {"batching": batching, "prefill_slowdown": slowdown, "block_reuse": False}
    scheduler = Scheduler(BlockPool(8), token_budget=9, max_requests=4, block_size=2, **options)
    states = [
        RequestState(n, n, [n] * source.randint(1, 9), max_new_tokens=source.randint(1, 7), whole=n % 3 > 0)
        for n in range(12)
    ]
    waiting = list(states)
    for _ in range(400):
        if waiting and source.random() < 0.5:
            scheduler.add(waiting.pop(0))
        plan = scheduler.schedule()
        scheduler.pace.observe(plan, 1.0 + plan.num_tokens)
        assert plan.num_tokens <= 9
        for share in plan.shares:
            if share.state.whole:
                assert share.num_tokens == (share.state.prompt_length if share.start == 0 else 1), share
            scheduler.advance(share, 1 if share.samples else None)
            if share.state.computed == share.state.final_length:
                scheduler.remove(share.state)
        scheduler.check()
    assert all(state.finished for state in states)


@pytest.mark.parametrize("batching", get_args(Batching))
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), prefix=st.integers(2, 9), reuse=st.booleans())
def test_tokens_of_a_prefix_are_computed_as_generate_would(
    batching: Batching, seed: int, prefix: int, reuse: bool
) -> None:
    """Those of the prompt in one step, and further ones each in its own, after a preemption again; those behind it in
    any company. Blocks are found only of requests whose whole prefixes are alike."""
    source = random.Random(seed)
    options: dict[str, Any] = {"batching": batching, "block_reuse": reuse}
    scheduler = Scheduler(BlockPool(11), token_budget=9, max_requests=4, block_size=2, **options)
    prompts = [[source.randint(0, 1)] * source.randint(1, 4) + [2] * source.randint(0, 9) for n in range(12)]
    states = [RequestState(n, n, prompt, max_new_tokens=9, prefix=prefix) for n, prompt in enumerate(prompts)]
    waiting, known = list(states), set()
    for _ in range(600):
        if waiting and source.random() < 0.5:
            scheduler.add(waiting.pop(0))
        for state in scheduler.running():
            if state.pending == 1:
                state.propose(array("q", [1, 1]))
        for state, start, count, samples, drafted in scheduler.schedule().shares:
            in_front = min(prefix, state.prompt_length)
            if start == 0:
                assert count == state.prompt_length if state.prompt_length < prefix else count >= prefix
            elif start < prefix:
                assert start >= state.prompt_length and count - drafted == 1 and (not drafted or start == prefix - 1)
            if start and start < state.prompt_length and state.reused:
                assert tuple(state.tokens[:in_front]) in known and start >= prefix
            known.add(tuple(state.tokens[:in_front]))
            share = Share(state, start, count, samples, drafted)
            if drafted:
                scheduler.verified(share, [1])
            else:
                scheduler.advance(share, 1 if samples else None)
            if state.computed >= state.final_length:
                scheduler.remove(state)
        scheduler.check()
    assert all(state.finished for state in states)


def test_nothing_to_do() -> None:
    scheduler = make_scheduler()
    assert not scheduler.has_work
    assert scheduler.schedule() == StepPlan(shares=(), preempted=())


class Noticed(RequestState):
    """Counts how often anyone looks at a request of its kind."""

    looks = 0

    def __getattribute__(self, name: str) -> Any:
        Noticed.looks += 1
        return super().__getattribute__(name)


def test_a_step_does_not_look_at_those_that_wait() -> None:
    """A step of 64 requests among 2,000 that wait looks at as many of these as one among 200: at the first, if any."""

    def looks_in_a_step(waiting: int) -> int:
        scheduler = make_scheduler(num_blocks=4096, token_budget=256, max_requests=64)
        for number in range(64):
            add(scheduler, number, 1)
        for number in range(64, 64 + waiting):
            scheduler.add(Noticed(number, number, [number], max_new_tokens=100))
        run(scheduler)
        before = Noticed.looks
        for _ in range(30):
            plan = scheduler.schedule()
            assert len(plan.shares) == 64
            for share in plan.shares:
                scheduler.advance(share, 1)
        return Noticed.looks - before

    assert looks_in_a_step(2_000) == looks_in_a_step(200) <= 30 * 20


def gaps_beside_a_long_prompt(prefill_slowdown: float | None, *, per_pair: float) -> list[float]:
    """Seconds of each step of 32 decoding requests while a prompt of 8,000 tokens comes, on a machine of our making.

    Args:
        per_pair: seconds for each pair of a token and one that it sees.
    """
    pool, sizes = BlockPool(1500), {"token_budget": 512, "max_requests": 64, "block_size": 16}
    scheduler = Scheduler(pool, **sizes, prefill_slowdown=prefill_slowdown)
    for number in range(32):
        scheduler.add(RequestState(number, number, [number] * (1 + number % 5), max_new_tokens=60 + 10 * number))
    long = RequestState("long", 32, range(8000), max_new_tokens=9)
    gaps = []
    for step in range(2000):
        if step == 20:
            scheduler.add(long)
        decoding = {state.number for state in scheduler.running() if state.generated}
        plan = scheduler.schedule()
        pairs = sum(share.num_tokens * (share.start + share.num_tokens) for share in plan.shares)
        seconds = 0.010 + 0.0005 * plan.num_tokens + per_pair * pairs
        scheduler.pace.observe(plan, seconds)
        for share in plan.shares:
            scheduler.advance(share, 1 if share.samples else None)
        assert decoding <= {share.state.number for share in plan.shares}, "everyone who decodes gets a token"
        if step >= 20 and decoding:
            gaps.append(seconds)
        if long.generated:
            return gaps
        for state in list(scheduler.running()):
            if state.computed == state.final_length:
                scheduler.remove(state)
                number = 100 + 40 * step + state.number % 40
                scheduler.add(RequestState(number, number, [number], max_new_tokens=200))
        scheduler.check()
    raise AssertionError("the long prompt was starved")


@pytest.mark.parametrize("per_pair", [0.0, 1e-7], ids=["every token costs the same", "later tokens cost more"])
def test_a_long_prompt_does_not_hold_up_those_who_decode(per_pair: float) -> None:
    decode = 0.010 + 0.0005 * 32
    bounded, free = (gaps_beside_a_long_prompt(slowdown, per_pair=per_pair) for slowdown in (2.0, None))
    assert max(bounded) <= 2.1 * decode + 32 * 200 * per_pair
    assert max(free) > 8 * decode
    # What a token costs in the middle of the prompt, over what is allowed of a step; and some steps to find that out.
    assert len(free) == 17 and len(bounded) <= 1.3 * 8000 * (0.0005 + 4000 * per_pair) / decode + 10
