"""The order in which a CUDA device is told to do things, by the rules of its streams and events: `recorded_cuda`."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from selective_compile import Engine, EngineConfig
from selective_compile.backend import compile_step_program
from selective_compile.runtime import device_stream
from selective_compile.runtime.device_stream import CudaStream, DeviceStream
from tests.models import tiny
from tests.oracle import assert_same_tokens
from tests.runtime.recorded_cuda import RecordedCuda, RecordedGraph

CPU = torch.device("cpu")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> RecordedCuda:
    recorded = RecordedCuda()
    monkeypatch.setattr(device_stream, "torch", recorded.namespace)
    monkeypatch.setattr(device_stream, "_copy", recorded.copy)
    return recorded


def test_work_of_two_threads_is_done_in_the_order_in_which_it_came(cuda: RecordedCuda) -> None:
    stream = CudaStream(CPU)
    stream.enqueue(cuda.work("first"))
    with cuda.stream(cuda.Stream()):
        stream.enqueue(cuda.work("of another thread"))
    stream.call(cuda.work("last"))
    assert cuda.before["of another thread"] == {"first"}
    assert cuda.before["last"] == {"first", "of another thread"}


def test_what_comes_first_is_behind_what_came_where_the_stream_was_made(cuda: RecordedCuda) -> None:
    """As the zeros of an engine's pools, of whose steps another thread may run the first."""
    with cuda.stream(cuda.Stream()):
        stream = CudaStream(CPU)
        cuda.work("zeros")()
    stream.enqueue(cuda.work("step"))
    assert cuda.before["step"] == {"zeros"}


def test_the_host_waits_for_what_came_before_the_mark_and_for_nothing_after(cuda: RecordedCuda) -> None:
    stream = CudaStream(CPU)
    stream.enqueue(cuda.work("step"))
    tokens, seen = torch.arange(3), torch.zeros(3, dtype=torch.int64)
    stream.copy(seen, tokens)
    with cuda.stream(cuda.Stream()):  # of another thread
        wait = stream.mark()
        stream.enqueue(cuda.work("next step"))
        wait()
    with cuda.stream(cuda.Stream()):  # which waits for no stream, but comes after what the host has waited for
        cuda.work("then")()
    assert cuda.before["then"] == {"step", "copy 1"} and seen.tolist() == [0, 1, 2]


def test_what_is_done_aside_waits_for_nothing_but_what_the_host_has_waited_for(cuda: RecordedCuda) -> None:
    stream, current = CudaStream(CPU), cuda.current
    stream.enqueue(cuda.work("step"))
    wait = stream.mark()
    stream.enqueue(cuda.work("next step"))
    wait()
    for name in ("criterion", "another criterion"):
        with stream.aside():
            cuda.work(name)()
    assert cuda.before["criterion"] == {"step"}
    assert cuda.before["another criterion"] == {"step", "criterion"}, "what one keeps, the next finds"
    assert cuda.current is current
    with pytest.raises(OSError), stream.aside():
        raise OSError
    stream.enqueue(cuda.work("the step behind them"))
    assert "next step" in cuda.before["the step behind them"] and cuda.current is current


@pytest.mark.parametrize("another", [False, True])
def test_what_is_done_aside_finds_what_the_users_code_did_before_the_next_step(
    cuda: RecordedCuda, another: bool
) -> None:
    """As to memory that a criterion looks at; in the stream that steps are given to, also where that is another."""
    stream = CudaStream(CPU)
    stream.enqueue(cuda.work("step"))
    wait = stream.mark()
    with cuda.stream(cuda.Stream() if another else cuda.current):
        cuda.work("of the user")()
        stream.enqueue(cuda.work("next step"))
        wait_for_next = stream.mark()
        cuda.work("of the user, too late")()
        wait()
        with stream.aside():
            cuda.work("criterion")()
        wait_for_next()
        with stream.aside():  # no step comes
            cuda.work("last criterion")()
    assert cuda.before["criterion"] == {"step", "of the user"}
    assert cuda.before["last criterion"] >= {"next step", "of the user, too late", "criterion"}


