"""The registry for Prometheus and the trace file: they agree with what the engine did."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from selective_compile.runtime import BatchManager, Engine, EngineMetrics, RequestProcessor, StepRecord, TraceFile
from selective_compile.runtime.stats import StepFloor
from tests.runtime.simulated import SimulatedProgram, simulated_engine


def run(engine: Engine) -> None:
    while engine.step():
        pass


def test_counters_gauges_and_times_are_those_of_the_engine() -> None:
    engine = simulated_engine(max_kv_tokens=48, block_size=4, max_requests=8)
    metrics = EngineMetrics(engine)

    def value(name: str, **labels: str) -> Any:
        return metrics.registry.get_sample_value(f"selective_{name}", labels)

    requests = [engine.submit([1, 2, 3, 4, number], max_new_tokens=20) for number in range(6)]
    engine.step()
    requests[0].cancel()
    assert value("requests_running") == engine.stats().running > 0
    assert value("requests_total", finish_reason="cancelled") == 1
    run(engine)
    stats = engine.stats()
    for name in ("steps", "preemptions", "tokens_computed", "tokens_generated", "tokens_reused", "tokens_admitted"):
        assert value(f"{name}_total") == getattr(stats, name), name
    assert stats.preemptions > 0 and stats.tokens_reused > 0
    assert (value("requests_running"), value("blocks_used"), value("blocks_max")) == (0, 0, 12)
    assert value("requests_total", finish_reason="length") == 5
    assert value("requests_total", finish_reason="cancelled") == 1
    assert value("step_seconds_count") == stats.steps
    assert value("request_seconds_count") == value("queue_seconds_count") == 6
    assert value("between_tokens_seconds_count") == 5
    total = sum(request.result().timing.total or 0.0 for request in requests)
    assert value("request_seconds_sum") == pytest.approx(total)
    assert (value("requests_max"), value("block_tokens"), value("requests_scheduled")) == (8, 4, 1)
    assert (value("requests_context"), value("requests_generating"), value("context_tokens")) == (0, 1, 0)
    assert b"# HELP selective_tokens_reused_total" in generate_latest(metrics.registry)


def test_ends_that_no_step_follows_are_counted_and_do_not_pile_up() -> None:
    engine = simulated_engine()
    metrics = EngineMetrics(engine)
    for _ in range(5000):
        engine.submit([1]).cancel()
    assert metrics.registry.get_sample_value("selective_requests_total", {"finish_reason": "cancelled"}) == 5000
    assert len(engine._log._left) < 5000


def test_failed_steps_and_those_that_they_ended_are_seen() -> None:
    program, records = SimulatedProgram(), list[StepRecord]()
    engine = simulated_engine(program, observers=[records.append])
    metrics = EngineMetrics(engine)

    def fail() -> None:
        raise MemoryError("no more")

    program.before_run = fail
    request = engine.submit([1], request_id="doomed")
    engine.drive()
    (record,) = records
    assert record.error == request.error and "no more" in str(record.error) and not record.shares
    assert [end.request_id for end in record.ended] == ["doomed"]
    assert metrics.registry.get_sample_value("selective_requests_total", {"finish_reason": "error"}) == 1
    assert metrics.registry.get_sample_value("selective_steps_total") == 1


def test_a_registry_has_one_engine_and_may_be_closed() -> None:
    engine = simulated_engine()
    metrics = EngineMetrics(engine)
    with pytest.raises(ValueError, match="Duplicated"):
        EngineMetrics(engine, metrics.registry)
    text = generate_latest(metrics.registry).decode().splitlines()
    assert len(engine._log._observers) == 1 and len(text) == len(set(text))  # nothing of the second is left
    metrics.close()
    engine.submit([1], max_new_tokens=2).result()
    assert metrics.registry.get_sample_value("selective_steps_total") == 0


def test_what_is_closed_holds_no_engine() -> None:
    engine = simulated_engine()
    metrics = EngineMetrics(engine)
    metrics.close()
    known, still_there = weakref.ref(engine), metrics.registry.get_sample_value
    gc.disable()
    try:
        del engine
        assert known() is None and still_there("selective_steps_total") == 0
    finally:
        gc.enable()
    metrics.close()
    assert still_there("selective_steps_total") == 0


def test_several_engines_have_a_label_each() -> None:
    processor = RequestProcessor([simulated_engine(), simulated_engine()], routing="round_robin")
    metrics = EngineMetrics(processor.engines)
    for tokens in (2, 5, 3):
        processor.submit([1, 2, 3], max_new_tokens=tokens).result()

    def values(name: str, **labels: str) -> list[Any]:
        each = ({"engine": place, **labels} for place in ("0", "1"))
        return [metrics.registry.get_sample_value(f"selective_{name}", one) for one in each]

    assert values("tokens_generated_total") == [5, 5] and values("steps_total") == [5, 5]
    assert values("requests_total", finish_reason="length") == values("request_seconds_count") == [2, 1]
    assert values("requests_max") == [64, 64] and values("requests_scheduled") == [1, 1]
    lines = generate_latest(metrics.registry).decode().splitlines()
    assert len(lines) == len(set(lines))
    metrics.close()
    assert not any(engine._log._observers for engine in processor.engines)
    processor.submit([1], max_new_tokens=1).result()
    assert values("tokens_generated_total") == [5, 5]


def test_the_limiting_resource_of_steps_is_counted() -> None:
    engine = simulated_engine()

    def floor(record: StepRecord) -> StepFloor:
        return StepFloor(0.25, "compute") if record.in_context else StepFloor(0.125, "memory")

    metrics = EngineMetrics(engine, floor=floor)
    engine.submit([1, 2, 3], max_new_tokens=4).result()
    value = metrics.registry.get_sample_value
    assert value("selective_limited_steps_total", {"resource": "compute"}) == 1
    assert value("selective_limited_steps_total", {"resource": "memory"}) == 3
    assert value("selective_floor_step_seconds") == 0.125
    assert value("selective_last_step_seconds") == engine.stats().last_step_seconds


def test_a_share_says_what_was_computed_or_found_before_it() -> None:
    """Also where a prefix was found, of each beam, and after a preemption: what a step reads goes by it."""
    records: list[StepRecord] = []
    engine = simulated_engine(block_size=2, observers=[records.append])
    engine.submit([1, 2, 3, 4, 5], max_new_tokens=1).result()
    engine.submit([1, 2, 3, 4, 6], max_new_tokens=2).result()
    assert [(share.start, share.tokens) for record in records for share in record.shares] == [(0, 5), (4, 1), (5, 1)]
    records.clear()
    engine.submit([7, 8], max_new_tokens=3, num_beams=2).result()
    found = [sorted((share.start, share.tokens) for share in record.shares) for record in records]
    assert found == [[(0, 2)], [(2, 1)] * 2, [(3, 1)] * 2]


def test_ends_wait_for_an_observer_and_for_nobody_else() -> None:
    """Those that ended while somebody observed are told once; nothing is kept when the last observer has gone."""
    engine = simulated_engine()
    records: list[StepRecord] = []
    engine.add_observer(records.append)
    engine.submit([1], request_id="seen", max_new_tokens=1).result()
    engine.submit([1], request_id="unseen", max_new_tokens=9)
    engine.step()
    engine.submit([1], request_id="cancelled").cancel()  # after the last step that is observed
    engine.remove_observer(records.append)
    assert [end.request_id for record in records for end in record.ended] == ["seen"]
    assert not engine._log._left
    run(engine)
    engine.add_observer(records.append)
    engine.submit([1], request_id="new", max_new_tokens=1).result()
    assert [end.request_id for record in records for end in record.ended] == ["seen", "new"]


def test_time_between_tokens() -> None:
    engine = simulated_engine()
    timing = engine.submit([1], max_new_tokens=4).result().timing
    assert timing.between_tokens is not None and timing.first_token is not None and timing.total is not None
    assert 0 < 3 * timing.between_tokens <= timing.total - timing.first_token
    assert engine.submit([1], max_new_tokens=1).result().timing.between_tokens is None


def test_a_trace_has_every_share_and_a_row_for_each_request(tmp_path: Path) -> None:
    records: list[StepRecord] = []
    engine = simulated_engine(max_kv_tokens=24, block_size=2, token_budget=6, observers=[records.append])
    with TraceFile(tmp_path / "trace.json") as trace:
        trace.follow(engine)
        for number in range(4):
            engine.submit([number] * 5, request_id=number, max_new_tokens=8)
        run(engine)
        engine.submit([9], request_id=0, max_new_tokens=2)
        run(engine)
    text = (tmp_path / "trace.json").read_text()
    assert engine._log._observers == (records.append,)
    engine.add_observer(trace.observe)
    assert engine.submit([9], max_new_tokens=2).result().finish_reason == "length"
    trace.close()
    assert (tmp_path / "trace.json").read_text() == text and trace.observe in engine._log._observers
    events: list[dict[str, Any]] = json.loads(text)
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert sorted(names.values()) == ["0", "0", "1", "2", "3", "steps"]
    spans = [event for event in events if event["ph"] == "X" and event["tid"] > 0]
    ran = [record for record in records if record.step < engine.stats().steps - 2]
    shares = [(record.step, str(share.request_id), share.tokens) for record in ran for share in record.shares]
    assert [(span["args"]["step"], names[span["tid"]], span["args"]["tokens"]) for span in spans] == shares
    steps = [event for event in events if event["ph"] == "X" and event["tid"] == 0]
    assert [step["ts"] for step in steps] == sorted(step["ts"] for step in steps)
    assert all(before["ts"] + before["dur"] <= after["ts"] for before, after in zip(steps, steps[1:], strict=False))
    preempted = [event for event in events if event["name"] == "preempted"]
    assert len(preempted) == engine.stats().preemptions > 0


def test_a_trace_of_several_engines_has_a_process_for_each_on_one_clock(tmp_path: Path) -> None:
    moments = {"now": 100.0}

    def clock() -> float:
        moments["now"] += 0.25
        return moments["now"]

    engines = []
    for _ in range(3):
        moments["now"] += 10
        engines.append(simulated_engine(clock=clock))
    with TraceFile(tmp_path / "trace.json") as trace:
        for engine in engines:
            trace.follow(engine)
        began = [moments["now"]]
        for engine in engines:
            engine.submit([1, 2], request_id="a", max_new_tokens=2).result()
            began.append(moments["now"])
    assert all(not engine._log._observers for engine in engines)
    events = json.loads((tmp_path / "trace.json").read_text())
    assert [event["pid"] for event in events if event["name"] == "process_name"] == [1, 2, 3]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {(pid, row): name for pid in (1, 2, 3) for row, name in enumerate(["steps", "a"])}
    for pid, start, end in zip((1, 2, 3), began, began[1:], strict=False):
        spans = [event for event in events if event["ph"] == "X" and event["pid"] == pid]
        assert len(spans) == 4
        assert all(start <= engines[0].began + span["ts"] / 1e6 <= end for span in spans)


def test_a_trace_is_whole_when_engines_run_in_threads_of_their_own(tmp_path: Path) -> None:
    processor = RequestProcessor([simulated_engine() for _ in range(3)], routing="round_robin")
    with TraceFile(tmp_path / "trace.json") as trace:
        for engine in processor.engines:
            trace.follow(engine)
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)  # or threads would hardly ever take turns within a line
        with processor.running():
            for request in [processor.submit([1, 2], max_new_tokens=100) for _ in range(24)]:
                request.result()
        sys.setswitchinterval(interval)
    events = json.loads((tmp_path / "trace.json").read_text())
    steps = [event for event in events if event["ph"] == "X" and event["tid"] == 0]
    assert len(steps) == sum(engine.stats().steps for engine in processor.engines)


@pytest.mark.parametrize("wrong", [3, [3], SimulatedProgram()])
def test_what_is_no_engine_is_named(wrong: Any) -> None:
    with pytest.raises(ValueError, match="engines must be an Engine or a list of them, got "):
        EngineMetrics(wrong)
    with pytest.raises(ValueError, match="engines must be a list of Engines, got "):
        RequestProcessor(wrong)
    with pytest.raises(ValueError, match="engine must be an Engine or a RequestProcessor, got "):
        BatchManager(wrong, lambda room: [], lambda *_: None)
