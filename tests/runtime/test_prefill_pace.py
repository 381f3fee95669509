"""Chunks of prompts beside requests that decode, on machines of our making."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from selective_compile.runtime.prefill_pace import FIRST_CHUNK, REMEASURED, PrefillPace

DECODING, PROMPT, BUDGET = 32, 4000, 512


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Seconds: of a step without prompts, and what a chunk adds, itself and each of its tokens, at the prompt's end."""

    alone: float
    chunk: float
    token: float
    pair: float

    def added(self, tokens: int, before: int) -> float:
        return self.chunk * before / PROMPT + tokens * (self.token + self.pair * before) if tokens else 0.0

    def fewest_steps(self, slowdown: float) -> int:
        """Had one known what everything costs."""
        done, steps = 0, 0
        while done < PROMPT:
            left = (slowdown - 1) * self.alone - self.chunk * done / PROMPT
            done += min(BUDGET, max(1, int(left / (self.token + self.pair * done))))
            steps += 1
        return steps


machines = st.builds(
    Machine,
    alone=st.floats(0.01, 0.1),
    chunk=st.floats(0, 0.003),
    token=st.floats(1e-4, 1e-3),
    pair=st.floats(0, 1e-7),
)


@settings(max_examples=30, deadline=None)
@given(machine=machines, slowdown=st.floats(1.4, 3.0))
def test_steps_are_bounded_and_not_many_more_than_needed(machine: Machine, slowdown: float) -> None:
    pace = PrefillPace(slowdown)
    done = steps = 0
    while done < PROMPT:
        tokens = min(pace.budget(DECODING), BUDGET, PROMPT - done)
        seconds = machine.alone + machine.added(tokens, done)
        first = not done or tokens == 1  # nothing is known yet; or as few as there can be
        assert first or seconds <= 1.2 * slowdown * machine.alone, (tokens, done)
        pace.observe(decoded=DECODING, prefilled=tokens, seconds=seconds)
        done, steps = done + tokens, steps + 1
    assert steps <= 1.6 * machine.fewest_steps(slowdown) + 12


def test_a_step_without_prompts_is_measured_first_and_again() -> None:
    pace = PrefillPace(2.0)
    assert pace.budget(DECODING) == 0
    pace.observe(decoded=DECODING, prefilled=0, seconds=0.01)
    assert pace.budget(DECODING) == FIRST_CHUNK
    for _ in range(REMEASURED):
        tokens = pace.budget(DECODING)
        assert tokens
        pace.observe(decoded=DECODING, prefilled=tokens, seconds=0.01 + 0.0005 * tokens)
    assert pace.budget(DECODING) == 0


def test_prompts_by_themselves_say_nothing_of_steps_beside_others() -> None:
    pace = PrefillPace(2.0)
    pace.observe(decoded=0, prefilled=512, seconds=5.0)
    pace.observe(decoded=DECODING, prefilled=0, seconds=0.01)
    assert pace.budget(DECODING) == FIRST_CHUNK


def test_prompts_get_on_however_slow_they_are() -> None:
    pace = PrefillPace(1.1)
    pace.observe(decoded=DECODING, prefilled=0, seconds=0.01)
    for _ in range(20):
        pace.observe(decoded=DECODING, prefilled=max(1, pace.budget(DECODING)), seconds=1.0)
        assert pace.budget(DECODING) >= 1
