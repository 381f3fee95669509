"""Where the host waits for a device that is ahead of it: once in a decode step, for what was copied to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from tests.runtime.engine_checks import EndsAt, expect, run_until_idle
from tests.runtime.simulated import simulated_engine
from tests.runtime.watched_stream import Kernels, WatchedStream

CHOSEN_ON_DEVICE: tuple[dict[str, Any], ...] = (
    {},
    {"do_sample": True, "seed": 3, "top_k": 5, "top_p": 0.8, "min_p": 0.01, "temperature": 1.5},
    {"repetition_penalty": 1.5},
    {"min_new_tokens": 10, "eos_token_id": 6},  # which may come from a step on that is looked at
    {"suppress_tokens": [5, 6], "begin_suppress_tokens": [7], "do_sample": True, "seed": 4},
    {"stopping_criteria": [EndsAt([])]},
)


READING: dict[str, Callable[[Tensor], object]] = {
    "int": lambda last: int(last[0]),
    "tolist": lambda last: last.tolist(),
    "numpy": lambda last: np.asarray(last),
    "nonzero": lambda last: last.nonzero(),
    "booleans": lambda last: last[last > 3],
    "put by booleans": lambda last: last.__setitem__(last < -9, 0),
}


@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize(
    ("place", "sabotage"),
    [(None, None), *(("launch", name) for name in ("int", "tolist", "numpy")), *(("choose", name) for name in READING)],
)
def test_a_decode_step_waits_for_the_device_once_and_reads_what_was_copied_alone(
    captures: bool, place: str | None, sabotage: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any other read would wait for the device, the host's and one in the work that the device is given; that one is
    found out is shown by reads that are put behind the launch, and into the choice."""
    stream = WatchedStream(captures=captures)
    with stream.built():
        engine = simulated_engine(Kernels(stream, captured=captures), stream=stream, max_requests=8)
    requests = [engine.submit([1, 2, 3 + n], max_new_tokens=30, **each) for n, each in enumerate(CHOSEN_ON_DEVICE)]
    for _ in range(5):
        engine.step()
    runner = engine._runner
    if place and sabotage:
        owner: Any = {"launch": runner, "choose": runner._chooser}[place]
        original = getattr(owner, place)

        def reading(*arguments: Any) -> Any:
            found = original(*arguments)
            READING[str(sabotage)](runner._chooser.last)
            return found

        monkeypatch.setattr(owner, place, reading)
    before, replayed = stream.waits, stream.replayed
    with stream.watched():
        for _ in range(10):
            engine.step()
    assert stream.waits == before + 10
    assert (stream.replayed == replayed + 10) == captures
    assert bool(stream.reads) == bool(sabotage), stream.reads
    run_until_idle(engine)
    for request in requests:
        expect(request)


@pytest.mark.parametrize("captures", [False, True])
def test_nobody_waits_for_what_is_sent_of_requests_that_come(captures: bool) -> None:
    """Their block tables, their marks, and their prompts beside others that decode."""
    stream = WatchedStream(captures=captures)
    with stream.built():
        engine = simulated_engine(Kernels(stream, captured=captures), stream=stream, max_requests=8, block_size=2)
    if captures:
        engine.warm_up()  # a capture waits for all
    requests = [engine.submit([7, 2, 3], max_new_tokens=20)]
    for _ in range(3):
        engine.step()
    for place, each in enumerate(CHOSEN_ON_DEVICE):
        requests.append(engine.submit([1, 2, 3 + place], max_new_tokens=15, **each))
        with stream.watched():
            for _ in range(2):
                engine.step()
    assert not stream.reads
    run_until_idle(engine)
    for request in requests:
        expect(request)
