"""The batch manager's callbacks: when they are called, and what happens when they raise or block."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from selective_compile.runtime import BatchManager, InferenceRequest
from selective_compile.runtime.responses import OpenRequest
from tests.runtime.managed import Blocking, Client, SlowIds, assert_nothing_left, manage, slow_from, tokens_of, until
from tests.runtime.simulated import SimulatedProgram, simulated_engine


def test_no_more_are_asked_for_than_can_be_taken() -> None:
    client = Client()
    for number in range(7):
        client.ask(number)
    with manage(client, max_active=3) as manager:
        client.wait(7)
    assert max(client.asked) == 3 and min(client.asked) >= 0
    assert_nothing_left(manager)


def test_with_overlap_the_server_is_called_during_a_step() -> None:
    """A request that comes while the model computes is taken before that step ends, and one is stopped."""
    client, program = Client(), SimulatedProgram()
    taken, stopped = threading.Event(), threading.Event()

    def get(count: int) -> list[InferenceRequest]:
        found = client.get(count)
        if any(one.request_id == "late" for one in found):
            taken.set()
        return found

    def poll_stop() -> set[Any]:
        if steps:
            stopped.set()
        return {"a"} if steps else set()

    def compute() -> None:
        steps.append(None)
        if len(steps) == 1:  # before which nothing was open, so that nothing could overlap
            client.ask("late", max_new_tokens=2)
        if len(steps) == 2:
            assert taken.wait(60) and stopped.wait(60)
        if len(steps) > 2:
            time.sleep(0.01)  # until the answer of `poll_stop` is taken up

    steps: list[None] = []
    program.before_run = compute
    client.ask("a", max_new_tokens=900)
    engine = simulated_engine(program, overlap=True)
    with BatchManager(engine, get, client.send, poll_stop, None) as manager:
        client.wait(2)
    assert client.errors == {} and len(steps) < 900
    assert_nothing_left(manager)


def test_without_a_limit_the_count_is_negative() -> None:
    client = Client()
    client.ask("a")
    with manage(client):
        client.wait(1)
    assert set(client.asked) == {-1}


@pytest.mark.parametrize("overlap", [False, True])
def test_a_send_response_that_raises_stops_its_request_alone(overlap: bool, caplog: pytest.LogCaptureFixture) -> None:
    client, program = Client(), SimulatedProgram()
    program.before_run = slow_from(20)
    client.ask("bad", streaming=True, max_new_tokens=900)
    client.ask("good", streaming=True, max_new_tokens=9)

    def gone(request_id: Any, is_final: bool) -> None:
        if request_id == "bad" and not is_final:
            raise ConnectionError("the reader has gone")

    client.on_response = gone
    with manage(client, program, overlap=overlap) as manager:
        client.wait(2)
    assert len(client.parts["good"]) == 9
    assert len(client.parts["bad"]) < 900
    assert "callback send_response raised" in caplog.text
    assert_nothing_left(manager)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_reader_that_blocks_does_not_keep_the_steps_waiting(overlap: bool) -> None:
    client, program = Client(), SimulatedProgram()
    steps = []
    program.before_run = lambda: steps.append(None)
    reading = threading.Event()

    def block(request_id: Any, is_final: bool) -> None:
        assert reading.wait(60)

    client.on_response = block
    client.ask("a", streaming=True, max_new_tokens=40)
    with manage(client, program, overlap=overlap) as manager:
        until(lambda: len(steps) >= 40)
        assert len(steps) == 40 and client.done == []
        assert manager.num_active == 1
        reading.set()
    assert client.done == ["a"] and len(client.parts["a"]) == 40
    assert_nothing_left(manager)


@pytest.mark.parametrize("name", ["get", "poll_stop", "on_stats"])
@pytest.mark.parametrize("overlap", [False, True])
def test_other_callbacks_that_raise_are_logged(overlap: bool, name: str, caplog: pytest.LogCaptureFixture) -> None:
    client = Client()
    client.ask("a")
    calls = []

    def raising(*arguments: Any) -> Any:
        calls.append(arguments)
        if name == "get" and len(calls) > 2:
            return client.get(*arguments)
        raise RuntimeError("a bug of the server")

    callbacks = {"get": client.get, "poll_stop": set, "on_stats": lambda text: None, name: raising}
    arguments = (callbacks["get"], client.send, callbacks["poll_stop"], callbacks["on_stats"])
    with BatchManager(simulated_engine(overlap=overlap), *arguments) as manager:
        client.wait(1)
    assert client.errors == {} and "raised" in caplog.text
    assert_nothing_left(manager)


@pytest.mark.parametrize("overlap", [False, True])
def test_readers_that_block_keep_nobody_elses_responses_waiting(overlap: bool) -> None:
    client = Blocking("a", "b", "c")
    for request_id in client.blocked:
        client.ask(request_id, streaming=True, max_new_tokens=9)
    for number in range(20):
        client.ask(number, streaming=True, max_new_tokens=4)
    with manage(client, overlap=overlap) as manager:
        client.wait(20)
        assert sorted(client.done) == list(range(20)) and manager.num_active == 3
        client.reading.set()
    assert sorted(client.done[20:]) == ["a", "b", "c"]
    for request_id, count in [("a", 9), ("b", 9), ("c", 9), *((number, 4) for number in range(20))]:
        assert [int(part["sequence_length"]) for part in client.parts[request_id]] == list(range(4, 4 + count))
    assert_nothing_left(manager)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["get", "poll_stop", "on_stats"])
def test_other_callbacks_that_block_do_not_stop_the_steps(name: str, overlap: bool) -> None:
    client, going_on = Client(), threading.Event()
    client.ask("a", max_new_tokens=30)
    calls = []

    def blocking(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) > (name == "get"):
            assert going_on.wait(60)
        return client.get(*arguments) if name == "get" else ()

    callbacks = {"get": client.get, "poll_stop": set, "on_stats": lambda text: None, name: blocking}
    arguments = (callbacks["get"], client.send, callbacks["poll_stop"], callbacks["on_stats"])
    manager = BatchManager(simulated_engine(overlap=overlap), *arguments)
    client.wait(1)
    until(lambda: len(calls) > (name == "get"))
    assert len(calls) == (2 if name == "get" else 1), "one call at a time"
    client.ask("b")
    if name != "get":
        client.wait(2)
    assert not manager.shutdown(0.1)
    manager._worker.join(60)
    assert not manager.shutdown(0.1), "a callback blocks"
    going_on.set()
    assert manager.shutdown()
    client.wait(2)
    assert client.errors == ({"b": "the batch manager was shut down"} if name == "get" else {})
    if name == "on_stats":
        assert len(calls) == manager._engine.stats().steps
    assert_nothing_left(manager)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_that_takes_long_to_read_keeps_no_step_waiting(overlap: bool) -> None:
    client, slow = Client(), SlowIds([4, 5])
    client.ask("a", max_new_tokens=40)
    client.ask("slow", slow, max_new_tokens=3)
    client.ask("slow", [9])
    client.ask("behind", max_new_tokens=3)
    with manage(client, overlap=overlap) as manager:
        client.wait(1)
        assert client.done == ["a"] and manager.num_active == 2
        client.stops = {"behind"}
        until(lambda: "behind" in manager._submissions.stopped)
        client.stops = set()
        slow.ready.set()
        client.wait(4)
    assert client.parts["slow"][0]["output_ids"].tolist() == [[[4, 5, *tokens_of([4, 5], max_new_tokens=3)]]]
    assert list(client.errors) == ["slow"], "the second of that id"
    assert client.done.index("slow") < len(client.done) - 1 - client.done[::-1].index("slow")
    assert_nothing_left(manager)


def test_requests_that_came_before_get_requests_raised_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    client = Client()
    client.ask("a")

    def get(room: int) -> Iterator[InferenceRequest]:
        yield from client.get(room)
        raise RuntimeError("a bug of the server")

    with BatchManager(simulated_engine(), get, client.send) as manager:
        client.wait(1)
    assert len(client.parts["a"]) == 1 and "callback get_requests raised" in caplog.text
    assert_nothing_left(manager)


@pytest.mark.parametrize("name", ["get_requests", "send_response", "poll_stop", "on_stats"])
def test_what_cannot_be_called_is_no_callback(name: str) -> None:
    callbacks: dict[str, Any] = {"get_requests": lambda most: [], "send_response": lambda *response: None, name: 5}
    with pytest.raises(ValueError, match=f"{name} must be callable.*, got 5"):
        BatchManager(simulated_engine(), **callbacks)


@pytest.mark.parametrize("field", [{"pad_id": None}, {"pad_id": 2**70}, {"pad_id": True}, {"options": None}], ids=str)
def test_a_request_with_a_field_that_is_none_is_told_and_the_others_go_on(field: dict[str, Any]) -> None:
    client = Client()
    client.ask("good", max_new_tokens=9)
    options = {"max_new_tokens": 4}
    client.queue.append(InferenceRequest(**{"request_id": "bad", "input_ids": (1, 2), "options": options, **field}))
    with manage(client) as manager:
        client.wait(2)
    (response,) = client.parts["good"]
    assert response["output_ids"].shape[-1] == 3 + 9 and client.errors.keys() == {"bad"}
    assert next(iter(field)) == "options" or "pad_id must be an integer of 64 bits" in client.errors["bad"]
    assert_nothing_left(manager)


def test_a_response_that_cannot_be_made_ends_its_request_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client, tensors = Client(), OpenRequest.tensors

    def made(entry: OpenRequest, *, ended: bool) -> Any:
        if entry.handle.request_id == "bad":
            raise MemoryError("no room for it")
        return tensors(entry, ended=ended)

    monkeypatch.setattr(OpenRequest, "tensors", made)
    for name in ("good", "bad"):
        client.ask(name, max_new_tokens=9)
    with manage(client) as manager:
        client.wait(2)
    assert (
        client.errors == {"bad": "no room for it"} and "a response could not be made, of request 'bad'" in caplog.text
    )
    assert_nothing_left(manager)


def test_one_that_ends_while_its_response_is_made_has_one_response(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody cancels it between the question whether it has ended and what there is to send."""
    client, tensors, engine = Client(), OpenRequest.tensors, simulated_engine()

    def made(entry: OpenRequest, *, ended: bool) -> Any:
        if len(entry.handle.tokens) == 3:
            entry.handle.cancel()
        return tensors(entry, ended=ended)

    monkeypatch.setattr(OpenRequest, "tensors", made)
    client.ask("one", max_new_tokens=9)
    with BatchManager(engine, client.get, client.send) as manager:
        client.wait(1)
    (response,) = client.parts["one"]
    assert response["output_ids"].shape[-1] == 3 + 3
    assert_nothing_left(manager)
