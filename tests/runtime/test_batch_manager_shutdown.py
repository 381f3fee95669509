"""Shutting a batch manager down, with requests, readers and callbacks that take long."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from selective_compile.runtime import BatchManager
from tests.runtime.managed import Blocking, Client, SlowIds, assert_nothing_left, engines_of, manage, until
from tests.runtime.simulated import SimulatedProgram, simulated_engine


def test_a_shutdown_waits_so_long_and_stops_what_still_runs() -> None:
    client, program = Blocking("stuck"), SimulatedProgram()
    steps: list[None] = []

    def run_slowly() -> None:
        steps.append(None)
        time.sleep(0.001)

    program.before_run = run_slowly
    client.ask("stuck", streaming=True, max_new_tokens=3)
    client.ask("long", max_new_tokens=4000)
    manager = manage(client, program)
    until(lambda: len(steps) > 3)
    assert not manager.shutdown(0.2)
    client.wait(1)
    assert client.done == ["long"] and client.errors == {}
    assert 3 <= int(client.parts["long"][-1]["sequence_length"]) < 4003
    assert not manager.shutdown(0.1), "a reader blocks"
    client.reading.set()
    assert manager.shutdown()
    assert client.done == ["long", "stuck"] and len(client.parts["stuck"]) == 3
    assert_nothing_left(manager)


@pytest.mark.parametrize("where", ["get", "send", "poll_stop", "on_stats", "observer"])
def test_a_shutdown_from_within_a_callback_does_not_wait(where: str) -> None:
    client, outcomes, before = Client(), [], threading.enumerate()
    client.ask("a")
    managers: list[BatchManager] = []

    def calling(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            if name == where and managers and client.asked and not outcomes:
                outcomes.append(managers[0].shutdown())
            return call(*arguments)

        return called

    engine = simulated_engine(observers=[calling("observer", lambda record: None)])
    gate = threading.Event()
    managers.append(
        BatchManager(
            engine,
            calling("get", lambda room: client.get(room) if gate.wait(60) else []),
            calling("send", client.send),
            calling("poll_stop", set),
            calling("on_stats", lambda text: None),
        )
    )
    gate.set()
    client.wait(1)
    managers[0]._worker.join(60)
    assert managers[0].shutdown() and outcomes == [False]
    assert_nothing_left(managers[0])
    assert len(engine._log._observers) == 1 and set(threading.enumerate()) <= set(before)


def test_a_shutdown_does_not_wait_for_a_request_that_is_being_read() -> None:
    client, slow = Client(), SlowIds([4, 5])
    client.ask("slow", slow, max_new_tokens=2000)
    manager = manage(client)
    until(lambda: manager.num_active)
    assert not manager.shutdown(0.1)
    slow.ready.set()
    assert manager.shutdown()
    assert client.done == ["slow"] and client.errors == {}
    assert int(client.parts["slow"][0]["sequence_length"]) < 2002
    assert_nothing_left(manager)


@pytest.mark.parametrize("engines", [1, 2])
def test_engines_of_a_manager_that_was_shut_down_are_freed_with_it(engines: int) -> None:
    """By the count of references: until the collector comes round there would be twice the memory."""
    client = Client()
    client.ask("a", max_new_tokens=3)
    manager = manage(client, *[None] * engines)
    client.wait(1)
    assert manager.shutdown(10)
    kept = [weakref.ref(engine) for engine in engines_of(manager)]
    gc.collect()
    gc.disable()
    try:
        del manager
        assert [each() for each in kept] == [None] * engines
    finally:
        gc.enable()
