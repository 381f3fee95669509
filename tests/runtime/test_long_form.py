"""States of requests that grow into a model's long form, and the positions of their tokens."""

from __future__ import annotations

import pytest

from selective_compile.runtime.batch import marked_positions
from selective_compile.runtime.block_names import block_names
from selective_compile.runtime.request_state import NEVER, RequestState
from selective_compile.step import GENERATED, LONG, LongForm
from tests.runtime.engine_checks import run_until_idle
from tests.runtime.simulated import SimulatedProgram, expected_tokens, simulated_engine

ANEW, GOES_ON = LongForm(beyond=4, anew=True), LongForm(beyond=4, anew=False)


def state_of(length: int, form: LongForm | None, **options: bool) -> RequestState:
    return RequestState("a", 0, range(length), max_new_tokens=9, long_form=form, **options)


@pytest.mark.parametrize(
    ("length", "form", "use_cache", "long_from", "long_beyond"),
    [
        (3, None, True, NEVER, NEVER),
        (4, ANEW, True, NEVER, 4),
        (5, ANEW, True, 0, NEVER),
        (4, GOES_ON, True, 4, NEVER),
        (5, GOES_ON, True, 0, NEVER),
        (4, GOES_ON, False, NEVER, 4),
    ],
)
def test_the_form_of_a_prompt(
    length: int, form: LongForm | None, use_cache: bool, long_from: int, long_beyond: int
) -> None:
    state = state_of(length, form, use_cache=use_cache)
    assert (state.long_from, state.long_beyond, state.outgrown) == (long_from, long_beyond, False)


def test_a_token_that_does_not_come_takes_the_form_back() -> None:
    state = state_of(4, ANEW)
    short = list(block_names(state, 2, 2))
    state.expect()
    assert state.outgrown
    state.choose_form()
    assert (state.long_from, state.outgrown) == (0, False)
    assert block_names(state, 2, 2) != short
    state.settle()
    assert (state.long_from, state.long_beyond) == (NEVER, 4)
    assert block_names(state, 2, 2) == short


def test_positions_are_marked_from_where_the_form_begins() -> None:
    states = [state_of(4, GOES_ON), state_of(5, GOES_ON), state_of(4, None), state_of(3, GOES_ON), state_of(1, None)]
    found = marked_positions(states, [range(2, 6), range(0, 2), range(3, 5), range(2, 5), range(1)])
    long, generated = LONG, GENERATED
    assert list(found[:6]) == [2, 3, long + generated + 4, long + generated + 5, long, long + 1]
    assert list(found[6:]) == [3, generated + 4, 2, generated + 3, long + generated + 4, 0]


def test_without_a_cache_every_step_computes_all_as_a_prompt() -> None:
    assert list(marked_positions([state_of(2, None, use_cache=False)], [range(4)])) == [0, 1, 2, 3]


@pytest.mark.parametrize("form", [ANEW, GOES_ON])
@pytest.mark.parametrize("batching", ["inflight_fused", "inflight", "static"])
def test_one_that_runs_alone_begins_anew_at_once(form: LongForm, batching: str) -> None:
    program = SimulatedProgram(long_form=form)
    engine = simulated_engine(program, batching=batching, block_size=2, max_kv_tokens=12)
    request = engine.submit([1, 2, 3], max_new_tokens=6)
    run_until_idle(engine)
    assert request.tokens == expected_tokens([1, 2, 3], request.params, program=program)
    stats = engine.stats()
    assert (stats.steps, stats.preemptions) == (6, int(form.anew))
