"""Slots of recurrent states: every request of a step has one of its own, through pauses and departures."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selective_compile.options import EngineConfig
from selective_compile.runtime import Engine
from selective_compile.runtime.kv_cache import bytes_per_block, memory_for_pools, num_blocks
from selective_compile.runtime.request_state import RequestState
from selective_compile.runtime.state_slots import StateSlots, num_slots
from selective_compile.step import StepInputs
from selective_compile.step_program import CallSite, StateSite
from tests.test_whole_functions import Recurrent

SLOTS = 3


def request(number: int) -> RequestState:
    return RequestState(number, number, [1], max_new_tokens=4)


@given(st.lists(st.tuples(st.sampled_from(["start", "step", "pause", "leave"]), st.integers(0, 5)), max_size=60))
def test_a_running_request_keeps_its_slot_alone(events: list[tuple[str, int]]) -> None:
    slots, running, held = StateSlots(SLOTS), [], {}
    paused: list[RequestState] = []
    made = 0
    for event, pick in events:
        if event == "start" and len(running) < SLOTS:
            if paused and pick % 2:
                running.append(paused.pop())
            else:
                made += 1
                running.append(request(made))
        elif running and event in ("pause", "leave"):
            gone = running.pop(pick % len(running))
            held.pop(gone, None)
            gone.computed = 0
            if event == "leave":
                slots.forget(gone)
            else:
                paused.append(gone)
        stepped = running[pick % (len(running) + 1) :]
        found = slots.of(stepped)
        for one, slot in zip(stepped, found, strict=True):
            assert held.setdefault(one, slot) == slot
            one.computed += 1
        assert len({held[one] for one in running if one in held}) == sum(one in held for one in running)
        assert all(0 <= slot < SLOTS for slot in found)


def test_blocks_get_what_states_leave() -> None:
    """Together they stay within the memory for pools."""
    config, device = EngineConfig(kv_memory_fraction=0.5), torch.device("cpu")
    site = CallSite(
        name="a",
        num_query_heads=1,
        num_kv_heads=1,
        key_head_size=64,
        value_head_size=64,
        window=0,
        dtype=torch.float32,
        device=device,
    )
    size, memory = bytes_per_block([site], config.block_size), memory_for_pools(config, device)
    (blocks,) = num_blocks([site], config, max_positions=None, device=device, reserved=memory * 3 // 4)
    assert 0 < blocks * size <= memory * 3 // 10  # a quarter, and what the free memory moves meanwhile


def test_slots_fit_into_memory_or_are_refused() -> None:
    config, device = EngineConfig(max_requests=64), torch.device("cpu")
    small = StateSite(name="a", shape=(4, 8), dtype=torch.float32, device=device)
    large = StateSite(name="b", shape=(2**20, 64), dtype=torch.float32, device=device)
    huge = StateSite(name="c", shape=(2**30, 64), dtype=torch.float32, device=device)
    assert num_slots((), config, device=device) == 64
    assert num_slots((small,), config, device=device) == 64
    assert 1 <= num_slots((large,), config, device=device) < 64
    with pytest.raises(ValueError, match="must hold the states of a request"):
        num_slots((huge,), config, device=device)


def test_a_request_cancelled_between_plan_and_run_leaves_no_slot_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(Recurrent().eval(), EngineConfig(compile=False, max_requests=2))
    run, victims = engine._runner.run, []

    def cancelled_meanwhile(inputs: StepInputs) -> torch.Tensor:
        while victims:
            victims.pop().cancel()
        return run(inputs)

    monkeypatch.setattr(engine._runner, "run", cancelled_meanwhile)
    alone = engine.submit([1, 2, 3], max_new_tokens=4).result().tokens
    for _ in range(4):
        request = engine.submit([1, 2, 3], max_new_tokens=8)
        assert engine.step() and engine.step()
        victims.append(request)
        assert engine.step() and request.finish_reason == "cancelled"
        assert not engine._runner._slots._slots
    assert engine.submit([1, 2, 3], max_new_tokens=4).result().tokens == alone


def test_the_most_requests_that_are_told_are_those_that_there_are_slots_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selective_compile.runtime.model_runner.num_slots", lambda sites, config, device: 3)
    engine = Engine(Recurrent().eval(), EngineConfig(compile=False, max_requests=8))
    assert engine.stats().requests_max == 3