def test_memory_that_changes_before_the_host_has_waited_is_told_of(cuda: RecordedCuda) -> None:
    stream = CudaStream(CPU)
    pinned = torch.arange(3)
    stream.copy(torch.zeros(3, dtype=torch.int64), pinned)
    wait = stream.mark()
    pinned[0] = 5
    with pytest.raises(AssertionError, match="changed before it was read"):
        wait()


def test_values_are_sent_from_pinned_memory_and_without_waiting(cuda: RecordedCuda) -> None:
    stream, steps = CudaStream(CPU), []
    stream.enqueue(cuda.work("step"))

    def to(device: object, *, non_blocking: bool) -> str:
        assert non_blocking
        steps.append("to")
        cuda.work("sent")()
        return "sent"

    def pin_memory() -> SimpleNamespace:
        steps.append("pin")
        return SimpleNamespace(to=to)

    values: Any = SimpleNamespace(pin_memory=pin_memory)
    with cuda.stream(cuda.Stream()):
        assert stream.send(values, CPU) == "sent"
    assert steps == ["pin", "to"] and cuda.before["sent"] == {"step"}


def test_work_is_tried_and_captured_behind_all_that_was_there(cuda: RecordedCuda) -> None:
    stream = CudaStream(CPU)
    with cuda.stream(cuda.Stream()):
        stream.enqueue(cuda.work("step"))  # of another thread
    last, count = torch.tensor([7]), 0
    cuda.kept = [last]

    def work() -> None:
        nonlocal count
        count += 1
        cuda.work(f"work {count}")()
        last.add_(1)

    thread = cuda.current
    replay = stream.capture(work, [last])
    assert "step" in cuda.before["work 1"], "the work is tried while another step may run"
    assert "work 1" in cuda.before["work 2"], "it is captured before what it compiles is there"
    assert last.tolist() == [7], "something is left of the first time"
    assert cuda.current is thread
    stream.enqueue(cuda.work("between"))
    stream.enqueue(replay)
    assert {"step", "work 1", "between"} <= cuda.before["replay 1"] and last.tolist() == [8]
    stream.capture(work, [last])
    # Graphs of one pool may share what they compute in, as they take turns in one stream.
    (pool,) = cuda.pools.handles
    assert [given["pool"] for given in cuda.captures] == 2 * [pool]
    # Other threads allocate meanwhile.
    assert all(given["capture_error_mode"] == "thread_local" for given in cuda.captures)


def test_what_is_kept_is_read_before_the_work_and_written_back_after_it(cuda: RecordedCuda) -> None:
    kept: Any = SimpleNamespace(clone=cuda.work("read"), copy_=lambda values: cuda.work("written back")())
    stream, names = CudaStream(CPU), iter(("tried", "captured"))
    replay = stream.capture(lambda: cuda.work(next(names))(), [kept])
    assert "read" in cuda.before["tried"] and "tried" in cuda.before["written back"]
    assert "written back" in cuda.before["captured"]
    stream.enqueue(replay)
    assert "written back" in cuda.before["replay 1"]


@pytest.mark.parametrize("fails", [1, 2])
def test_what_cannot_be_captured_leaves_all_as_it_was(cuda: RecordedCuda, fails: int) -> None:
    stream = CudaStream(CPU)
    last, thread, count = torch.tensor([7]), cuda.current, 0

    def work() -> None:
        nonlocal count
        count += 1
        if count == fails:
            raise RuntimeError("operation not permitted")
        cuda.work("tried")()
        last.add_(1)

    with pytest.raises(RuntimeError, match="not permitted"):
        stream.capture(work, [last])
    assert last.tolist() == [7] and cuda.current is thread
    count = fails
    assert stream.capture(work, [last]) is not None, "the next one finds the device free"


