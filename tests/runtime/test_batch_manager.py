"""The batch manager: its callbacks, and what happens when they, the requests or the steps fail."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import selective_compile as sc
from selective_compile.runtime import BatchManager, Engine, InferenceRequest, RequestProcessor
from selective_compile.runtime.stats import StepFloor, StepRecord
from tests.runtime.simulated import VOCAB_SIZE, SimulatedProgram, expected_tokens, simulated_engine


class Client:
    """The callbacks of a server that keeps everything; `done` ids have had their last response."""

    def __init__(self) -> None:
        self.queue: deque[InferenceRequest] = deque()
        self.asked: list[int] = []
        self.parts: dict[Any, list[dict[str, Tensor]]] = {}
        self.errors: dict[Any, str] = {}
        self.done: list[Any] = []
        self.stops: set[Any] = set()
        self.stats: list[dict[str, Any]] = []
        self.on_response: Callable[[Any, bool], None] = lambda request_id, is_final: None

    def get(self, max_count: int) -> list[InferenceRequest]:
        self.asked.append(max_count)
        count = len(self.queue) if max_count < 0 else min(max_count, len(self.queue))
        return [self.queue.popleft() for _ in range(count)]

    def send(self, request_id: Any, tensors: dict[str, Tensor], is_final: bool, error: str) -> None:
        if error:
            assert is_final and not tensors
            self.errors[request_id] = error
        else:
            self.parts.setdefault(request_id, []).append(tensors)
        self.on_response(request_id, is_final)
        if is_final:
            self.done.append(request_id)

    def ask(self, request_id: Any, input_ids: Any = (1, 2, 3), streaming: bool = False, **options: Any) -> None:
        options.setdefault("max_new_tokens", 5)
        self.queue.append(
            InferenceRequest(request_id=request_id, input_ids=input_ids, streaming=streaming, options=options)
        )

    def wait(self, count: int) -> None:
        deadline = time.monotonic() + 60
        while len(self.done) < count:
            assert time.monotonic() < deadline, (self.done, count)
            time.sleep(0.001)


def manage(client: Client, *programs: SimulatedProgram | None, **config: Any) -> BatchManager:
    """Of as many engines as there are programs, at least one."""
    limit = config.pop("max_active", None)
    engines = [simulated_engine(program, **config) for program in programs or [None]]
    engine = RequestProcessor(engines, routing="round_robin") if len(engines) > 1 else engines[0]

    def on_stats(text: str) -> None:
        client.stats.append(json.loads(text))

    def poll_stop() -> set[Any]:
        return set(client.stops)

    return BatchManager(engine, client.get, client.send, poll_stop, on_stats, max_active=limit, floor=least)


def least(record: StepRecord) -> StepFloor:
    return StepFloor(0.25 * record.seconds, "compute" if any(share.is_prefill for share in record.shares) else "memory")


def engines_of(manager: BatchManager) -> tuple[Engine, ...]:
    return manager._engine.engines if isinstance(manager._engine, RequestProcessor) else (manager._engine,)


def assert_nothing_left(manager: BatchManager) -> None:
    for engine in engines_of(manager):
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
        assert not engine._requests
        engine._scheduler.check()
    assert not manager._open and manager.num_active == 0 and not manager.alive


def tokens_of(prompt: list[int], **options: Any) -> list[int]:
    return expected_tokens(prompt, simulated_engine().submit(prompt, **options).params)


def test_a_response_has_the_tensors_of_its_request() -> None:
    client = Client()
    client.ask(2**63 + 5, [4, 5], max_new_tokens=6, logprobs=True)
    with manage(client) as manager:
        client.wait(1)
    ((response,),) = client.parts.values()
    expected = [4, 5, *tokens_of([4, 5], max_new_tokens=6)]
    assert response["output_ids"].tolist() == [[expected]]
    assert response["output_ids"].dtype == torch.int64
    assert response["sequence_length"].tolist() == [[8]]
    assert response["log_probs"].shape == (1, 1, 6) and response["cum_log_probs"].shape == (1, 1)
    assert float(response["log_probs"].sum()) == pytest.approx(float(response["cum_log_probs"]))
    assert client.errors == {}
    assert_nothing_left(manager)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_streamed_request_gets_a_response_for_each_token(overlap: bool) -> None:
    client = Client()
    client.ask("a", [4, 5], streaming=True, max_new_tokens=6)
    with manage(client, overlap=overlap):
        client.wait(1)
    parts = client.parts["a"]
    assert [part["output_ids"].shape for part in parts] == [(1, 1, 1)] * 6
    assert [int(part["output_ids"]) for part in parts] == tokens_of([4, 5], max_new_tokens=6)
    assert [int(part["sequence_length"]) for part in parts] == [3, 4, 5, 6, 7, 8]


def test_what_is_wrong_with_one_request_arrives_as_its_last_response() -> None:
    client = Client()
    client.ask("empty", [])
    client.ask("unknown", nonsense=1)
    client.ask("good")
    with manage(client) as manager:
        client.wait(3)
    assert client.errors["empty"] == "prompt_ids must hold at least one token id, got none"
    assert "got 'nonsense'" in client.errors["unknown"]
    assert len(client.parts["good"]) == 1
    assert_nothing_left(manager)


class Ids:
    """Token ids that cannot be read, as on a device that failed."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def tolist(self) -> list[int]:
        raise self.error


