"""A run that was recorded is served again the same: by the scheduler alone, and by a whole engine."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selective_compile.options import Batching, SchedulerPolicy, WaitingOrder
from selective_compile.runtime import Engine, Request, RequestTiming, StepError, StepRecord
from selective_compile.runtime.replay import EventLog, Replayed, first_difference, replay_schedule
from selective_compile.runtime.replay_engine import replay_engine
from selective_compile.step import LongForm
from tests.runtime.simulated import VOCAB_SIZE, SimulatedModel, SimulatedProgram, simulated_engine

PROGRAM: Any = SimulatedProgram  # takes the place of a compiled model


def refuses_all(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no")


def shifted(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores.roll(1, dims=-1)


def traffic(engine: Engine, program: SimulatedProgram, source: random.Random) -> None:
    """Requests of every kind, on all terms; some are cancelled, before, during and after a step; steps fail."""
    requests: list[Request] = []

    def submit() -> None:
        options: dict[str, Any] = {"max_new_tokens": source.randint(1, 9)}
        kind = source.randrange(6)
        if kind == 0:
            options |= {"do_sample": True, "top_k": 9, "eos_token_id": source.sample(range(VOCAB_SIZE), 9)}
        elif kind == 1:
            options |= {"logits_processor": [shifted], "priority": 2}
        elif kind == 2:
            options |= {"deadline": source.choice([1e-9, 5.0]), "user": "a"}
        elif kind == 3:
            options |= {"cache_salt": "tenant", "repetition_penalty": 1.5, "bad_words_ids": [[3]]}
        elif kind == 4 and source.random() < 0.3:
            options |= {"logits_processor": [refuses_all]}
        requests.append(engine.submit([source.randrange(3)] * source.randint(1, 12), **options))

    def disturb() -> None:
        if source.random() < 0.3:
            submit()
        if source.random() < 0.3:
            source.choice(requests).cancel()
        if source.random() < 0.05:
            raise RuntimeError("out of memory")
        if source.random() < 0.03:
            raise KeyboardInterrupt

    for _ in range(12):
        for _ in range(source.randint(0, 2)):
            submit()
        program.before_run = disturb if requests else lambda: None
        program.weights += source.random() < 0.05
        try:
            engine.step()
        except (StepError, KeyboardInterrupt):
            pass
    program.before_run = lambda: None
    while engine.step():
        pass


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    policy=st.sampled_from(get_args(SchedulerPolicy)),
    order=st.sampled_from(get_args(WaitingOrder)),
    batching=st.sampled_from(get_args(Batching)),
    prefill_slowdown=st.sampled_from([None, 1.5]),
    long_form=st.sampled_from([None, LongForm(beyond=9, anew=True), LongForm(beyond=9, anew=False)]),
)
def test_a_replay_has_the_same_batches_and_tokens(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    policy: SchedulerPolicy,
    order: WaitingOrder,
    batching: Batching,
    prefill_slowdown: float | None,
    long_form: LongForm | None,
) -> None:
    folder = tmp_path_factory.mktemp("logs")
    program = SimulatedProgram(long_form=long_form)
    # Room in the host's memory for 8 blocks of 2 slots of three numbers.
    host = {"host_kv_bytes": 8 * 2 * 3 * 8 if seed % 2 else 0}
    sizes = {"max_kv_tokens": 40, **host, "block_size": 2, "token_budget": 9, "max_requests": 4}
    records: list[StepRecord] = []
    engine = simulated_engine(
        program,
        observers=[records.append],
        record=folder / "run.jsonl",
        scheduler_policy=policy,
        waiting_order=order,
        batching=batching,
        prefill_slowdown=prefill_slowdown,
        **sizes,
    )
    traffic(engine, program, random.Random(seed))
    log, decided = EventLog.read(folder / "run.jsonl"), list[StepRecord]()
    assert replay_schedule(log, [decided.append]).difference is None
    assert [told(record) for record in decided] == [told(record) for record in records]
    if program.weights == 0:  # the simulated tokens depend on them, and the log does not say what they were
        same: Any = PROGRAM(long_form=long_form)
        again = replay_engine(log, SimulatedModel(), program=same, record=folder / "again.jsonl")
        stats = engine.stats()
        assert again == Replayed(requests=again.requests, steps=again.steps, tokens=again.tokens, difference=None)
        assert again.steps >= stats.steps and again.tokens >= stats.tokens_generated
        # Not only what is compared: the log of the replay is the log, but for what could not be told.
        events = EventLog.read(folder / "again.jsonl").events
        assert [strip(event) for event in events] == [strip(event) for event in log.events]


def told(record: StepRecord) -> StepRecord:
    """What a scheduler alone can say of a step as well: neither why it failed, nor when requests got their tokens."""
    ended = tuple(end._replace(timing=RequestTiming(queued=None, first_token=None, total=None)) for end in record.ended)
    return dataclasses.replace(record, ended=ended, error=record.error and "failed")


def test_how_many_steps_had_begun_when_a_request_came(tmp_path: Path) -> None:
    program = SimulatedProgram()
    engine = simulated_engine(program, record=tmp_path / "run.jsonl")

    def fail() -> None:
        raise RuntimeError("once")

    engine.submit([1], request_id="a", max_new_tokens=3)
    program.before_run = lambda: engine.submit([1], request_id="b") and None
    engine.step()
    program.before_run = fail
    engine.drive()
    program.before_run = lambda: None
    engine.submit([1], request_id="c", max_new_tokens=2).result()
    engine.submit([1], request_id="a", max_new_tokens=2).result()
    assert EventLog.read(tmp_path / "run.jsonl").arrivals == {"a": 0, "b": 1, "c": 2}


def strip(event: dict[str, Any]) -> dict[str, Any]:
    ends = [[number, None if end == "error" else token, end] for number, token, end in event.get("tokens", [])]
    return {**event, "tokens": ends, "options": None, "untold": None}


def recorded(path: Path, **config: Any) -> EventLog:
    engine = simulated_engine(record=path, **config)
    for number in range(3):
        engine.submit([number, 1, 2], request_id=f"r{number}", max_new_tokens=6)
    while engine.step():
        pass
    return EventLog.read(path)


def changed(path: Path, log: EventLog, event: str, **values: Any) -> EventLog:
    """The log with the last event of a name changed, as it is read from a file."""
    lines = [log.engine, *log.events]
    last = max(number for number, one in enumerate(lines) if one["event"] == event)
    lines[last] = {**lines[last], **values}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return EventLog.read(path)


def test_another_batch_and_another_token_are_told(tmp_path: Path) -> None:
    log = recorded(tmp_path / "run.jsonl")
    moved = changed(tmp_path / "a.jsonl", log, "planned", shares=[[0, 7, 1]])
    assert "step 5 was {'shares': [[0, 7, 1]]" in (replay_schedule(moved).difference or "")
    last = [event for event in log.events if event["event"] == "computed"][-1]["tokens"]
    tokens = [[number, (token + 1) % VOCAB_SIZE, end] for number, token, end in last]
    other = changed(tmp_path / "b.jsonl", log, "computed", tokens=tokens)
    assert replay_schedule(other).difference is None
    difference = replay_engine(other, SimulatedModel(), program=PROGRAM()).difference
    assert difference is not None and difference.startswith("request 'r0' got token ")


class Timed(SimulatedProgram):
    """A step takes as many seconds as it has rows."""

    seconds = 0.0

    def __call__(self, inputs: Any, *pools: Any) -> Any:
        self.seconds += len(inputs.input_ids)
        return super().__call__(inputs, *pools)


def test_times_are_what_decides_and_are_in_the_log(tmp_path: Path) -> None:
    """A machine that was said to be slow cut the prompts that came later: the replay does without being told."""
    program = Timed()
    config = {"record": tmp_path / "run.jsonl", "prefill_slowdown": 1.5, "token_budget": 64, "block_size": 4}
    engine = simulated_engine(program, clock=lambda: program.seconds, **config)
    first = engine.submit([1] * 4, max_new_tokens=12)
    for _ in range(3):
        engine.step()
    engine.submit([2] * 40, max_new_tokens=1)
    first.result()
    log = EventLog.read(tmp_path / "run.jsonl")
    assert replay_schedule(log).difference is None
    timeless = EventLog(engine=log.engine, events=tuple(e for e in log.events if e["event"] != "timed"))
    assert replay_schedule(timeless).difference is not None


SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 3.0, "repetition_penalty": 1.5, "eos_token_id": [3, 4]}


@pytest.mark.parametrize("recorded", [SAMPLING, {**SAMPLING, "sequence_bias": [[[5], 9.0]]}, {"max_length": 9}, {}])
@pytest.mark.parametrize("now", [{}, {"do_sample": True, "min_new_tokens": 30, "top_k": 3, "suppress_tokens": [7]}])
def test_the_models_own_configuration_is_in_the_log(
    recorded: dict[str, Any], now: dict[str, Any], tmp_path: Path
) -> None:
    """Whatever configuration the model has when the log is replayed, or is given while it is recorded."""
    model = SimulatedModel(**recorded)
    engine = simulated_engine(model=model, record=tmp_path / "run.jsonl")
    for number in range(6):
        engine.submit([number, 1, 2])
    model.generation_config.temperature = 0.5
    engine.submit([9], top_k=None)
    engine.submit([9], max_new_tokens=40)
    while engine.step():
        pass
    log = EventLog.read(tmp_path / "run.jsonl")
    assert replay_engine(log, SimulatedModel(**now), program=PROGRAM()).difference is None


def test_what_was_cut_off_counts_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recorded(path)
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    half = EventLog.read(path)
    assert 0 < len(half.events) < text.count("\n") - 1
    assert replay_schedule(half).difference is None


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for text in (b"", b"hello\n", b"\xe5\x00\n", b"[]\n", b'{"event": "engine", "version": 0}\n'):
        path.write_bytes(text)
        with pytest.raises(ValueError, match=r"run.jsonl must be an event log"):
            EventLog.read(path)
    log = recorded(path)
    other: Any = SimulatedProgram()
    other.vocab_size = 5
    with pytest.raises(ValueError, match="the model must be the one of the log, .*'vocab_size': 61}, got .*: 5}"):
        replay_engine(log, SimulatedModel(), program=other)


def test_runs_of_different_length_differ(tmp_path: Path) -> None:
    log = recorded(tmp_path / "run.jsonl")
    shorter = EventLog(engine=log.engine, events=log.events[:-4])
    assert first_difference(log, log) is None
    assert "there in one of the runs only" in (first_difference(log, shorter) or "")
    assert "there in one of the runs only" in (first_difference(shorter, log) or "")


def test_a_request_without_a_deadline_has_none_in_the_replay(tmp_path: Path) -> None:
    engine = simulated_engine(record=tmp_path / "run.jsonl", waiting_order="deadline")
    for deadline in (None, math.inf):
        engine.submit([1, 2], max_new_tokens=3, deadline=deadline)
    while engine.step():
        pass
    log = EventLog.read(tmp_path / "run.jsonl")
    assert [event["terms"]["deadline"] for event in log.named("submitted")] == [None] * 2
    assert "Infinity" not in (tmp_path / "run.jsonl").read_text()
    assert math.isfinite(sum(event["terms"]["arrival"] for event in log.named("submitted")))
    assert replay_schedule(log).difference is None


def test_a_log_that_cannot_be_written_any_more_ends_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, program = tmp_path / "run.jsonl", SimulatedProgram()
    engine = simulated_engine(program, record=path)
    first = engine.submit([1, 2, 3], max_new_tokens=20)
    engine.step()
    engine._recording._file.close()  # type: ignore[attr-defined]
    engine._recording._file = open("/dev/full", "w", buffering=1)  # type: ignore[attr-defined]
    second, third = engine.submit([1], request_id="b", max_new_tokens=2), engine.submit([4])
    third.cancel()
    failures = iter([RuntimeError("once")])

    def fail_once() -> None:
        for failure in failures:
            raise failure

    assert second.result().finish_reason == "length"
    program.before_run = fail_once
    assert first.result().error == "step 3 failed: RuntimeError: once"
    assert engine.submit([1], request_id="b", max_new_tokens=2).result().finish_reason == "length"
    assert caplog.text.count("the event log cannot be written any more") == 1
    assert not engine._requests and engine.stats().blocks_used == 0


def test_a_log_is_of_one_engine(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    engine = simulated_engine(record=path)
    engine.submit([1], max_new_tokens=2).result()
    with pytest.raises(ValueError, match="record must be a file that no other engine writes to, got"):
        simulated_engine(record=path)
    again = len(EventLog.read(path).events)
    del engine
    assert again > 1 and len(EventLog.read(path).events) == again
    second = simulated_engine(record=path)
    second.submit([1], max_new_tokens=2).result()
    assert replay_schedule(EventLog.read(path)).difference is None


def test_what_is_scored_is_so_in_the_replay(tmp_path: Path) -> None:
    """What counts as generated begins behind the first token there, and not behind all of them."""
    path, model = tmp_path / "run.jsonl", SimulatedModel()
    engine: Engine = simulated_engine(SimulatedProgram(unlimited_steps=True), model=model, record=path)
    engine.score([1], [2, 3, 1, 2])
    engine.submit([1, 2, 3, 1, 2], max_new_tokens=3, prompt_logprobs=True).result()
    log = EventLog.read(path)
    assert [event["scored"] for event in log.named("submitted")] == [True, False]
    program: Any = SimulatedProgram(unlimited_steps=True)
    assert replay_engine(log, model, program=program).difference is None
