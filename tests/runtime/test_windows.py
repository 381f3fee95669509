"""Layers that see only a part of the context hold only the blocks of that part."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import selective_compile as sc
from selective_compile.backend import CallSite, compile_step_program
from selective_compile.runtime.block_group import most_blocks
from selective_compile.runtime.block_pool import BlockPool
from selective_compile.runtime.kv_cache import allocate_pools, bytes_per_block, num_blocks
from selective_compile.runtime.request_state import RequestState
from selective_compile.runtime.scheduler import WHOLE, Scheduler
from selective_compile.step import Reach, reaches
from tests.models import WINDOW, tiny
from tests.oracle import assert_same_tokens
from tests.runtime.simulated import CPU

BLOCK = 4


def scheduler_of(*kinds: Reach, blocks: int, **options: Any) -> Scheduler:
    others = [(BlockPool(blocks), reach) for reach in kinds[1:]]
    chosen = {"token_budget": 8, "max_requests": 4, "block_size": BLOCK, **options}
    return Scheduler(BlockPool(blocks), *others, reach=kinds[0], **chosen)


def run(scheduler: Scheduler, *states: RequestState) -> list[int]:
    """To the end of all; the most blocks that were held at a time, by table."""
    held = [0] * len(scheduler.blocks.groups)
    for state in states:
        scheduler.add(state)
    while scheduler.has_work:
        plan = scheduler.schedule()
        scheduler.check()
        for place, group in enumerate(scheduler.blocks.groups):
            held[place] = max(held[place], group.pool.num_blocks - group.pool.num_free)
        for share in plan.shares:
            scheduler.advance(share, len(share.state.tokens) % 7 if share.samples else None)
            if share.state.generated == share.state.final_length + 1 - share.state.prompt_length:
                scheduler.remove(share.state)
    return held


@pytest.mark.parametrize(
    ("reach", "span"),
    [(Reach(window=5), 5), (Reach(chunk=6), 6), (Reach(window=9, chunk=6), 6)],
)
def test_what_a_row_sees(reach: Reach, span: int) -> None:
    assert reach.limited and reach.span == span
    for position in range(40):
        # As `selective_compile.ops` has it.
        seen = [
            j
            for j in range(position + 1)
            if (not reach.window or position - reach.window < j)
            and (not reach.chunk or j // reach.chunk == position // reach.chunk)
        ]
        assert reach.first_seen(position) == seen[0]
        assert len(seen) <= span


def test_the_farthest_reach_comes_first() -> None:
    kinds = [Reach(window=4), Reach(), Reach(chunk=9), Reach(window=4)]
    assert reaches(kinds) == (Reach(), Reach(chunk=9), Reach(window=4))


@pytest.mark.parametrize("budget", [1, 3, 8, 16])
@pytest.mark.parametrize("reach", [Reach(window=1), Reach(window=6), Reach(chunk=8), Reach(window=9, chunk=16)])
def test_a_request_of_any_length_holds_a_window(reach: Reach, budget: int) -> None:
    most = most_blocks(reach, token_budget=budget, block_size=BLOCK)
    assert most is not None and (most - 2) * BLOCK < reach.span - 1 + budget
    scheduler = scheduler_of(reach, blocks=most, token_budget=budget)
    assert scheduler.blocks.most_tokens is None
    (held,) = run(scheduler, RequestState("a", 0, range(150), max_new_tokens=50))
    assert held <= most and scheduler.preemptions == 0


def test_a_pool_of_less_than_a_window_limits_the_length() -> None:
    scheduler = scheduler_of(Reach(window=40), blocks=5)
    assert scheduler.blocks.most_tokens == 5 * BLOCK
    assert scheduler.blocks.fits(20) and not scheduler.blocks.fits(21)
    assert run(scheduler, RequestState("a", 0, range(16), max_new_tokens=5)) == [5]


def test_mixed_layers_hold_all_and_a_window() -> None:
    scheduler = scheduler_of(WHOLE, Reach(window=6), blocks=60)
    held = run(scheduler, RequestState("a", 0, range(150), max_new_tokens=50))
    assert held == [50, 4]


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
def test_windowed_requests_fit_beside_one_another(policy: Any) -> None:
    """Blocks for three requests' windows, and lengths of which not one would fit: under the guarantee nobody gives way,
    also where blocks are shared, so that giving one back frees none."""
    states = [RequestState(n, n, [*range(60), *([n] * 40)], max_new_tokens=20) for n in range(6)]
    scheduler = scheduler_of(Reach(window=6), blocks=15, policy=policy)
    (held,) = run(scheduler, *states)
    assert 8 < held <= 15
    if policy == "guaranteed_no_evict":
        assert scheduler.preemptions == 0


def test_a_prefix_is_found_by_the_blocks_in_the_window() -> None:
    """The blocks in front were freed and taken by others; those that the next token sees are enough."""
    scheduler = scheduler_of(Reach(window=6), blocks=8, token_budget=8)
    run(scheduler, RequestState(0, 0, range(60), max_new_tokens=1))
    again = RequestState(1, 1, [*range(60), 1, 2], max_new_tokens=1)
    run(scheduler, again)
    assert again.reused == 60
    # Of a prefix that ends before that, the blocks are gone.
    shorter = RequestState(2, 2, range(30), max_new_tokens=1)
    run(scheduler, shorter)
    assert shorter.reused == 0


def test_a_prefix_must_be_there_in_every_table() -> None:
    scheduler = scheduler_of(WHOLE, Reach(window=6), blocks=30)
    run(scheduler, RequestState(0, 0, range(60), max_new_tokens=1))
    whole, windowed = (group.pool for group in scheduler.blocks.groups)
    windowed.forget()
    again = RequestState(1, 1, range(61), max_new_tokens=1)
    run(scheduler, again)
    assert again.reused == 0
    third = RequestState(2, 2, range(62), max_new_tokens=1)
    run(scheduler, third)
    assert third.reused == 60


def site(window: int, heads: int = 2) -> CallSite:
    return CallSite(
        name="call",
        num_query_heads=heads,
        num_kv_heads=heads,
        key_head_size=8,
        value_head_size=8,
        window=window,
        dtype=torch.float32,
        device=CPU,
    )


def test_memory_is_shared_out_by_what_can_be_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five windowed layers to a full one: the same memory holds almost six times as many tokens."""
    sites = [site(window=0), *(site(window=64) for _ in range(5))]
    config = sc.EngineConfig(token_budget=64, max_requests=4, block_size=16)
    memory = 6000 * bytes_per_block(sites[:1], config.block_size)
    monkeypatch.setattr("selective_compile.runtime.kv_cache.free_memory", lambda device: memory / 0.9 + 1)
    whole, windowed = num_blocks(sites, config, max_positions=None, device=CPU)
    assert windowed == 4 * 9 and whole == 6000 - 5 * windowed
    few = num_blocks(
        sites, sc.EngineConfig(token_budget=64, max_kv_tokens=160, block_size=16), max_positions=None, device=CPU
    )
    assert few == (10, 10)
    pools = allocate_pools(sites, (whole, windowed), config.block_size)
    assert [keys.shape[0] for keys, _ in pools] == [whole, *[windowed] * 5]
    assert sum(tensor.nbytes for pair in pools for tensor in pair) <= memory


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_the_tokens_are_those_of_generate(family: str) -> None:
    """Prompts of many windows, chunks, a shared beginning, and pools so small that requests give way."""
    model = tiny(family)
    config = sc.EngineConfig(compile=False, block_size=BLOCK, token_budget=12, max_requests=5, max_kv_tokens=240)
    engine = sc.Engine(model, config, program=compile_step_program(model, config))
    prompts = [[*range(20), *((n + 7 * i) % 199 for i in range(17 * n + 1))] for n in range(6)]
    requests = [engine.submit(prompt, max_new_tokens=2 * WINDOW) for prompt in prompts]
    while engine.step():
        engine._scheduler.check()
    for prompt, request in zip(prompts, requests, strict=True):
        assert_same_tokens(model, prompt, request.tokens)
    stats = engine.stats()
    assert stats.tokens_reused > 0
    if family == "mistral":  # nothing but windows: a prompt that no pool would hold
        long = engine.submit([n % 199 for n in range(400)], max_new_tokens=8)
        assert_same_tokens(model, long.prompt_ids, list(long.result().tokens))
    else:
        assert stats.preemptions > 0


def test_two_block_tables_through_inductor() -> None:
    model = tiny("gemma3_text")
    engine = sc.Engine(model, sc.EngineConfig(block_size=BLOCK, token_budget=16, max_kv_tokens=400))
    prompts = [[(5 * i) % 199 for i in range(20 + 17 * n)] + [n] for n in range(3)]
    requests = [engine.submit(prompt, max_new_tokens=2 * WINDOW) for prompt in prompts]
    for prompt, request in zip(prompts, requests, strict=True):
        assert_same_tokens(model, prompt, list(request.result().tokens))