def test_whatever_submission_raises_is_a_last_response_and_those_behind_go_on(caplog: pytest.LogCaptureFixture) -> None:
    client = Client()
    client.ask("device", Ids(RuntimeError("CUDA error")))
    client.ask("no options", [1], max_new_tokens=10**400)
    client.ask("good")
    with manage(client, max_active=3) as manager:
        client.wait(3)
        assert manager.num_active == 0
        client.ask("later")
        client.wait(4)
    assert client.errors["device"] == "submission failed: RuntimeError: CUDA error"
    assert "submission of a request failed" in caplog.text
    assert client.errors["no options"].startswith("max_new_tokens must be")
    assert set(client.errors) == {"device", "no options"} and len(client.done) == 4
    assert_nothing_left(manager)


@pytest.mark.parametrize("request_id", [None, [7], {}, True, 1.0])
def test_an_id_that_is_none_is_refused_by_name(request_id: Any, caplog: pytest.LogCaptureFixture) -> None:
    client = Client()
    answers: list[tuple[Any, dict[str, Tensor], bool, str]] = []
    client.ask(request_id, streaming=True)
    client.queue.append("no request")  # type: ignore[arg-type]
    client.ask("good")

    def send(*answer: Any) -> None:
        answers.append(answer)

    with BatchManager(simulated_engine(), client.get, send) as manager:
        deadline = time.monotonic() + 60
        while len(answers) < 2:
            assert time.monotonic() < deadline, answers
            time.sleep(0.001)
    refused = [answer for answer in answers if answer[0] != "good"]
    assert refused == [(request_id, {}, True, f"request_id must be a string or an integer, got {request_id!r}")]
    assert "get_requests must give InferenceRequests, got 'no request'" in caplog.text
    assert_nothing_left(manager)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_is_killed_by_a_submission_says_so_to_those_behind_it() -> None:
    client = Client()
    for request_id, ids in (("a", [1]), ("b", Ids(KeyboardInterrupt("killed"))), ("c", [1])):
        client.ask(request_id, ids)
    with manage(client) as manager:
        client.wait(3)
    assert client.errors == dict.fromkeys(
        "abc", "the worker thread of the batch manager ended: KeyboardInterrupt: killed"
    )
    assert_nothing_left(manager)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_id_in_use_is_refused_and_one_that_ended_may_be_used_again(overlap: bool) -> None:
    client = Client()

    def again(request_id: Any, is_final: bool) -> None:
        if is_final and client.done.count("a") == 1 and not client.queue:
            client.ask("a", [7])

    client.ask("a", max_new_tokens=20)
    client.ask("a")
    client.on_response = again
    with manage(client, overlap=overlap) as manager:
        client.wait(3)
    assert client.errors["a"].startswith("request_id must not be that of an unfinished request")
    assert [len(part["output_ids"][0, 0]) for part in client.parts["a"]] == [23, 6]
    assert_nothing_left(manager)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_refusal_of_an_id_in_use_does_not_end_the_request_that_has_it(overlap: bool) -> None:
    """Whoever reads the responses of an id up to the last one has those of the first request, and then the refusals."""
    answers: list[tuple[list[int], bool, str]] = []
    client, program = Client(), SimulatedProgram()

    def send(request_id: Any, tensors: dict[str, Tensor], is_final: bool, error: str) -> None:
        answers.append((tensors["output_ids"].flatten().tolist() if tensors else [], is_final, error))
        if len(answers) == 3:
            client.ask("a", [8], streaming=True)
            client.ask("a", [9])
        if is_final:
            client.done.append(request_id)

    program.before_run = lambda: time.sleep(0.001)
    client.ask("a", [4, 5], streaming=True, max_new_tokens=60)
    with BatchManager(simulated_engine(program, overlap=overlap), client.get, send) as manager:
        client.wait(3)
    *parts, last, second, third = answers
    assert [token for tokens, _, _ in (*parts, last) for token in tokens] == tokens_of([4, 5], max_new_tokens=60)
    assert last[1:] == (True, "") and not any(is_final or error for _, is_final, error in parts)
    refusal = "request_id must not be that of an unfinished request, got 'a'"
    assert second == third == ([], True, refusal)
    assert_nothing_left(manager)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stopped_request_gets_its_last_response(overlap: bool) -> None:
    client = Client()
    client.ask("a", max_new_tokens=500, streaming=True)
    client.ask("b", max_new_tokens=3)

    def stop_soon(request_id: Any, is_final: bool) -> None:
        if len(client.parts.get("a", ())) == 4:
            client.stops = {"a", "who is that"}

    client.on_response = stop_soon
    with manage(client, overlap=overlap) as manager:
        client.wait(2)
    assert 4 <= sum(part["output_ids"].numel() for part in client.parts["a"]) < 500
    assert client.errors == {} and set(client.done) == {"a", "b"}
    assert_nothing_left(manager)


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
def test_stats_of_each_iteration(overlap: bool) -> None:
    client = Client()
    for number in range(3):
        client.ask(number, [number] * 5, max_new_tokens=4)
    with manage(client, overlap=overlap, token_budget=8, block_size=4, max_kv_tokens=64):
        client.wait(3)
    first = client.stats[0]
    assert first["Iteration Counter"] == 0
    assert (first["Scheduled Requests"], first["Context Requests"], first["Generation Requests"]) == (2, 2, 0)
    assert first["Total Context Tokens"] == 8
    assert (first["Max KV cache blocks"], first["Tokens per KV cache block"]) == (16, 4)
    assert first["Used KV cache blocks"] + first["Free KV cache blocks"] == 16
    assert [one["Iteration Counter"] for one in client.stats] == list(range(len(client.stats)))
    assert client.stats[-1]["Active Request Count"] == 0
    assert [one["Limiting Resource"] for one in client.stats[:2]] == ["compute", "compute"]
    assert client.stats[-1]["Limiting Resource"] == "memory"
    assert all(4 * one["Floor Step Seconds"] == one["Step Seconds"] for one in client.stats)
    assert first["Predicted Step Seconds"] is None and client.stats[1]["Predicted Step Seconds"] > 0


