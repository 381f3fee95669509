"""Request handles and threads: streaming, waiting, cancelling, submitting, driven or driving."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

from selective_compile.runtime import Engine, Request, StepRecord
from selective_compile.runtime.request_state import RequestState
from tests.runtime.simulated import VOCAB_SIZE, SimulatedProgram, expected_tokens, simulated_engine

SECONDS = 20.0  # far more than anything here takes; a test that gets here has hung


@contextmanager
def held_step(program: SimulatedProgram) -> Iterator[threading.Event]:
    """Within, the model's next run waits; the event is set once it does."""
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        assert leave.wait(SECONDS)

    program.before_run = hold
    try:
        yield entered
    finally:
        program.before_run = lambda: None
        leave.set()


def none_late(in_time: bool) -> None:
    assert in_time


class EndsAtTheLastMoment:
    """An owner whose request ends just when a reader has found nothing and is about to wait."""

    request: Request

    @property
    def driven(self) -> bool:
        if not self.request.finished:
            self.request.finish("cancelled")
        return True

    def check_outside_step(self) -> None:
        """It has none."""

    def drive(self) -> None:
        raise AssertionError

    def cancel(self, request: Request) -> None:
        raise AssertionError


def test_an_end_between_looking_and_waiting_is_not_missed() -> None:
    owner = EndsAtTheLastMoment()
    params = simulated_engine().submit([1]).params
    owner.request = Request(RequestState("a", 0, [1], max_new_tokens=1), params, owner)
    waits: list[float | None] = []
    owner.request._changed.wait = waits.append  # type: ignore[assignment,method-assign]
    assert owner.request.result(timeout=SECONDS).finish_reason == "cancelled"
    assert not waits


def test_a_reader_drives_the_engine_for_all() -> None:
    engine = simulated_engine()
    first, second = engine.submit([1], max_new_tokens=5), engine.submit([2], max_new_tokens=3)
    assert list(first) == first.tokens == expected_tokens([1], first.params)
    assert second.finished
    assert list(second) == list(second) == second.tokens


def test_streams_begin_before_the_end() -> None:
    engine = simulated_engine()
    request = engine.submit([1], max_new_tokens=5)
    stream = iter(request)
    assert next(stream) == request.tokens[0]
    assert not request.finished and request.finish_reason is None
    assert len(request.tokens) == 1


def test_result_and_timing() -> None:
    engine = simulated_engine()
    request = engine.submit([1, 2], request_id="a", max_new_tokens=5)
    assert request.timing.queued is None and request.timing.total is None
    result = request.result()
    assert (result.request_id, result.tokens, result.finish_reason) == ("a", tuple(request.tokens), "length")
    assert result.error is None
    queued, first_token, total = result.timing.queued, result.timing.first_token, result.timing.total
    assert queued is not None and first_token is not None and total is not None
    assert 0 <= queued <= first_token <= total
    assert request.result() == result
    assert "'a'" in repr(request) and "5 tokens" in repr(request)


def test_tokens_are_a_copy() -> None:
    request = simulated_engine().submit([1], max_new_tokens=2)
    request.result()
    request.tokens.clear()
    assert len(request.tokens) == 2


def test_result_times_out_with_and_without_a_background_thread() -> None:
    program = SimulatedProgram()
    engine = simulated_engine(program)
    request = engine.submit([1], max_new_tokens=400)
    with pytest.raises(TimeoutError, match="must finish within 0 seconds"):
        request.result(timeout=0)
    with engine.running(), held_step(program) as entered:
        assert entered.wait(SECONDS)
        with pytest.raises(TimeoutError, match=r"must finish within 0.01 seconds"):
            request.result(timeout=0.01)
    with pytest.raises(TimeoutError):
        request.result(timeout=-(10**400))
    assert len(request.result(timeout=10**400).tokens) == 400


