"""An engine that is warm: traffic finds all captured and compiled, and nothing is left of the steps that did it."""

from __future__ import annotations

import io
import random
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from selective_compile import Engine, EngineConfig
from selective_compile.backend import compile_step_program
from selective_compile.progress import on_stderr, silent
from selective_compile.runtime import engine as engine_module
from selective_compile.runtime.token_marks import SEEN
from selective_compile.step import StepInputs
from tests.models import tiny
from tests.oracle import assert_same_tokens
from tests.runtime.engine_checks import assert_nothing_left, check, expect, run_until_idle
from tests.runtime.played_stream import PlayedStream, TapedStream
from tests.runtime.simulated import SimulatedProgram, simulated_engine

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"do_sample": True, "seed": 3, "top_k": 5},
    {"repetition_penalty": 1.5},
    {"min_new_tokens": 4, "eos_token_id": [1, 2], "suppress_tokens": [0, 3]},
    {"do_sample": True, "seed": 4, "num_return_sequences": 3},
    {"prompt_lookup_num_tokens": 3},
    {"logprobs": True},
)


def random_traffic(engine: Engine, seed: int, count: int, vocabulary: int) -> list[Any]:
    """Requests of all kinds, arriving at random; some are cancelled."""
    draw, requests = random.Random(seed), []
    for _ in range(count):
        prompt = [draw.randrange(vocabulary) for _ in range(draw.randint(1, 40))]
        requests += engine.submit(prompt, max_new_tokens=draw.randint(1, 9), **draw.choice(KINDS)).samples
        for _ in range(draw.randint(0, 3)):
            engine.step()
            check(engine)
        if draw.random() < 0.1:
            draw.choice(requests).cancel()
    run_until_idle(engine)
    return [request for request in requests if request.finish_reason != "cancelled"]


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_after_it_random_traffic_captures_nothing(seed: int, invariant: bool) -> None:
    moods = random.Random(seed)
    stream = PlayedStream(lambda: moods.choice((0, 0, 1, 9)), captures=True)
    engine = simulated_engine(
        SimulatedProgram(captured=True),
        stream=stream,
        token_budget=moods.choice((7, 48, 70)),
        max_requests=moods.choice((1, 5, 20)),
        block_size=2,
        max_kv_tokens=2 * 60,
        batch_invariant=invariant,
    )
    most = engine.stats().captured_max
    assert stream.captured == engine.stats().captured == 0 < most, "how many there can be is known before a step"
    engine.warm_up()
    assert stream.captured == engine.stats().captured == most
    assert stream.replayed == engine.stats().steps == 0
    for request in random_traffic(engine, seed, 40, 3):
        expect(request)
    assert stream.replayed > 20 and stream.captured == most, "nothing is captured in traffic"
    engine.warm_up()
    assert stream.captured == most, "what is there is not captured again"


@pytest.mark.parametrize("invariant", [False, True])
def test_the_largest_steps_are_captured_first(invariant: bool) -> None:
    """So that the others compute in the memory that they leave: one that is larger than all before takes more."""
    stream, computed, captured = PlayedStream(captures=True), [], []

    class Seen(SimulatedProgram):
        def __call__(self, inputs: StepInputs, *others: Any) -> Tensor:
            computed.append((len(inputs.input_ids), len(inputs.context_lens), len(inputs.logit_rows)))
            return super().__call__(inputs, *others)

    capture = stream.capture

    def noted(work: Any, keep: Any) -> Any:
        found = capture(work, keep)
        captured.append(computed[-1])
        return found

    stream.capture = noted  # type: ignore[method-assign]
    engine = simulated_engine(
        Seen(captured=True), stream=stream, token_budget=70, max_requests=20, batch_invariant=invariant
    )
    engine.warm_up()
    assert captured == sorted(captured, reverse=True) and len(captured) == engine.stats().captured_max
    assert len({tokens for tokens, _, _ in captured}) > 2


def test_captured_by_it_steps_give_the_tokens_of_the_model() -> None:
    model, stream = tiny("llama"), TapedStream(captures=True)
    config = EngineConfig(compile=False, block_size=4, max_kv_tokens=400, max_requests=3, token_budget=32)
    engine = Engine(model, config, stream=stream)
    engine.warm_up()
    captured = stream.captured
    requests = [engine.submit([3 + place, 4, 5], max_new_tokens=5) for place in range(4)]
    run_until_idle(engine)
    for request in requests:
        assert_same_tokens(model, request.prompt_ids, request.tokens)
    assert stream.captured == captured == engine.stats().captured_max and stream.replayed > 4


