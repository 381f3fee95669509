"""A process that is forked has none of the threads of an engine: it does without, or is told."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

import pytest

from selective_compile import forks
from selective_compile.forks import LocksInForks, lock_of_any_process
from selective_compile.runtime import Engine
from selective_compile.runtime.replay import EventLog, replay_schedule
from tests.runtime.simulated import SimulatedModel, SimulatedProgram, expected_tokens, simulated_engine

SECONDS = 30


def in_a_fork(call: Callable[[], Any]) -> Any:
    """What it returns, or raises, in a process that is forked now and ends at once."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        try:
            found = call()
        except BaseException as error:  # noqa: BLE001 - told to the test
            found = error
        os.write(writer, pickle.dumps(found))
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"it waits for ever, and ended with {status}"
    with os.fdopen(reader, "rb") as told:
        return pickle.load(told)


def driven_again(engine: Engine) -> list[bool]:
    found = [engine.driven]
    with engine.running():
        engine.submit([1, 2], max_new_tokens=3).result()
        found.append(engine.driven)
    return [*found, engine.driven]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("background", [False, True])
def test_requests_of_a_fork_are_served_there(overlap: bool, background: bool) -> None:
    engine = simulated_engine(overlap=overlap)
    with ExitStack() as stack:
        if background:
            stack.enter_context(engine.running())
        before = engine.submit([1, 2, 3], max_new_tokens=5)
        expected = list(expected_tokens([1, 2, 3], before.params))
        assert list(before.result().tokens) == expected
        assert in_a_fork(lambda: list(engine.submit([1, 2, 3], max_new_tokens=5).result().tokens)) == expected
        assert in_a_fork(lambda: driven_again(engine)) == [False, True, False]
        # Nor is the first one disturbed.
        assert list(engine.submit([1, 2, 3], max_new_tokens=5).result().tokens) == expected, (
            "nor is the first disturbed"
        )


def test_a_fork_in_the_midst_of_a_step_is_told_that_nothing_comes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "PATIENCE", 0.05)
    program = SimulatedProgram()
    engine = simulated_engine(program)
    running, going_on = [False], [False]

    def wait() -> None:
        running[0] = True
        while not going_on[0]:
            time.sleep(0.001)

    program.before_run = wait
    with engine.running():
        request = engine.submit([1, 2], max_new_tokens=3)
        while not running[0]:
            time.sleep(0.001)
        error = in_a_fork(lambda: engine.submit([3, 4], max_new_tokens=3).result())
        going_on[0] = True
        assert list(request.result().tokens) == list(expected_tokens([1, 2], request.params))
    assert isinstance(error, RuntimeError) and "forked" in str(error)


def test_who_leaves_running_in_a_fork_waits_for_nobody() -> None:
    engine = simulated_engine()
    reader, writer = os.pipe()
    with engine.running():
        engine.submit([1, 2], max_new_tokens=3).result()
        child = os.fork()
        if child == 0:
            signal.alarm(SECONDS)
    if child == 0:
        os.write(writer, b"left")
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    assert status == 0 and os.read(reader, 9) == b"left"
    os.close(reader)


def test_locks_that_others_hold_are_free_in_a_fork_and_ones_own_are_not() -> None:
    theirs, own, held, going_on = lock_of_any_process(), lock_of_any_process(), Event(), Event()

    def hold() -> None:
        with theirs:
            held.set()
            going_on.wait()

    thread = Thread(target=hold)
    thread.start()
    held.wait()

    def taken() -> list[bool]:
        found = [theirs.acquire(blocking=False), own._is_owned()]  # type: ignore[attr-defined]
        own.release()
        return found

    with own:
        assert in_a_fork(taken) == [True, True]
    going_on.set()
    thread.join()
    assert theirs.acquire(blocking=False) and own.acquire(blocking=False), "nor is anything of it left here"


def test_a_fork_waits_for_all_engines_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "PATIENCE", 0.4)
    held = [Lock() for _ in range(5)]
    every = [LocksInForks(lock) for lock in held]
    for lock in held:
        lock.acquire()
    began = time.monotonic()
    assert in_a_fork(lambda: [each.lost for each in every]) == [True] * 5
    assert time.monotonic() - began < 2 and not any(each.lost for each in every)


def test_a_fork_writes_nothing_into_the_log(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    model, program = SimulatedModel(), SimulatedProgram()
    engine: Engine = simulated_engine(program, model=model, record=path)
    first = engine.submit([1, 2], max_new_tokens=9)
    engine.step()
    assert len(in_a_fork(lambda: engine.submit([2], max_new_tokens=3).result().tokens)) == 3
    last = engine.submit([3], max_new_tokens=4)
    assert len(last.result().tokens) == 4 and len(first.result().tokens) == 9
    log = EventLog.read(path)
    assert [len(event["prompt"]) for event in log.named("submitted")] == [2, 1]
    assert replay_schedule(log).difference is None