def test_submitting_from_many_threads_while_running() -> None:
    program = SimulatedProgram()
    engine = simulated_engine(program, max_kv_tokens=64, block_size=4, token_budget=16, max_requests=8)
    # No step before every client has a request: so many do not fit into the blocks together.
    everyone = threading.Event()
    program.before_run = lambda: none_late(everyone.wait(SECONDS))
    met = threading.Barrier(8, action=everyone.set)

    def client(number: int) -> list[Request]:
        source = random.Random(number)
        requests = []
        for turn in range(6):
            prompt = [source.randrange(VOCAB_SIZE) for _ in range(source.randint(1, 10))]
            request = engine.submit(prompt, request_id=f"{number}/{turn}", max_new_tokens=source.randint(20, 40))
            if turn == 0:
                met.wait(SECONDS)
            elif turn == 3:
                request.cancel()
            elif turn % 2:
                assert list(request) == request.tokens
            requests.append(request)
        for request in requests:
            request.result(timeout=SECONDS)
        return requests

    with engine.running(), ThreadPoolExecutor(8) as clients:
        served = [request for requests in clients.map(client, range(8)) for request in requests]
    for request in served:
        if request.finish_reason == "cancelled":
            assert request.request_id.endswith("/3")  # type: ignore[union-attr]
            assert request.tokens == expected_tokens(request.prompt_ids, request.params)[: len(request.tokens)]
        else:
            assert request.tokens == expected_tokens(request.prompt_ids, request.params)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
    assert stats.preemptions > 0
    engine._scheduler.check()


def test_many_readers_without_a_background_thread() -> None:
    engine = simulated_engine()
    requests = [engine.submit([number], max_new_tokens=10) for number in range(6)]
    with ThreadPoolExecutor(12) as readers:
        streams = list(readers.map(lambda request: list(request), requests + requests))
    for request, stream in zip(requests + requests, streams, strict=True):
        assert stream == expected_tokens(request.prompt_ids, request.params)


def test_the_background_thread_sleeps_when_idle_and_wakes() -> None:
    program, others = SimulatedProgram(), threading.enumerate()
    engine = simulated_engine(program)
    with engine.running():
        engine.submit([1], max_new_tokens=3).result(timeout=SECONDS)
        steps = engine.stats().steps
        (own,) = (thread for thread in threading.enumerate() if thread not in others)
        assert own.ident is not None
        clock = time.pthread_getcpuclockid(own.ident)
        before = time.clock_gettime(clock)
        time.sleep(0.2)
        assert time.clock_gettime(clock) - before < 0.1
        assert engine.stats().steps == steps == 3
        assert engine.submit([1], max_new_tokens=2).result(timeout=SECONDS).finish_reason == "length"


def test_submitting_cancelling_and_stats_do_not_wait_for_the_model() -> None:
    program = SimulatedProgram()
    engine = simulated_engine(program)
    with engine.running(), held_step(program) as entered:
        running = engine.submit([1], max_new_tokens=5)
        assert entered.wait(SECONDS)
        waiting = engine.submit([2], max_new_tokens=5)
        running.cancel()
        assert running.finished and engine.stats().blocks_used == 0
        assert waiting.tokens == []
    assert running.tokens == []
    assert waiting.result(timeout=SECONDS).finish_reason == "length"


def test_leaving_running_hands_over_to_the_reader() -> None:
    """A reader that waits when the background thread stops goes on by itself, even if nothing came for it."""
    program = SimulatedProgram()
    program.before_run = lambda: time.sleep(0.01)  # the long one takes 20 seconds
    engine = simulated_engine(program, max_requests=1)
    long, short = engine.submit([1], max_new_tokens=2000), engine.submit([2], max_new_tokens=3)
    with ThreadPoolExecutor(1) as executor:
        with engine.running():
            reader = executor.submit(short.result, timeout=SECONDS)
            time.sleep(0.05)
        assert not engine.driven and not short.tokens
        long.cancel()
        assert list(reader.result(timeout=SECONDS).tokens) == expected_tokens([2], short.params)


def test_running_may_be_entered_again_but_not_twice() -> None:
    engine = simulated_engine()
    with engine.running() as same:
        assert same is engine and engine.driven
        with pytest.raises(RuntimeError, match="must not be running already"), engine.running():
            pass
        assert engine.driven
    threads = set(threading.enumerate())
    for _ in range(3):
        with engine.running():
            engine.submit([1], max_new_tokens=2).result(timeout=SECONDS)
    assert set(threading.enumerate()) <= threads
    assert not engine.driven


def test_an_exception_in_the_body_stops_the_thread() -> None:
    engine = simulated_engine()
    with pytest.raises(KeyError), engine.running():
        raise KeyError
    assert not engine.driven


