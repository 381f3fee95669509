"""Ctrl-C waits while an engine's state is in the midst of a change: wherever it comes, nothing is lost by it."""

from __future__ import annotations

import random
import signal
import sys
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


class Interrupted:
    """Has a SIGINT come at a line of the runtime's, the so many'th from now on."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        # What the device does is not interrupted, though here it is played in this thread.
        return self._line if file.startswith(OURS) and not file.endswith("device_stream.py") else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        self.left -= event == "line"
        if not self.left:
            sys.settrace(None)
            ctrl_c()
        return self._line


def interrupted(act: Callable[[], object], line: int) -> bool:
    before = sys.gettrace()
    sys.settrace(Interrupted(line))
    try:
        act()
    except KeyboardInterrupt:
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


def trial(act: str, seed: int) -> None:
    moods = random.Random(seed)
    engine, submit, requests = busy_engine(moods)
    acts = {"step": engine.step, "submit": submit, "cancel": requests[0].cancel}
    interrupted(acts[act], moods.randint(1, 900 if act == "step" else 250))
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


@pytest.mark.parametrize("act", ["step", "step", "step", "submit", "cancel"])
def test_wherever_it_comes_all_requests_end_and_the_engine_goes_on(act: str, request: pytest.FixtureRequest) -> None:
    first = 100 * request.node.callspec.indices["act"]
    for seed in range(first, first + 100):
        trial(act, seed)
    signal.signal(signal.SIGINT, signal.default_int_handler)