def test_stats_of_requests_that_ended_have_their_times() -> None:
    client = Client()
    for number in range(3):
        client.ask(number, max_new_tokens=number + 1)
    client.ask(2**70, [VOCAB_SIZE - 1], max_new_tokens=4)
    client.ask("a", [7, 8], num_beams=3, max_new_tokens=4)
    with manage(client, max_requests=3):
        client.wait(5)
    ended = {one["Request ID"]: one for stats in client.stats for one in stats["Ended Requests"]}
    assert {name: (one["Finish Reason"], one["Generated Tokens"]) for name, one in ended.items()} == {
        0: ("length", 1),
        1: ("length", 2),
        2: ("length", 3),
        2**70: ("length", 4),
        "a": ("length", 4),
    }
    for one in ended.values():
        assert 0 < one["Queue Seconds"] < one["First Token Seconds"] <= one["Total Seconds"]
    assert ended[0]["Between Tokens Seconds"] is None and ended[2]["Between Tokens Seconds"] > 0
    # The beams of a search are one request.
    assert max(one["Active Request Count"] for one in client.stats) == 4  # one has ended by the first of them
    assert {one["Scheduled Requests"] for one in client.stats} == {1, 2, 3}
    assert client.stats[-1]["Scheduled Requests"] == 1
    assert all(
        one["Context Requests"] + one["Generation Requests"] == one["Scheduled Requests"] for one in client.stats
    )


def test_static_batches_report_their_empty_slots() -> None:
    client = Client()
    client.ask("short", max_new_tokens=2)
    client.ask("long", max_new_tokens=4)
    with manage(client, batching="static"):
        client.wait(2)
    assert [one["Empty Generation Slots"] for one in client.stats] == [0, 0, 1, 1]
    assert [one["Generation Requests"] for one in client.stats] == [0, 2, 1, 1]


