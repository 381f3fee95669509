"""Tokens that are handed out while the next step computes: the same tokens and batches, none lost, none too late."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from selective_compile.runtime import Engine, Request, StepError, StepRecord
from selective_compile.runtime.replay import EventLog
from selective_compile.runtime.replay_engine import replay_engine
from tests.runtime.simulated import SimulatedModel, SimulatedProgram, simulated_engine

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"do_sample": True, "seed": 3, "eos_token_id": list(range(0, 61, 6))},
    {"do_sample": True, "seed": 4, "num_return_sequences": 3},
    {"num_beams": 3, "num_return_sequences": 2},
    {"prompt_lookup_num_tokens": 3},
    {"logprobs": True, "output_logits": True, "prompt_logits": True},
)
PROMPT = st.lists(st.integers(0, 2), min_size=1, max_size=9)


class Twin:
    """An engine, its program and what its steps computed."""

    def __init__(self, *, overlap: bool, **config: Any) -> None:
        self.program = SimulatedProgram()
        self.batches: list[Any] = []
        self.ended: list[Any] = []
        ticks = itertools.count()
        self.engine = simulated_engine(
            self.program, overlap=overlap, clock=lambda: float(next(ticks)), observers=[self.observe], **config
        )
        self.requests: list[Request] = []

    def observe(self, record: StepRecord) -> None:
        self.batches.append((record.shares, record.preempted))
        self.ended += [(end.request_id, end.finish_reason, end.tokens) for end in record.ended]

    def step(self) -> str | bool:
        try:
            return self.engine.step()
        except (StepError, KeyboardInterrupt) as error:
            return type(error).__name__


def fail(error: BaseException) -> None:
    raise error


class SameWithAndWithout(RuleBasedStateMachine):
    """Whatever comes, two engines compute the same batches; one hands out its tokens a step later, in order."""

    @initialize(
        blocks=st.integers(24, 60),
        policy=st.sampled_from(["max_utilization", "guaranteed_no_evict"]),
        batching=st.sampled_from(["inflight_fused", "inflight", "static"]),
    )
    def start(self, blocks: int, policy: str, batching: str) -> None:
        config = {"block_size": 2, "max_kv_tokens": 2 * blocks, "token_budget": 7, "max_requests": 5}
        self.twins = [
            Twin(overlap=overlap, scheduler_policy=policy, batching=batching, **config) for overlap in (False, True)
        ]

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=9), kind=st.sampled_from(KINDS), new=st.integers(1, 8)
    )
    def submit(self, prompt: list[int], kind: dict[str, Any], new: int) -> None:
        for twin in self.twins:
            twin.requests += twin.engine.submit(prompt, max_new_tokens=new, **kind).samples

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            plain, overlapped = (twin.step() for twin in self.twins)
            assert plain == overlapped

    @rule(failure=st.sampled_from([RuntimeError("out of memory"), KeyboardInterrupt()]))
    def fail(self, failure: BaseException) -> None:
        for twin in self.twins:
            twin.program.before_run = lambda: fail(failure)
        self.step(1)
        for twin in self.twins:
            twin.program.before_run = lambda: None

    @rule(place=st.integers(0, 30), during=st.booleans())
    def cancel(self, place: int, during: bool) -> None:
        for twin in self.twins:
            if place < len(twin.requests):
                if during:
                    twin.program.before_run = twin.requests[place].cancel
                else:
                    twin.requests[place].cancel()
        if during:
            self.step(1)
            for twin in self.twins:
                twin.program.before_run = lambda: None

    @rule()
    def change_the_weights(self) -> None:
        for twin in self.twins:
            twin.program.weights += 1

    @rule()
    def hand_out(self) -> None:
        self.twins[1].engine.hand_out()
        self.assert_the_same()

    @invariant()
    def batches_are_the_same(self) -> None:
        plain, overlapped = self.twins
        assert plain.batches == overlapped.batches and plain.ended == overlapped.ended
        overlapped.engine._scheduler.check()
        for one, other in zip(plain.requests, overlapped.requests, strict=True):
            assert one.tokens[: len(other.tokens)] == other.tokens
            assert other.finish_reason in (None, one.finish_reason)
        if not overlapped.engine._scheduler.has_work and not overlapped.engine.step():
            self.assert_the_same()

    def assert_the_same(self) -> None:
        for one, other in zip(*(twin.requests for twin in self.twins), strict=True):
            assert (one.tokens, one.finish_reason, one.error) == (other.tokens, other.finish_reason, other.error)
            assert one.logprobs == other.logprobs

    def teardown(self) -> None:
        while hasattr(self, "twins") and self.twins[0].engine._scheduler.has_work:
            self.step(1)
        if hasattr(self, "twins"):
            self.assert_the_same()


SameWithAndWithout.TestCase.settings = settings(max_examples=60, stateful_step_count=15, deadline=None)
TestSameWithAndWithout = SameWithAndWithout.TestCase


def test_the_tokens_of_a_step_come_while_the_next_one_computes() -> None:
    program = SimulatedProgram()
    engine = simulated_engine(program, overlap=True)
    request = engine.submit([1, 2, 3], max_new_tokens=4)
    seen = []

    def wait_for_the_last() -> None:
        """As the model: it goes on only when the reader has the token of the step before."""
        step = engine.stats().steps
        assert step == 0 or read.acquire(timeout=60)
        seen.append(list(request.tokens))

    read = threading.Semaphore(0)
    program.before_run = wait_for_the_last
    with engine.running():
        for _ in request:
            read.release()
    assert [len(tokens) for tokens in seen] == [0, 1, 2, 3] and len(request.tokens) == 4


def test_hand_out_and_the_last_step() -> None:
    engine = simulated_engine(overlap=True)
    request = engine.submit([1, 2, 3], max_new_tokens=3)
    counts = []
    while engine.step():
        counts.append(len(request.tokens))
    assert counts == [0, 1, 3] and request.finished
    other = engine.submit([1], max_new_tokens=3)
    engine.step()
    assert other.tokens == []
    engine.hand_out()
    assert len(other.tokens) == 1


@pytest.mark.parametrize("background", [False, True])
def test_readers_get_everything(background: bool) -> None:
    engine = simulated_engine(overlap=True, max_requests=2)
    wanted = [list(simulated_engine().submit([n], max_new_tokens=9).result().tokens) for n in range(4)]
    requests = [engine.submit([n], max_new_tokens=9) for n in range(4)]
    if background:
        with engine.running():
            found = [list(request) for request in requests]
    else:
        found = [list(request) for request in requests]
    assert found == wanted


def test_stopping_the_background_thread_hands_out_what_there_is() -> None:
    engine = simulated_engine(overlap=True)
    request = engine.submit([1], max_new_tokens=1000)
    with engine.running():
        next(iter(request))
    assert len(request.tokens) == request.state.generated > 0
    request.cancel()


def test_its_thread_ends_with_the_engine() -> None:
    before = set(threading.enumerate())
    engine = simulated_engine(overlap=True)
    assert len(engine.submit([1], max_new_tokens=5).result().tokens) == 5
    (own,) = set(threading.enumerate()) - before
    del engine
    own.join(30)
    assert not own.is_alive()


@pytest.mark.parametrize("recorded", [False, True])
def test_a_log_is_replayed_the_same_with_and_without(recorded: bool, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    program, model = SimulatedProgram(), SimulatedModel()
    engine: Engine = simulated_engine(
        program, model=model, overlap=recorded, record=path, block_size=2, max_kv_tokens=60, token_budget=6
    )
    requests = [engine.submit([n % 2] * (n + 1), max_new_tokens=6, do_sample=n % 2 == 1) for n in range(8)]
    for number in range(5):
        engine.step()
        requests[number].cancel()
    while engine.step():
        pass
    log = EventLog.read(path)
    again: Any = SimulatedProgram()
    other = replay_config(log, overlap=not recorded)
    replayed = replay_engine(log, model, program=again, config=other)
    assert replayed.difference is None and replayed.steps > 5


def replay_config(log: EventLog, **changes: Any) -> Any:
    return type(log.config)(**{**vars(log.config), "max_kv_tokens": 60, **changes})


def test_an_error_of_one_request_comes_behind_its_tokens() -> None:
    def limited(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == 4:
            raise RuntimeError("no more")
        return scores

    engine = simulated_engine(overlap=True)
    request = engine.submit([1], max_new_tokens=9, logits_processor=[limited])
    other = engine.submit([2], max_new_tokens=9)
    assert len(other.result().tokens) == 9
    assert len(request.tokens) == 3 and "no more" in str(request.error)


def test_the_last_tokens_come_where_all_that_is_left_is_refused() -> None:
    """A step in which nothing is computed, as the deadline of the only request that waited has passed."""
    now = 0.0

    def late(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        nonlocal now
        now = 100.0 if ids.shape[1] == 4 else now
        return scores

    options: dict[str, Any] = {"overlap": True, "waiting_order": "deadline", "max_requests": 1}
    engine: Engine = simulated_engine(clock=lambda: now, **options)
    first = engine.submit([1], max_new_tokens=4, logits_processor=[late], deadline=50)
    second = engine.submit([2], max_new_tokens=4, deadline=60)
    while engine.step():
        pass
    assert len(first.tokens) == 4 and first.finished and second.error is not None


READ_ON = """
import threading
from tests.runtime.simulated import simulated_engine

def read() -> None:
    threading.main_thread().join()
    print(len(list(request)), flush=True)

engine = simulated_engine(overlap=True)
request = engine.submit([1, 2, 3], max_new_tokens=9)
threading.Thread(target=read).start()
"""


def test_whoever_reads_when_the_main_thread_has_ended_gets_everything() -> None:
    found = subprocess.run([sys.executable, "-c", READ_ON], capture_output=True, text=True, check=True)
    assert found.stdout == "9\n", found.stderr