def test_nothing_is_left_of_it() -> None:
    stream = PlayedStream(captures=True)
    engine = simulated_engine(
        SimulatedProgram(captured=True), stream=stream, token_budget=48, max_requests=3, block_size=2
    )
    request = engine.submit([1, 2, 0, 1, 2], max_new_tokens=6)
    run_until_idle(engine)
    before, pools = engine.stats(), [pool.clone() for pair in engine._runner._pools for pool in pair]
    running = engine.submit([2, 2, 1], max_new_tokens=6, repetition_penalty=1.3)
    engine.step()
    engine.warm_up()  # the step on the device is landed, and its request goes on
    run_until_idle(engine)
    for each in (request, running):
        expect(each)
    again = engine.submit([1, 2, 0, 1, 2], max_new_tokens=6)
    run_until_idle(engine)
    expect(again)
    assert engine.stats().tokens_reused - before.tokens_reused == 4, "prefixes that were there are there"
    fresh = simulated_engine(SimulatedProgram(captured=True), stream=PlayedStream(captures=True), block_size=2)
    fresh.warm_up()
    assert_nothing_left(fresh)
    stats = fresh.stats()
    assert (stats.blocks_idle, stats.tokens_admitted, stats.tokens_computed, stats.steps) == (0, 0, 0, 0)
    assert all(not pool.any() for pair in fresh._runner._pools for pool in pair) and any(p.any() for p in pools)


def test_kernels_for_few_and_for_many_rows_of_a_request_are_compiled() -> None:
    """The attention kernel has a tile for each: a step of either kind would compile it anew in traffic."""
    few, stream = set(), PlayedStream()

    class Seen(SimulatedProgram):
        def __call__(self, inputs: StepInputs, *others: Any) -> Tensor:
            few.add(len(inputs.input_ids) <= 2 * len(inputs.context_lens))
            return super().__call__(inputs, *others)

    simulated_engine(Seen(captured=True), stream=stream, token_budget=48).warm_up()
    stream.call(lambda: None)
    assert few == {True, False}


def test_nobody_is_marked_for_what_nobody_has_said() -> None:
    """Neither by warm-up and captures nor by padded rows, of a request with a repetition penalty beside empty slots."""
    stream = TapedStream(captures=True)
    config = EngineConfig(compile=False, block_size=4, max_kv_tokens=400, max_requests=3, token_budget=32)
    engine = Engine(tiny("llama"), config, stream=stream)

    def marked() -> list[int]:
        engine.hand_out()
        stream.call(lambda: None)
        return (engine._runner._chooser.marks.marks[:3] & SEEN).sum(dim=1).tolist()

    engine.warm_up()
    assert marked() == [0, 0, 0]
    request = engine.submit([90, 91], max_new_tokens=6, repetition_penalty=1.3)
    run_until_idle(engine)
    assert stream.replayed > 3 and sorted(marked())[:2] == [0, 0]
    assert set(marked()) == {0, len({*request.prompt_ids, *request.tokens})}


def test_weights_that_have_moved_are_captured_anew() -> None:
    model, stream = tiny("llama"), TapedStream(captures=True)
    config = EngineConfig(compile=False, block_size=4, max_kv_tokens=400, max_requests=2, token_budget=8)
    engine = Engine(model, config, stream=stream)
    engine.warm_up()
    most = engine.stats().captured_max
    with torch.no_grad():
        model.lm_head.weight.data = model.lm_head.weight.flip(0).contiguous()
    engine.warm_up()
    assert stream.captured == 2 * most
    request = engine.submit([3, 4, 5], max_new_tokens=5)
    run_until_idle(engine)
    assert_same_tokens(model, [3, 4, 5], request.tokens)
    assert stream.captured == 2 * most


def test_after_it_an_engine_on_a_cpu_compiles_nothing() -> None:
    model = tiny("llama")
    config = EngineConfig(block_size=4, max_kv_tokens=400, max_requests=3, token_budget=40)
    engine = Engine(model, config, program=compile_step_program(model, config))
    engine.warm_up()

    def compiled() -> dict[str, int]:
        return {f"{kind}.{name}": count for kind in ("stats", "inductor") for name, count in counters[kind].items()}

    before = compiled()
    assert_nothing_left(engine)
    random_traffic(engine, 5, 8, model.config.vocab_size)
    assert compiled() == before and engine.stats().captured_max == 0


def test_a_bar_is_shown_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def bars(description: str, total: int | None = None) -> Any:
        told.append(total)
        return engine_module.silent(description, total)

    monkeypatch.setattr(engine_module, "on_stderr", lambda: bars)
    stream = PlayedStream(captures=True)
    engine = simulated_engine(SimulatedProgram(captured=True), stream=stream, max_requests=2, token_budget=9)
    engine.warm_up(progress=False)
    assert told == []
    engine.warm_up()
    assert told == [5], "the steps that are compiled run again; no graph is missing"


def test_no_bar_is_made_where_nobody_would_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is what draws it imported."""
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert on_stderr() is silent


def test_what_nobody_can_reach_is_gone_before_requests_come() -> None:
    """Else Python would look for it in the middle of a step."""
    engine = Engine(tiny("llama", num_hidden_layers=1), EngineConfig(compile=False, max_kv_tokens=160))
    loop: list[Any] = [Tensor()]
    loop.append(loop)
    lost = weakref.ref(loop[0])
    del loop
    engine.warm_up(progress=False)
    assert lost() is None