@pytest.mark.parametrize("overlap", [False, True])
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


@pytest.mark.parametrize("overlap", [False, True])
def test_a_send_response_that_raises_stops_its_request_alone(overlap: bool, caplog: pytest.LogCaptureFixture) -> None:
    client = Client()
    client.ask("bad", streaming=True, max_new_tokens=900)
    client.ask("good", streaming=True, max_new_tokens=9)

    def gone(request_id: Any, is_final: bool) -> None:
        if request_id == "bad" and not is_final:
            raise ConnectionError("the reader has gone")

    client.on_response = gone
    with manage(client, overlap=overlap) as manager:
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
        deadline = time.monotonic() + 60
        while len(steps) < 40 and time.monotonic() < deadline:
            time.sleep(0.001)
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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("overlap", [False, True])
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


def test_its_public_name() -> None:
    assert sc.runtime.BatchManager is BatchManager


def test_max_active_must_be_positive() -> None:
    with pytest.raises(ValueError, match="max_active must be a positive integer or None, got 0"):
        manage(Client(), max_active=0)


class Blocking(Client):
    """Its readers of these ids block until `reading` is set."""

    def __init__(self, *blocked: Any) -> None:
        super().__init__()
        self.blocked = blocked
        self.reading = threading.Event()
        self.on_response = self.block

    def block(self, request_id: Any, is_final: bool) -> None:
        if request_id in self.blocked:
            assert self.reading.wait(60)


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


def test_a_shutdown_waits_so_long_and_stops_what_still_runs() -> None:
    client, program = Blocking("stuck"), SimulatedProgram()
    program.before_run = lambda: time.sleep(0.001)
    client.ask("stuck", streaming=True, max_new_tokens=3)
    client.ask("long", max_new_tokens=4000)
    manager = manage(client, program)
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
    assert len(calls) == (2 if name == "get" else 1), "one call at a time"
    client.ask("b")
    if name != "get":
        client.wait(2)
    assert not manager.shutdown(0.2)
    going_on.set()
    assert manager.shutdown()
    client.wait(2)
    assert client.errors == ({"b": "the batch manager was shut down"} if name == "get" else {})
    if name == "on_stats":
        assert len(calls) == manager._engine.stats().steps
    assert_nothing_left(manager)


class SlowIds(list[int]):
    """Token ids that take until `ready` to be read, as stop strings do for a large vocabulary."""

    def __init__(self, ids: list[int]) -> None:
        super().__init__(ids)
        self.ready = threading.Event()

    def tolist(self) -> list[int]:
        assert self.ready.wait(60)
        return list(self)


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
        time.sleep(0.02)
        client.stops = set()
        slow.ready.set()
        client.wait(4)
    assert client.parts["slow"][0]["output_ids"].tolist() == [[[4, 5, *tokens_of([4, 5], max_new_tokens=3)]]]
    assert list(client.errors) == ["slow"], "the second of that id"
    assert client.done.index("slow") < len(client.done) - 1 - client.done[::-1].index("slow")
    assert_nothing_left(manager)


def test_a_shutdown_does_not_wait_for_a_request_that_is_being_read() -> None:
    client, slow = Client(), SlowIds([4, 5])
    client.ask("slow", slow, max_new_tokens=2000)
    manager = manage(client)
    while manager.num_active == 0:
        time.sleep(0.001)
    assert not manager.shutdown(0.1)
    slow.ready.set()
    assert manager.shutdown()
    assert client.done == ["slow"] and client.errors == {}
    assert int(client.parts["slow"][0]["sequence_length"]) < 2002
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


def test_senders_must_be_positive() -> None:
    with pytest.raises(ValueError, match="senders must be a positive integer, got 0"):
        BatchManager(simulated_engine(), Client().get, Client().send, senders=0)


@pytest.mark.parametrize("overlap", [False, True])
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
    with manage(client, *programs, overlap=overlap, max_requests=16, max_kv_tokens=64, block_size=2) as manager:
        client.wait(count)
    assert sorted(client.done) == list(range(count))
    assert_nothing_left(manager)
    own = [one for one in threading.enumerate() if one not in before]
    # The engines' own, which end with them.
    assert [one.name for one in own] == ["selective-compile-tokens_0"] * overlap * engines
    assert any(engine.stats().preemptions for engine in engines_of(manager))