@pytest.mark.parametrize("release", [(2, 11), (2, 12), (2, 13), (2, 14)])
@pytest.mark.parametrize("invalid", [False, True])
def test_a_capture_that_fails_holds_no_memory_and_none_is_lost_for_the_next(
    cuda: RecordedCuda, release: tuple[int, int], invalid: bool
) -> None:
    """Neither of this stream's graphs, nor of what others allocate, which must not be taken for the graph's."""
    cuda.of_release(*release)
    stream, count = CudaStream(CPU), 0
    (first,) = cuda.pools.handles
    replay = stream.capture(lambda: None, [])

    def work() -> None:
        nonlocal count
        count += 1
        if count % 2 == 0:
            if invalid:
                cuda.invalidate()
            raise RuntimeError("not permitted when stream is capturing")

    for _ in range(3):
        with pytest.raises(RuntimeError, match="not permitted"):
            stream.capture(work, [])
        gc.collect(1)  # of all objects it takes seconds
        assert not cuda.pools.recording and cuda.pools.uses == {first: 1}
    again = stream.capture(lambda: None, [])
    last = cuda.captures[-1]["pool"]
    assert last != first, "what is left of the host's pool of that name, nobody can end from Python"
    stream.enqueue(again)
    del replay, again
    gc.collect(1)  # of all objects it takes seconds
    assert not cuda.pools.uses


@pytest.mark.parametrize(
    ("kind", "invalid"),
    [(KeyboardInterrupt, True), (KeyboardInterrupt, False), (SystemExit, True), (SystemExit, False), (OSError, False)],
)
def test_what_ends_work_that_is_captured_is_not_taken_for_what_the_device_says(
    cuda: RecordedCuda, kind: type[BaseException], invalid: bool
) -> None:
    """Whoever presses Ctrl-C while an error is handled, or while the capture is no good any more, is heard: a capture
    that fails with a RuntimeError is tried again."""
    stream, count = CudaStream(CPU), 0

    def work() -> None:
        nonlocal count
        count += 1
        if count == 2:
            if invalid:
                cuda.invalidate()
            try:
                raise RuntimeError("not permitted when stream is capturing")
            except RuntimeError:
                raise kind from None

    with pytest.raises(kind):
        stream.capture(work, [])
    assert stream.capture(work, []) is not None


def test_what_the_device_says_at_the_end_gives_way_to_what_it_said_before(cuda: RecordedCuda) -> None:
    stream, count = CudaStream(CPU), 0

    def work() -> None:
        nonlocal count
        count += 1
        if count % 2 == 0:
            cuda.invalidate()
            if count == 2:
                try:
                    raise RuntimeError("handled")
                except RuntimeError as error:
                    raise RuntimeError("not permitted") from error

    with pytest.raises(RuntimeError, match="not permitted"):
        stream.capture(work, [])
    with pytest.raises(RuntimeError, match="previous error"):  # nothing was raised before it
        stream.capture(work, [])


def test_what_a_failed_capture_has_raised_holds_nothing_once_it_is_handled(cuda: RecordedCuda) -> None:
    """As the memory that the work computes in, which is to be free at once, and not with the next garbage."""
    stream, counts = CudaStream(CPU), iter(range(2))

    def work() -> None:
        if next(counts):
            raise RuntimeError("not permitted")

    held = weakref.ref(work)
    gc.collect()
    gc.disable()
    try:
        with suppress(RuntimeError):
            stream.capture(work, [])
        del work
        assert held() is None
    finally:
        gc.enable()


