"""The batch manager over one engine or several: steps that fail, workers that are killed, and a soak."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch

from selective_compile.runtime import BatchManager
from tests.runtime.managed import Client, assert_nothing_left, engines_of, manage, tokens_of, until
from tests.runtime.simulated import VOCAB_SIZE, SimulatedProgram


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps wait for whoever is slow: who meets in one does not depend on the speed of the machine."""
    monkeypatch.setattr("selective_compile.runtime.batch_manager.PATIENCE", 60.0)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.usefixtures("patient")
def test_a_failed_step_ends_its_requests_and_others_go_on(overlap: bool) -> None:
    client, program = Client(), SimulatedProgram()
    failures = iter([torch.OutOfMemoryError("too much")])

    def fail_once() -> None:
        for failure in failures:
            raise failure

    program.before_run = fail_once
    for number in range(3):
        client.ask(number)
    with manage(client, program, overlap=overlap, max_requests=2) as manager:
        client.wait(3)
    assert client.errors == dict.fromkeys((0, 1), "step 0 failed: OutOfMemoryError: too much")
    assert len(client.parts[2]) == 1
    assert_nothing_left(manager)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.usefixtures("patient")
def test_a_worker_that_is_killed_says_so_to_everyone(overlap: bool) -> None:
    client, program = Client(), SimulatedProgram()

    def kill() -> None:
        raise SystemExit("killed")

    program.before_run = kill
    for number in range(3):
        client.ask(number)
    with manage(client, program, overlap=overlap, max_requests=2) as manager:
        client.wait(3)
    assert client.errors[0] == "step 0 failed: SystemExit: killed"
    assert client.errors[2] == "the worker thread of the batch manager ended: SystemExit: killed"
    assert_nothing_left(manager)
    # The engine itself is whole.
    program.before_run = lambda: None
    assert engines_of(manager)[0].submit([1], max_new_tokens=2).result().finish_reason == "length"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.usefixtures("patient")
def test_several_engines_take_their_steps_at_the_same_time(overlap: bool) -> None:
    client, programs = Client(), [SimulatedProgram(), SimulatedProgram()]
    meeting = threading.Barrier(2, timeout=60)
    for program in programs:
        program.before_run = meeting.wait  # a step of one by itself would wait for ever
    for number in range(4):
        client.ask(number, [number, 5], streaming=bool(number % 2), max_new_tokens=3)
    with manage(client, *programs, overlap=overlap) as manager:
        client.wait(4)
    for number in range(4):
        found = torch.cat([part["output_ids"] for part in client.parts[number]], dim=-1).flatten().tolist()
        assert found == [number, 5][: 0 if number % 2 else 2] + tokens_of([number, 5], max_new_tokens=3)
    steps = [(one["Engine"], one["Iteration Counter"]) for one in client.stats]
    assert sorted(steps) == [(engine, step) for engine in (0, 1) for step in range(3)]
    assert not any(engine._log._observers for engine in engines_of(manager))
    assert_nothing_left(manager)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.usefixtures("patient")
def test_a_step_of_one_of_several_engines_that_fails_ends_its_own_requests(overlap: bool) -> None:
    client, programs = Client(), [SimulatedProgram(), SimulatedProgram()]
    failures = iter([torch.OutOfMemoryError("too much")])

    def fail_once() -> None:
        for failure in failures:
            raise failure

    programs[1].before_run = fail_once
    for number in range(4):
        client.ask(number)
    with manage(client, *programs, overlap=overlap) as manager:
        client.wait(4)
        client.ask(1)  # its id is free
        client.wait(5)
    assert client.errors.keys() == {1, 3} and "too much" in client.errors[1]
    assert client.parts.keys() == {0, 2, 1}
    assert [one["Engine"] for one in client.stats if "Error" in one] == [1]
    assert_nothing_left(manager)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.usefixtures("patient")
def test_a_worker_that_is_killed_by_one_of_several_engines_says_so_to_everyone() -> None:
    client, programs = Client(), [SimulatedProgram(), SimulatedProgram()]

    def kill() -> None:
        raise SystemExit("killed")

    programs[1].before_run = kill
    for number in range(2):
        client.ask(number)
    with manage(client, *programs) as manager:
        client.wait(2)
    assert client.errors[0] == "the worker thread of the batch manager ended: SystemExit: killed"
    assert client.errors[1] == "step 0 failed: SystemExit: killed"
    assert_nothing_left(manager)


@pytest.mark.parametrize(("overlap", "engines"), [(False, 1), (True, 1), (False, 3), (True, 3)])
def test_soak(overlap: bool, engines: int) -> None:
    """Random requests, stops, errors and readers that go: every one has one last response, and nothing is left."""
    client, draw = Client(), random.Random(0)
    count = 800

    def unreliable(request_id: Any, is_final: bool) -> None:
        if draw.random() < 0.05:
            client.stops = {draw.randrange(count)}
        if not is_final and draw.random() < 0.01:
            raise ConnectionError("gone")

    client.on_response = unreliable
    for number in range(count):
        prompt = [draw.randrange(3) for _ in range(draw.randint(0, 12))]  # one in 13 is empty
        options = {"max_new_tokens": draw.randint(1, 6), "eos_token_id": draw.randrange(VOCAB_SIZE)}
        client.ask(number, prompt, streaming=draw.random() < 0.5, **options)
    before = threading.enumerate()
    programs = [SimulatedProgram() for _ in range(engines)]
    managers: list[BatchManager] = []

    def crowded() -> None:
        until(lambda: managers and all(engine.stats().waiting >= 20 for engine in engines_of(managers[0])))
        for program in programs:
            program.before_run = lambda: None

    for program in programs:
        program.before_run = crowded
    with manage(client, *programs, overlap=overlap, max_requests=16, max_kv_tokens=64, block_size=2) as manager:
        managers.append(manager)
        client.wait(count)
    assert sorted(client.done) == list(range(count))
    assert_nothing_left(manager)
    # The engines' own, which end with them; where the machine is busy there are sleeping teams, too.
    own = [one.name for one in threading.enumerate() if one not in before and "sleeping-team" not in one.name]
    assert own == ["selective-compile-tokens"] * overlap * engines
    assert any(engine.stats().preemptions for engine in engines_of(manager))
