"""The estimate of a step's time from those before it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selective_compile.runtime.step_times import StepTimes


def test_nothing_is_known_before_the_first_step() -> None:
    assert StepTimes().predict(5) is None


def test_a_line_is_found() -> None:
    times = StepTimes()
    for tokens in (1, 64, 8, 512, 3):
        times.observe(tokens, 0.01 + 0.001 * tokens)
    assert times.predict(100) == pytest.approx(0.11)
    assert times.predict(1) == pytest.approx(0.011)


def test_steps_of_one_size_say_nothing_of_others() -> None:
    times = StepTimes()
    for _ in range(3):
        times.observe(32, 0.5)
    assert times.predict(1) == times.predict(1000) == pytest.approx(0.5)


def test_a_machine_that_has_become_slower_is_noticed() -> None:
    times = StepTimes()
    for seconds in (0.1, 1.0):
        for step in range(400):
            times.observe(1 + step % 7, seconds)
    assert times.predict(4) == pytest.approx(1.0, rel=0.05)


@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(1e-6, 100)), min_size=1, max_size=50))
def test_never_negative_and_never_less_for_more(steps: list[tuple[int, float]]) -> None:
    times = StepTimes()
    for tokens, seconds in steps:
        times.observe(tokens, seconds)
    predicted = [times.predict(tokens) or 0.0 for tokens in (1, 10, 100, 1000, 10_000)]
    assert predicted[0] >= -1e-9 * max(seconds for _, seconds in steps)
    assert predicted == sorted(predicted)
