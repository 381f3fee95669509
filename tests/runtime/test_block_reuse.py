"""Blocks that another request left computed: who finds them, who does not, and what is computed in any case."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

import selective_compile as sc
from selective_compile.backend import compile_step_program
from selective_compile.runtime.block_names import block_names
from selective_compile.runtime.block_pool import BlockPool
from selective_compile.runtime.plan import StepPlan
from selective_compile.runtime.request_state import RequestState, Terms
from selective_compile.runtime.scheduler import Scheduler
from tests.models import tiny
from tests.oracle import assert_same_tokens
from tests.runtime.simulated import SimulatedProgram, expected_tokens, simulated_engine
from tests.shipped import shipped

BLOCK = 4


def make_scheduler(num_blocks: int = 64, token_budget: int = 100, block_reuse: bool = True) -> Scheduler:
    pool = BlockPool(num_blocks)
    return Scheduler(pool, token_budget=token_budget, max_requests=9, block_size=BLOCK, block_reuse=block_reuse)


def add(scheduler: Scheduler, number: int, prompt: list[int], salt: str | None = None) -> RequestState:
    room = scheduler.pool.num_blocks * BLOCK - len(prompt)
    state = RequestState(number, number, prompt, max_new_tokens=room, terms=Terms(cache_salt=salt))
    scheduler.add(state)
    return state


def step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    for share in plan.shares:
        scheduler.advance(share, 1 if share.samples else None)
    scheduler.check()
    return plan


def run_alone(scheduler: Scheduler, number: int, prompt: list[int], salt: str | None = None) -> int:
    """How many tokens the request reused: it is admitted, generates one token and leaves."""
    state = add(scheduler, number, prompt, salt)
    while not state.generated:
        step(scheduler)
    scheduler.remove(state)
    return state.reused


@pytest.mark.parametrize(("length", "reused"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (11, 8)])
def test_full_blocks_are_reused_and_the_last_token_is_computed(length: int, reused: int) -> None:
    scheduler = make_scheduler()
    prompt = list(range(length))
    assert run_alone(scheduler, 0, prompt) == 0
    state = add(scheduler, 1, prompt)
    (share,) = step(scheduler).shares
    assert (share.start, share.num_tokens, share.samples) == (reused, length - reused, True)
    assert share.is_prefill
    assert (scheduler.tokens_reused, scheduler.tokens_admitted) == (reused, 2 * length)
    assert state.reused == reused


def test_equal_tokens_after_other_tokens_are_not_the_same_content() -> None:
    scheduler = make_scheduler()
    run_alone(scheduler, 0, [1, 1, 1, 1, 2, 2, 2, 2, 3])
    assert run_alone(scheduler, 1, [5, 5, 5, 5, 2, 2, 2, 2, 3]) == 0
    assert run_alone(scheduler, 2, [1, 1, 1, 1, 2, 2, 2, 9, 3]) == 4


def test_generated_tokens_are_reused_too() -> None:
    scheduler = make_scheduler()
    state = add(scheduler, 0, [7, 7])
    while state.generated < 4:
        step(scheduler)
    scheduler.remove(state)
    assert run_alone(scheduler, 1, [7, 7, 1, 1, 1, 4]) == 4


def test_a_running_request_shares_its_blocks() -> None:
    scheduler = make_scheduler()
    first = add(scheduler, 0, list(range(10)))
    step(scheduler)
    second = add(scheduler, 1, list(range(10)))
    step(scheduler)
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] != first.blocks[2]
    scheduler.remove(first)
    scheduler.check()
    assert scheduler.pool.num_blocks - scheduler.pool.num_free == len(second.blocks)


def test_requests_of_one_step_share_what_the_first_of_them_computes() -> None:
    scheduler = make_scheduler()
    for number in range(3):
        add(scheduler, number, [*range(8), 50 + number])
    assert [share.num_tokens for share in step(scheduler).shares] == [9, 1, 1]


def test_salts_keep_apart() -> None:
    scheduler = make_scheduler()
    prompt = list(range(9))
    assert run_alone(scheduler, 0, prompt, "a") == 0
    assert run_alone(scheduler, 1, prompt, "b") == 0
    assert run_alone(scheduler, 2, prompt) == 0
    assert run_alone(scheduler, 3, prompt, "None") == 0
    assert [run_alone(scheduler, 4 + n, prompt, salt) for n, salt in enumerate(("a", "b", None))] == [8, 8, 8]


def test_the_least_recently_used_goes_first_and_its_end_before_its_beginning() -> None:
    scheduler = make_scheduler(num_blocks=6)
    first, second = [1] * 9, [2] * 9
    run_alone(scheduler, 0, first)
    run_alone(scheduler, 1, second)
    assert (scheduler.pool.num_free, scheduler.pool.num_idle) == (6, 4)
    assert run_alone(scheduler, 2, first) == 8
    run_alone(scheduler, 3, [3] * 13)  # four blocks: the two without content, and the two of `second`
    assert run_alone(scheduler, 4, first) == 8
    run_alone(scheduler, 5, [4] * 17)  # five blocks: all but the first of `first`, used last
    assert run_alone(scheduler, 6, first) == 4


def test_nothing_is_found_after_the_weights_changed_or_a_step_failed() -> None:
    scheduler = make_scheduler()
    run_alone(scheduler, 0, list(range(9)))
    scheduler.preempt_all()
    assert run_alone(scheduler, 1, list(range(9))) == 0
    scheduler.forget()
    assert (scheduler.pool.num_idle, scheduler.pool.num_free) == (0, 64)


def test_a_preempted_request_finds_its_own_blocks() -> None:
    scheduler = make_scheduler(num_blocks=4)
    old, young = add(scheduler, 0, [1] * 7), add(scheduler, 1, [2] * 7)
    while not scheduler.preemptions:
        step(scheduler)
    scheduler.remove(old)
    (share,) = step(scheduler).shares
    assert share.state is young
    assert share.start == 4


def test_switched_off() -> None:
    scheduler = make_scheduler(block_reuse=False)
    assert [run_alone(scheduler, number, list(range(9))) for number in range(3)] == [0, 0, 0]
    assert scheduler.pool.num_idle == 0


def test_a_name_is_that_of_all_tokens_up_to_the_end_of_the_block() -> None:
    state = RequestState("a", 0, [1, 2, 3, 4, 5], max_new_tokens=2)
    two = list(block_names(state, 2, 2))
    assert block_names(state, 1, 2) == two  # more than were asked for, when they are known
    other = RequestState("b", 1, [1, 2, 3, 4], max_new_tokens=2, terms=Terms(priority=3))
    assert block_names(other, 2, 2) == two
    assert len({*two, *block_names(RequestState("c", 2, [3, 4], max_new_tokens=1), 1, 2)}) == 3


def test_the_names_of_blocks_in_a_prefix_are_those_of_all_its_tokens() -> None:
    def names(*prompt: int, prefix: int = 3) -> list[bytes]:
        return block_names(RequestState("a", 0, prompt, max_new_tokens=1, prefix=prefix), len(prompt) // 2, 2)

    assert names(1, 2, 3, 4)[0] == names(1, 2, 3, 5)[0] != names(1, 2, 4, 4)[0]
    assert names(1, 2, 3, 4)[1] != names(1, 2, 3, 5)[1]
    assert names(1, 2, 3, 4)[0] != names(1, 2, 3, 4, prefix=0)[0] == names(1, 2, 4, 4, prefix=0)[0]


# Through the engine


def test_a_second_request_computes_what_is_new_and_gets_the_same_tokens() -> None:
    engine = simulated_engine(block_size=4)
    prompt = list(range(30))
    first = engine.submit(prompt, max_new_tokens=5)
    first.result()
    before = engine.stats()
    second = engine.submit([*prompt, 7], max_new_tokens=5)
    assert list(second.result().tokens) == expected_tokens([*prompt, 7], second.params)
    after = engine.stats()
    assert after.tokens_reused == 28
    assert after.tokens_computed - before.tokens_computed == 31 + 4 - 28
    assert (after.tokens_admitted, after.blocks_used) == (30 + 31, 0)
    assert after.blocks_idle > 0


def test_new_weights_are_used_by_a_prompt_that_was_here_before() -> None:
    program = SimulatedProgram()
    engine = simulated_engine(program, block_size=4)
    engine.submit(range(20), max_new_tokens=3).result()
    program.weights = 1
    request = engine.submit(range(20), max_new_tokens=3)
    assert list(request.result().tokens) == expected_tokens(range(20), request.params, weights=1)
    assert engine.stats().tokens_reused == 0


def test_a_failed_step_leaves_nothing_to_be_found() -> None:
    program = SimulatedProgram()
    engine = simulated_engine(program, block_size=4)
    failures = iter([RuntimeError("out of memory")])

    def fail_once() -> None:
        for failure in failures:
            raise failure

    program.before_run = fail_once
    assert engine.submit(range(20), max_new_tokens=3).result().finish_reason == "error"
    request = engine.submit(range(20), max_new_tokens=3)
    assert list(request.result().tokens) == expected_tokens(range(20), request.params)


def test_a_request_cancelled_while_it_is_computed_leaves_whole_blocks() -> None:
    program = SimulatedProgram()
    engine = simulated_engine(program, block_size=4)
    request = engine.submit(range(20), max_new_tokens=3)
    program.before_run = request.cancel
    engine.step()
    program.before_run = lambda: None
    again = engine.submit(range(20), max_new_tokens=3)
    assert list(again.result().tokens) == expected_tokens(range(20), again.params)
    assert engine.stats().tokens_reused == 16


def test_drop_computed() -> None:
    engine = simulated_engine(block_size=4)
    engine.submit(range(20), max_new_tokens=3).result()
    running = engine.submit([5], max_new_tokens=3)
    engine.step()
    engine.drop_computed(if_idle=True)
    assert engine.stats().blocks_idle > 0
    engine.drop_computed()
    assert (engine.stats().blocks_idle, engine.stats().running) == (0, 0)
    assert list(running.result().tokens) == expected_tokens([5], running.params)


def test_a_salt_that_is_none() -> None:
    engine = simulated_engine()
    with pytest.raises(ValueError, match="cache_salt must be a string or None, got 5"):
        engine.submit([1], cache_salt=5)  # type: ignore[arg-type]


def serve(model: PreTrainedModel, prompts: list[list[int]], **options: bool) -> tuple[list[list[int]], int, int]:
    """The tokens of each prompt, and how many tokens were computed and reused for them."""
    config = sc.EngineConfig(compile=False, token_budget=64, max_kv_tokens=2048, block_size=16, **options)
    engine = sc.Engine(model, config, program=compile_step_program(model, config))
    requests = [engine.submit(prompt, max_new_tokens=12) for prompt in prompts]
    tokens = [list(request.result().tokens) for request in requests]
    stats = engine.stats()
    return tokens, stats.tokens_computed, stats.tokens_reused


def test_llama_gives_the_tokens_of_generate_with_shared_prefixes() -> None:
    model = tiny("llama")
    shared = [(7 * i) % 199 for i in range(100)]
    prompts = [[*shared[: 40 + 9 * n], 3, n] for n in range(7)] + [[*shared, n] for n in range(7)]
    with_reuse = serve(model, prompts)
    without = serve(model, prompts, block_reuse=False)
    for prompt, tokens in zip(prompts, with_reuse[0], strict=True):
        assert_same_tokens(model, prompt, tokens)
    assert with_reuse[0] == without[0]
    assert with_reuse[1] + with_reuse[2] == without[1]
    assert with_reuse[2] > 0.8 * sum(map(len, prompts[1:])) * 15 / 16 * 0.9


def test_windows_see_the_same_through_reused_blocks() -> None:
    """Gemma 3: layers with a window of 8 between full ones; reuse starts far behind the window."""
    model = tiny("gemma3_text")
    prompts = [[(5 * i) % 199 for i in range(50)] + [n] for n in range(3)]
    tokens, _, reused = serve(model, prompts)
    for prompt, own in zip(prompts, tokens, strict=True):
        assert_same_tokens(model, prompt, own)
    assert reused == 2 * 48


def test_the_model_that_ships_continues_a_conversation_from_its_blocks() -> None:
    """The second prompt is the first one, its answer and more: what was generated is found as well."""
    model, tokenizer, program = shipped()
    config = sc.EngineConfig(compile=False, max_kv_tokens=1024, block_size=8)
    engine = sc.Engine(model, config, program=program)
    conversation: list[int] = tokenizer("12+7=19\n30+41=71\n25+13=").input_ids
    for _ in range(3):
        reused = engine.stats().tokens_reused
        request = engine.submit(conversation, max_new_tokens=20, eos_token_id=[])
        tokens = list(request.result().tokens)
        assert_same_tokens(model, conversation, tokens)
        found = engine.stats().tokens_reused - reused
        conversation = [*conversation, *tokens]
    assert found >= len(conversation) - 20 - 20 // 8 * 8 - 8


def test_sixty_four_requests_with_one_system_prompt_compute_it_once() -> None:
    """All at once: even those in the step that computes the prompt share it."""
    system = [(7 * i) % 61 for i in range(1000)]
    work = {}
    for block_reuse in (True, False):
        engine = simulated_engine(max_kv_tokens=2**17, token_budget=2048, block_reuse=block_reuse)
        requests = [engine.submit([*system, n % 61, n // 61], max_new_tokens=2) for n in range(64)]
        tokens = [request.result().tokens for request in requests]
        work[block_reuse] = (engine.stats().tokens_computed, tokens)
    assert work[True][1] == work[False][1]
    assert work[False][0] == 64 * 1003
    assert work[False][0] - work[True][0] == 63 * 992
    assert 63 * 992 >= 0.9 * 64 * 1000
