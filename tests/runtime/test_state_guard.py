"""Signals wait while an engine's state is in the midst of a change: wherever one comes, nothing is lost by it."""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Any

import pytest

from selective_compile import runtime
from selective_compile.runtime import Engine, Request
from selective_compile.runtime.state_guard import StateGuard
from tests.runtime.engine_checks import assert_nothing_left, check, run_until_idle
from tests.runtime.played_stream import PlayedStream
from tests.runtime.simulated import SimulatedProgram, expected_tokens, simulated_engine

OURS = str(Path(runtime.__file__).parent)
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"eos_token_id": list(range(0, 61, 6))},
    {"do_sample": True, "seed": 3},
    {"logprobs": True},
    {"num_return_sequences": 2, "do_sample": True, "seed": 4},
    {"num_beams": 2},
)


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """As in a program that is run from a terminal, whatever runs the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_it_is_heard_when_the_guard_is_free() -> None:
    guard, done = StateGuard(), []
    with pytest.raises(KeyboardInterrupt):
        with guard:
            with guard:
                ctrl_c()
                done.append("within")
            done.append("behind")
    assert done == ["within", "behind"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("listening", [False, True])
def test_it_is_heard_at_once_where_nobody_holds_it(listening: bool) -> None:
    guard, done = StateGuard(), []
    with pytest.raises(KeyboardInterrupt):
        if listening:
            with guard.listening():
                with guard:
                    pass
                ctrl_c()
                done.append("behind")
        else:
            with guard:
                pass
            ctrl_c()
    assert not done


def test_of_a_step_each_part_that_changes_state_ends() -> None:
    guard, done = StateGuard(), []
    with pytest.raises(KeyboardInterrupt), guard.listening():
        with guard:
            ctrl_c()
            done.append("first")
        done.append("between")
    assert done == ["first"]


def test_a_second_one_is_heard_at_once() -> None:
    guard, done = StateGuard(), []
    with pytest.raises(KeyboardInterrupt), guard:
        ctrl_c()
        done.append("first")
        ctrl_c()
        done.append("second")
    assert done == ["first"]
    with guard:  # and is not heard again
        pass


def test_an_error_is_known_by_whoever_hears_it() -> None:
    guard = StateGuard()
    with pytest.raises(KeyboardInterrupt) as raised, guard:
        ctrl_c()
        raise ValueError("of the step")
    assert isinstance(raised.value.__context__, ValueError)


def test_a_handler_of_the_users_gets_it_then() -> None:
    heard: list[tuple[int, bool]] = []
    guard = StateGuard()
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append((number, done)))
    try:
        done = False
        with guard:
            ctrl_c()
            done = True
        assert heard == [(signal.SIGINT, True)]
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_signals_that_end_a_program_wait_too() -> None:
    guard, done = StateGuard(), []
    before = signal.signal(signal.SIGALRM, time_is_up)
    try:
        with pytest.raises(TimeIsUp), guard:
            signal.raise_signal(signal.SIGALRM)
            done.append("within")
        with pytest.raises(KeyboardInterrupt), guard:
            signal.raise_signal(signal.SIGALRM)
            ctrl_c()
            done.append("both")
        assert done == ["within", "both"] and signal.getsignal(signal.SIGALRM) is time_is_up
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("nothing", [signal.SIG_IGN, signal.SIG_DFL])
def test_where_python_does_nothing_it_is_left_so(nothing: signal.Handlers) -> None:
    before = signal.signal(signal.SIGINT, nothing)
    try:
        with StateGuard():
            assert signal.getsignal(signal.SIGINT) == nothing
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_is_set_meanwhile_stays() -> None:
    def other(number: int, frame: FrameType | None) -> None:
        pass

    with StateGuard():
        signal.signal(signal.SIGINT, other)
    assert signal.signal(signal.SIGINT, signal.default_int_handler) is other


def test_other_threads_keep_it_from_nobody() -> None:
    guard, done = StateGuard(), []

    def hold() -> None:
        with guard, guard.listening():
            done.append(signal.getsignal(signal.SIGINT) is signal.default_int_handler)

    thread = Thread(target=hold)
    thread.start()
    thread.join()
    assert done == [True]


def test_a_step_within_a_step_of_another_engine_is_ended_by_both() -> None:
    outer, inner, done = StateGuard(), StateGuard(), []
    with pytest.raises(KeyboardInterrupt), outer:
        with inner:
            ctrl_c()
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]


def test_one_that_was_left_in_the_handlers_place_hands_on_what_it_hears() -> None:
    """As an exception leaves it that comes while it takes or gives back that place; engines come and go since."""
    left, other = StateGuard(), StateGuard()
    left._listen()
    other._listen()
    left._listens = other._listens = False
    for guard in (left, other, StateGuard(), left):
        done = []
        with pytest.raises(KeyboardInterrupt):
            with guard:
                ctrl_c()
                done.append(guard)
        assert done == [guard]
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_one_that_was_left_in_the_handlers_place_gives_it_back_when_it_is_held_again() -> None:
    """Others ask whether it is Python's own, as asyncio does before it cancels a task by it."""
    guard = StateGuard()
    guard._listen()
    guard._listens = False
    for listening in (guard, guard.listening()):
        with listening:
            assert signal.getsignal(signal.SIGINT) == guard._hear
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        guard._listen()
        guard._listens = False
    with guard:
        pass


