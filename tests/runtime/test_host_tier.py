"""The host tier: what the device has no room for comes back the same, if that is quicker than computing it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import selective_compile as sc
from selective_compile.backend import compile_step_program
from selective_compile.runtime.block_pool import BlockPool
from selective_compile.runtime.host_tier import Copy, HostTier
from selective_compile.runtime.kv_cache import bytes_per_block
from selective_compile.runtime.request_state import RequestState
from selective_compile.runtime.scheduler import Scheduler
from tests.models import tiny
from tests.oracle import assert_same_tokens
from tests.runtime.simulated import SimulatedProgram, expected_tokens, simulated_engine
from tests.runtime.traffic import Memory, next_token

BLOCK = 4
BYTES = BLOCK * 3 * 8  # a block of the simulated program's pools


def standing_still() -> float:
    """A clock by which nothing takes any time, so that nothing tells copying to be slow."""
    return 0.0


def tier(num_slots: int, *, pays: Any = lambda copies: True) -> tuple[HostTier, list[Copy]]:
    copies: list[Copy] = []
    return HostTier(num_slots, table=0, copies=copies, pays=pays), copies


def test_the_slot_used_least_recently_goes_first() -> None:
    host, copies = tier(2)
    host.spill(b"a", 5)
    host.spill(b"b", 6)
    host.spill(b"a", 7)  # its content is there already
    host.spill(b"c", 8)
    assert [host.has(name) for name in (b"a", b"b", b"c")] == [True, False, True]
    assert copies == [Copy(True, 0, 5, 0), Copy(True, 0, 6, 1), Copy(True, 0, 8, 1)]
    host.check()


def test_what_is_held_is_not_overwritten_and_stays_after_it_was_restored() -> None:
    host, copies = tier(2)
    host.spill(b"a", 5)
    host.spill(b"b", 6)
    slots = host.hold([b"a"])
    host.spill(b"c", 7)
    host.spill(b"d", 8)
    host.restore([b"a"], slots, [9])
    assert copies[-1] == Copy(False, 0, 9, slots[0])
    assert slots[0] not in {copy.slot for copy in copies[2:-1]}
    assert host.has(b"a") and host.has(b"d") and not host.has(b"c")
    host.check()


def test_copies_that_take_longer_than_computing_are_not_made() -> None:
    host, copies = tier(2, pays=lambda copies: copies < 2)
    host.spill(b"a", 5)
    assert not copies and not host.has(b"a")


def scheduler_of(num_blocks: int, host_slots: int) -> Scheduler:
    return Scheduler(BlockPool(num_blocks), token_budget=64, max_requests=4, block_size=BLOCK, host_slots=host_slots)


def run(scheduler: Scheduler, memory: Memory, *states: RequestState, copying: float = 0.01) -> list[Copy]:
    copies: list[Copy] = []
    for state in states:
        scheduler.add(state)
    while scheduler.has_work:
        plan = scheduler.schedule()
        scheduler.check()
        memory.copy(plan.copies)
        copies += plan.copies
        if plan.copies:
            scheduler.pace.copies.observe(len(plan.copies), copying * len(plan.copies))
        memory.run(plan, 0)
        for share in plan.shares:
            scheduler.advance(share, next_token(share.state) if share.samples else None)
            if share.state.generated == share.state.final_length + 1 - share.state.prompt_length:
                scheduler.remove(share.state)
        scheduler.pace.observe(plan, 1.0 + plan.num_tokens)
    return copies


def test_a_prefix_that_was_evicted_comes_back() -> None:
    scheduler, memory = scheduler_of(num_blocks=6, host_slots=20), Memory(BLOCK)
    run(scheduler, memory, RequestState(0, 0, range(20), max_new_tokens=1))
    others = run(scheduler, memory, RequestState(1, 1, range(100, 122), max_new_tokens=1))
    assert any(copy.to_host for copy in others)
    again = RequestState(2, 2, range(21), max_new_tokens=1)
    copies = run(scheduler, memory, again)
    assert again.reused == 20 and any(not copy.to_host for copy in copies)


def test_a_preempted_request_goes_on_from_the_host() -> None:
    """Two requests that cannot both stay: whoever gives way computes again at most what its last block held."""
    scheduler, memory = scheduler_of(num_blocks=12, host_slots=40), Memory(BLOCK)
    states = [RequestState(n, n, [n] * 17, max_new_tokens=26) for n in range(2)]
    run(scheduler, memory, *states)
    assert scheduler.preemptions > 0
    assert states[1].reused >= 17 // BLOCK * BLOCK
    computed = sum(state.final_length for state in states) + scheduler.tokens_admitted - 34 - scheduler.tokens_reused
    alone = scheduler_of(num_blocks=12, host_slots=0)
    states = [RequestState(n, n, [n] * 17, max_new_tokens=26) for n in range(2)]
    run(alone, Memory(BLOCK), *states)
    again = sum(state.final_length for state in states) + alone.tokens_admitted - 34 - alone.tokens_reused
    assert computed < again


def test_slow_copies_give_way_to_computing() -> None:
    """The same traffic, with copies that take longer than the tokens: after the first ones none is made."""
    counts = []
    for copying in (0.01, 100.0):
        scheduler, memory = scheduler_of(num_blocks=6, host_slots=20), Memory(BLOCK)
        copies = []
        for number in range(6):
            first = 100 * (number % 2)
            state = RequestState(number, number, range(first, first + 20), max_new_tokens=3)
            copies.append(run(scheduler, memory, state, copying=copying))
        counts.append([len(made) for made in copies])
    assert all(counts[0][1:]) and counts[1][1] and not any(counts[1][2:])


def test_the_engine_gives_the_same_tokens_and_forgets_with_the_weights() -> None:
    program = SimulatedProgram()
    engine = simulated_engine(
        program, max_kv_tokens=48, block_size=BLOCK, host_kv_bytes=60 * BYTES, clock=standing_still
    )
    assert engine.stats().host_slots_max == 60
    prompts = [[n, *range(25)] for n in range(5)]
    for _ in range(2):
        for prompt in prompts:
            request = engine.submit(prompt, max_new_tokens=8)
            assert list(request.result().tokens) == expected_tokens(prompt, request.params)
    stats = engine.stats()
    assert stats.tokens_reused > 0.8 * sum(map(len, prompts)) and stats.host_slots_used > 0
    program.weights = 1
    request = engine.submit(prompts[0], max_new_tokens=8)
    assert list(request.result().tokens) == expected_tokens(prompts[0], request.params, weights=1)
    assert engine.stats().host_slots_used <= 12


def test_a_failed_step_leaves_nothing_on_the_host() -> None:
    program = SimulatedProgram()
    engine = simulated_engine(
        program, max_kv_tokens=48, block_size=BLOCK, host_kv_bytes=60 * BYTES, clock=standing_still
    )
    for n in range(3):
        engine.submit([n, *range(25)], max_new_tokens=8).result()
    assert engine.stats().host_slots_used > 0
    failures = iter([RuntimeError("out of memory")])

    def fail_once() -> None:
        for failure in failures:
            raise failure

    program.before_run = fail_once
    assert engine.submit([7, *range(25)], max_new_tokens=8).result().finish_reason == "error"
    assert engine.stats().host_slots_used == 0
    request = engine.submit([0, *range(25)], max_new_tokens=8)
    assert list(request.result().tokens) == expected_tokens([0, *range(25)], request.params)


def test_the_tokens_are_those_of_generate() -> None:
    """Gemma 3 has two block tables: copies of both."""
    model = tiny("gemma3_text")
    program = compile_step_program(model, sc.EngineConfig(compile=False))
    size = bytes_per_block(program.call_sites, BLOCK)
    config = sc.EngineConfig(
        compile=False, block_size=BLOCK, token_budget=16, max_requests=4, max_kv_tokens=120, host_kv_bytes=100 * size
    )
    engine = sc.Engine(model, config, program=program, clock=standing_still)
    copies: list[Copy] = []
    copy = engine._runner.copy
    engine._runner.copy = lambda made: (copies.extend(made), copy(made))[1]  # type: ignore[method-assign,assignment]
    prompts = [[(n + 5 * i) % 199 for i in range(40)] for n in range(5)]
    requests = [engine.submit(prompt, max_new_tokens=12) for prompt in prompts + prompts]
    while engine.step():
        engine._scheduler.check()
    for prompt, request in zip(prompts + prompts, requests, strict=True):
        assert_same_tokens(model, prompt, request.tokens)
    assert any(copy.to_host for copy in copies) and any(not copy.to_host for copy in copies)
    assert {copy.table for copy in copies} == set(range(len(engine._scheduler.blocks.groups)))


def test_it_needs_names() -> None:
    with pytest.raises(ValueError, match=f"host_kv_bytes must be 0 or hold a block of {BYTES} bytes, got {BYTES - 1}"):
        simulated_engine(block_size=BLOCK, host_kv_bytes=BYTES - 1)
    with pytest.raises(ValueError, match="host_kv_bytes must be 0 without block_reuse, got 5"):
        sc.EngineConfig(host_kv_bytes=5, block_reuse=False)


def test_copies_run_in_their_order() -> None:
    """A slot and a block that are used twice in one plan end with what came last, and hand on what was there before."""
    engine = simulated_engine(max_kv_tokens=16, block_size=BLOCK, host_kv_bytes=2 * BYTES)
    runner = engine._runner
    keys, _ = runner._pools[0]
    keys.copy_(torch.arange(4.0).double().view(4, 1, 1, 1).expand_as(keys))
    runner.copy(
        [
            Copy(True, 0, 0, 0),  # slot 0: 0
            Copy(True, 0, 1, 0),  # slot 0: 1
            Copy(False, 0, 2, 0),  # block 2: 1
            Copy(True, 0, 3, 0),  # slot 0: 3
            Copy(False, 0, 0, 0),  # block 0: 3
            Copy(False, 0, 1, 0),  # block 1: 3
        ]
    )
    assert keys[:, 0, 0, 0].tolist() == [3, 3, 1, 3]


def test_a_model_whose_requests_do_not_go_on_from_blocks_has_no_host_tier(caplog: pytest.LogCaptureFixture) -> None:
    program = SimulatedProgram()
    program.keeps_requests = True
    engine = simulated_engine(program, block_size=BLOCK, host_kv_bytes=60 * BYTES)
    assert engine.stats().host_slots_max == 0 and "host_kv_bytes is not used" in caplog.text