def test_a_failed_step_does_not_stop_the_background_thread() -> None:
    program = SimulatedProgram()
    engine = simulated_engine(program)
    failures = iter([ValueError("bad"), None])

    def fail_once() -> None:
        if (failure := next(failures, None)) is not None:
            raise failure

    program.before_run = fail_once
    with engine.running():
        failed = engine.submit([1], max_new_tokens=3).result(timeout=SECONDS)
        fine = engine.submit([1], max_new_tokens=3).result(timeout=SECONDS)
    assert (failed.finish_reason, failed.error) == ("error", "step 0 failed: ValueError: bad")
    assert fine.finish_reason == "length"


def test_an_observer_that_raises_is_logged_and_called_no_more(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []
    others: list[StepRecord] = []

    def observe(record: StepRecord) -> None:
        seen.append(record.step)
        if record.step == 2:
            raise KeyError("observer")

    engine: Engine = simulated_engine(observers=[observe, others.append])
    with engine.running():
        request = engine.submit([1], max_new_tokens=6)
        assert request.result(timeout=SECONDS).finish_reason == "length"
    assert seen == [0, 1, 2] and len(others) == 6
    assert "callback observer raised" in caplog.text


def test_an_observer_that_interrupts_ends_the_thread_and_is_heard() -> None:
    def observe(record: StepRecord) -> None:
        if record.step == 2:
            raise KeyboardInterrupt("observer")

    engine: Engine = simulated_engine(observers=[observe])
    with pytest.raises(KeyboardInterrupt, match="observer"), engine.running():
        request = engine.submit([1], max_new_tokens=6)
        # The thread ends at step 2; the reader drives the rest.
        assert request.result(timeout=SECONDS).finish_reason == "length"
    assert list(request) == expected_tokens([1], request.params)


@pytest.mark.parametrize("driven", [False, True])
@pytest.mark.parametrize("what", ["result", "iterate", "step", "drop_computed", "running"])
def test_waiting_for_another_request_within_a_step_is_refused(what: str, driven: bool) -> None:
    """In a processor that is its request's error, in an observer the observer's."""
    engine = simulated_engine()
    other = engine.submit([5], max_new_tokens=30)
    messages: list[str] = []

    def wait() -> None:
        with pytest.raises(RuntimeError, match="must not be waited for from within a step") as raised:
            if what == "running":
                with engine.running():
                    pass
            else:
                calls: dict[str, Callable[[], Any]] = {
                    "result": lambda: other.result(timeout=1),
                    "iterate": lambda: list(other),
                    "step": engine.step,
                    "drop_computed": engine.drop_computed,
                }
                calls[what]()
        messages.append(str(raised.value))
        raise raised.value

    waiting = engine.submit([1, 2], max_new_tokens=3, logits_processor=[lambda ids, scores: wait()])
    engine.add_observer(lambda record: wait())
    with engine.running() if driven else nullcontext():
        assert waiting.result(timeout=SECONDS).error == f"logits processors failed: RuntimeError: {messages[0]}"
        assert other.result(timeout=SECONDS).finish_reason == "length"
    assert len(messages) == 2 and not engine._log._observers
    assert other.tokens == expected_tokens([5], other.params)


@pytest.mark.parametrize("error", [SystemExit("no"), asyncio.CancelledError("no"), GeneratorExit("no")])
def test_a_processor_that_would_end_the_thread_ends_its_own_request(error: BaseException) -> None:
    engine = simulated_engine()

    def end(ids: Any, scores: Any) -> Any:
        raise error

    guilty = engine.submit([1], max_new_tokens=3, logits_processor=[end])
    other = engine.submit([2], max_new_tokens=3)
    with engine.running():
        assert guilty.result(timeout=SECONDS).error == f"logits processors failed: {type(error).__name__}: no"
        assert other.result(timeout=SECONDS).finish_reason == "length"


def test_cancelling_a_request_ends_its_stream() -> None:
    program = SimulatedProgram()
    engine = simulated_engine(program)
    request = engine.submit([1], max_new_tokens=500)
    permitted = threading.Semaphore(5)  # steps, until the request is cancelled
    program.before_run = lambda: none_late(permitted.acquire(timeout=SECONDS))
    with engine.running():
        streamed = []
        for token in request:
            streamed.append(token)
            if len(streamed) == 3:
                request.cancel()
                permitted.release()
    assert request.finish_reason == "cancelled" and 3 <= len(streamed) <= 5
    assert streamed == request.tokens == expected_tokens([1], request.params)[: len(streamed)]