def test_a_capture_that_does_not_even_begin_lets_go_of_nothing(
    cuda: RecordedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = CudaStream(CPU)
    replay = stream.capture(lambda: None, [])

    def fail(graph: RecordedGraph, pool: Any) -> None:
        raise RuntimeError("no device")

    monkeypatch.setattr(RecordedGraph, "begin", fail)
    with pytest.raises(RuntimeError, match="no device"):
        stream.capture(lambda: None, [])
    assert set(cuda.pools.uses.values()) == {1} and replay is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_captured_work_lends_is_where_it_is_computed_and_kept_by_nobody(
    cuda: RecordedCuda, dtype: torch.dtype
) -> None:
    stream, given, lent = CudaStream(CPU), torch.zeros(3, 4, dtype=dtype), []

    def work() -> None:
        lent.append(stream.lend((given + 1).t()[1:, ::2]))  # with strides and an offset

    stream.enqueue(work)
    given.copy_(torch.arange(12).view(3, 4))
    assert lent[-1]().tolist() == [[1, 1]] * 3, "what is computed at once is kept"
    replay = stream.capture(work, [])
    given += 1
    stream.enqueue(replay)
    kept = [each for each in vars(lent[-1].__self__).values() if isinstance(each, torch.Tensor)]
    assert not kept, "memory is kept that other graphs are to compute in"
    assert torch.equal(lent[-1](), (given + 1).t()[1:, ::2]) and lent[-1]().dtype == dtype


def test_memory_is_measured_by_what_is_taken_from_the_device(cuda: RecordedCuda) -> None:
    cuda.reserved = 500  # of another's, kept for later

    def work() -> None:
        cuda.reserved += 30

    assert CudaStream(CPU).peak_bytes(work) == 30
    assert cuda.reserved == 0, "what the work has left counts as free"
    assert not hasattr(cuda, "reset_peak_memory_stats"), "the user's statistics are left alone"


def test_time_is_that_of_the_host_and_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first time compiles; of others the shortest counts, of each of the two."""
    now, given, done = 0.0, [50.0, 3.0, 2.0, 4.0], [60.0, 5.0, 9.0, 6.0]

    class Slow(DeviceStream):
        def mark(self) -> Any:
            def wait() -> None:
                nonlocal now
                now = max(now, ends)

            return wait

    ends, stream = 0.0, Slow()
    monkeypatch.setattr(device_stream.time, "perf_counter", lambda: now)

    def work() -> None:
        nonlocal now, ends
        ends = now + done.pop(0)
        now += given.pop(0)

    assert stream.seconds(work) == (2.0, 5.0) and not given


@pytest.fixture(scope="module")
def served() -> Any:
    model = tiny("llama")
    return model, compile_step_program(model, EngineConfig(compile=False))


@pytest.mark.parametrize("graphs", [True, False])
def test_an_engine_writes_over_no_memory_that_the_device_still_reads(
    cuda: RecordedCuda, served: Any, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, program = served
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)  # which takes a device
    config = EngineConfig(
        compile=False, block_size=4, max_kv_tokens=400, max_requests=3, token_budget=24, cuda_graphs=graphs
    )
    alone = Engine(model, config, program=program)
    engine = Engine(model, config, program=program, stream=CudaStream(CPU))
    chosen = engine._runner._chooser.last
    cuda.kept = [chosen]
    copy = cuda.copy

    def of_the_host(target: torch.Tensor, source: torch.Tensor) -> None:
        if source.untyped_storage().data_ptr() == chosen.untyped_storage().data_ptr():
            cuda.work(f"tokens {len(cuda.before)}", lambda: target.copy_(source))()
        else:
            copy(target, source)

    monkeypatch.setattr(device_stream, "_copy", of_the_host)
    draw, requests = Random(2), []
    for place in range(6):
        prompt = [draw.randrange(model.config.vocab_size) for _ in range(draw.randint(1, 20))]
        asked = {"do_sample": place == 3, "logprobs": place in (2, 4)}  # for which the host chooses
        requests.append(engine.submit(prompt, max_new_tokens=draw.randint(2, 9), **asked))
        for _ in range(draw.randint(0, 3)):
            engine.step()
    while engine.step():
        pass
    for request in requests:
        if not request.params.do_sample:
            assert_same_tokens(model, request.prompt_ids, request.tokens)
        if request.params.logprobs:
            known = alone.score(request.prompt_ids, request.tokens)
            assert request.logprobs == pytest.approx(known, abs=1e-4)
    assert any(name.startswith("copy") for name in cuda.before)
    assert bool(cuda.captures) == graphs
