"""A process that is forked has none of the threads of an engine: it does without, or is told."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from selective_compile.runtime import Engine, forks
from tests.runtime.simulated import SimulatedProgram, expected_tokens, simulated_engine

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