class Interrupted:
    """Has a signal come at a line of the runtime's, or of other files, the so many'th from now on."""

    def __init__(self, line: int, number: int, others: tuple[str, ...]) -> None:
        self.left = line
        self._number = number
        self._files = (OURS, *others)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        # What the device does is not interrupted, though here it is played in this thread.
        return self._line if file.startswith(self._files) and not file.endswith("device_stream.py") else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        self.left -= event == "line"
        if not self.left:
            sys.settrace(None)
            signal.raise_signal(self._number)
        return self._line


class TimeIsUp(Exception):
    pass


def time_is_up(number: int, frame: FrameType | None) -> None:
    raise TimeIsUp


def interrupted(
    act: Callable[[], object], line: int, number: int = signal.SIGINT, others: tuple[str, ...] = ()
) -> bool:
    before = sys.gettrace()
    sys.settrace(Interrupted(line, number, others))
    try:
        act()
    except (KeyboardInterrupt, TimeIsUp):
        return True
    finally:
        sys.settrace(before)
    return False


def busy_engine(moods: random.Random) -> tuple[Engine, Callable[[], None], list[Request]]:
    """Some of its requests wait, some run; and what submits one more."""
    captured = moods.random() < 0.5
    engine = simulated_engine(
        SimulatedProgram(captured=captured),
        stream=PlayedStream(lambda: moods.choice((0, 0, 1, 9)), captures=captured),
        block_size=2,
        max_kv_tokens=2 * moods.randint(16, 24),
        token_budget=moods.choice([5, 9, 20]),
        max_requests=3,
        overlap=moods.random() < 0.3,
        async_scheduling=moods.random() < 0.8,
    )
    requests: list[Request] = []

    def submit() -> None:
        prompt = [moods.randint(0, 2) for _ in range(moods.randint(1, 9))]
        new, kind = moods.choice([1, 2, 5]), moods.choice(KINDS)
        requests.extend(engine.submit(prompt, max_new_tokens=new, **kind).samples)

    for _ in range(4):
        submit()
    for _ in range(moods.randint(0, 4)):
        engine.step()
    return engine, submit, requests


def trial(act: str, seed: int, number: int) -> None:
    moods = random.Random(seed)
    engine, submit, requests = busy_engine(moods)
    acts = {"step": engine.step, "submit": submit, "cancel": requests[0].cancel}
    interrupted(acts[act], moods.randint(1, 900 if act == "step" else 250), number)
    assert set(engine._requests) <= set(requests), "nobody could cancel them"
    for _ in range(2):
        submit()
    while engine.step():
        check(engine)
    run_until_idle(engine)
    assert_nothing_left(engine)
    for request in requests:
        assert request.finished, request
        if request.finish_reason in ("stop", "length") and request.params.beams is None:
            assert request.tokens == expected_tokens(request.prompt_ids, request.params), request


@pytest.mark.parametrize(
    ("act", "number"),
    [
        *[("step", signal.SIGINT)] * 3,
        *(("submit", signal.SIGINT), ("cancel", signal.SIGINT)),
        *(("step", signal.SIGALRM), ("submit", signal.SIGALRM)),
    ],
)
def test_wherever_it_comes_all_requests_end_and_the_engine_goes_on(
    act: str, number: int, request: pytest.FixtureRequest
) -> None:
    before = signal.signal(signal.SIGALRM, time_is_up)
    first = 100 * request.node.callspec.indices["act"]
    for seed in range(first, first + 100):
        trial(act, seed, number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("samples", [1, 3])
def test_one_that_comes_while_requests_enter_leaves_none_of_them(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = simulated_engine()
    enter = engine._roster.enter

    def entering(*requests: Any, **device: Any) -> None:
        ctrl_c()
        enter(*requests, **device)

    monkeypatch.setattr(engine._roster, "enter", entering)
    with pytest.raises(KeyboardInterrupt):
        engine.submit([1, 2], max_new_tokens=3, do_sample=True, num_return_sequences=samples)
    assert_nothing_left(engine)
    assert engine.stats().ended == {"cancelled": samples}


def leave(number: int, frame: FrameType | None) -> None:
    sys.exit(7)


@pytest.mark.parametrize("own", [False, True])
def test_what_a_handler_raises_in_a_requests_own_code_is_not_the_requests(own: bool) -> None:
    """As a server is told to end, while a processor runs."""

    def processor(ids: Any, scores: Any) -> Any:
        if own:
            sys.exit(7)
        signal.raise_signal(signal.SIGTERM)
        return scores

    before = signal.signal(signal.SIGTERM, leave)
    engine = simulated_engine()
    request = engine.submit([1, 2], max_new_tokens=3, logits_processor=[processor])
    try:
        with contextlib.ExitStack() as stack:
            if not own:
                stack.enter_context(pytest.raises(SystemExit))
            run_until_idle(engine)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert request.finish_reason == "error"
    assert engine.submit([1, 2], max_new_tokens=2).result().finish_reason == "length"
    assert_nothing_left(engine)


def test_wherever_it_comes_the_background_thread_is_stopped_and_can_be_started_again() -> None:
    """Between two lines of `contextlib`, too."""
    lines = 0

    def act() -> None:
        with engine.running():
            pass

    engine = simulated_engine()
    while lines < 1000:
        request = engine.submit([1, 2], max_new_tokens=2)
        lines += 1
        if not interrupted(act, lines, others=(contextlib.__file__,)):
            break
        assert not engine.driven, lines
        assert list(request.result().tokens) == expected_tokens(request.prompt_ids, request.params), lines
        with engine.running():
            assert engine.driven and engine.submit([2, 1], max_new_tokens=2).result().tokens
    assert 80 < lines < 1000
    assert [thread for thread in threading.enumerate() if thread.name == "selective-compile"] == []
    signal.signal(signal.SIGINT, signal.default_int_handler)
