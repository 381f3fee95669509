"""Several engines behind one request processor: who serves whom, and the same tokens whoever does."""

from __future__ import annotations

import threading
from typing import Any, get_args

import numpy as np
import pytest

from selective_compile.runtime import Engine, Request
from selective_compile.runtime.request_processor import IMBALANCE, RequestProcessor, Routing
from tests.runtime.simulated import SimulatedProgram, expected_tokens, simulated_engine

BLOCK = 4


def processor(count: int, routing: Routing, **config: Any) -> RequestProcessor:
    program = SimulatedProgram()
    return RequestProcessor(
        [simulated_engine(program, block_size=BLOCK, **config) for _ in range(count)], routing=routing
    )


def run(several: RequestProcessor, *requests: Request) -> None:
    while several.step():
        pass
    for request in requests:
        assert request.tokens == expected_tokens(request.prompt_ids, request.params), request


def place(several: RequestProcessor, request: Request) -> int:
    return several.engines.index(several.engine_of(request))


@pytest.mark.parametrize("routing", get_args(Routing))
def test_every_request_ends_once_with_its_own_tokens(routing: Routing) -> None:
    several = processor(3, routing, max_kv_tokens=96, max_requests=3)
    requests = [
        several.submit([n % 4] * (5 + n), request_id=f"r{n}", max_new_tokens=9, do_sample=n % 2 == 1) for n in range(20)
    ]
    run(several, *requests)
    alone = simulated_engine(block_size=BLOCK)
    for request in requests:
        again = alone.submit(
            request.prompt_ids, request_id=request.request_id, max_new_tokens=9, do_sample=request.params.do_sample
        )
        assert list(again.result().tokens) == request.tokens
    assert sum(stats.tokens_generated for stats in several.stats()) == 20 * 9
    assert all(stats.blocks_used == stats.running == stats.waiting == 0 for stats in several.stats())


def test_round_robin() -> None:
    several = processor(3, "round_robin")
    assert [place(several, several.submit([1])) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_it_shows_what_there_is_to_do() -> None:
    several = processor(3, "round_robin", max_requests=1)
    assert repr(several) == "RequestProcessor(3 engines, 'round_robin', 0 running, 0 waiting)"
    requests = [several.submit([1], max_new_tokens=4) for _ in range(5)]
    several.step()
    assert repr(several) == "RequestProcessor(3 engines, 'round_robin', 3 running, 2 waiting)"
    run(several, *requests)


def test_least_loaded_counts_tokens_that_are_to_come() -> None:
    several = processor(2, "least_loaded")
    long = several.submit([1] * 40, max_new_tokens=40)
    short = [several.submit([2], max_new_tokens=10) for _ in range(4)]
    assert [place(several, request) for request in (long, *short)] == [0, 1, 1, 1, 1]
    while len(long.tokens) < 38:  # by then it has little left to do
        several.step()
    others = [several.submit([3] * 8, max_new_tokens=8) for _ in range(2)]
    assert [place(several, request) for request in others] == [1, 0]


def test_a_prefix_goes_to_who_has_it() -> None:
    several = processor(3, "prefix_aware")
    systems = [[n] * 20 for n in range(3)]
    first = [several.submit(system, max_new_tokens=4) for system in systems]
    assert [place(several, request) for request in first] == [0, 1, 2]
    run(several, *first)
    for n in (2, 0, 1, 1):
        request = several.submit([*systems[n], 9, 9], max_new_tokens=4)
        assert place(several, request) == n
        run(several, request)
    assert sum(stats.tokens_reused for stats in several.stats()) == 4 * 20


def test_a_tenant_does_not_follow_the_prefix_of_another() -> None:
    several = processor(2, "prefix_aware")
    run(several, several.submit([1] * 20, cache_salt="a", max_new_tokens=1))
    busy = several.submit([5], max_new_tokens=5)
    assert place(several, busy) == 0
    assert place(several, several.submit([1] * 20, cache_salt="b", max_new_tokens=1)) == 1
    assert place(several, several.submit([1] * 20, cache_salt="a", max_new_tokens=1)) == 0


def test_one_prefix_does_not_keep_the_others_idle() -> None:
    several = processor(2, "prefix_aware")
    requests = [several.submit([1] * 20, max_new_tokens=2) for _ in range(4 * IMBALANCE)]
    counts = [sum(place(several, request) == n for request in requests) for n in range(2)]
    assert abs(counts[0] - counts[1]) <= IMBALANCE + 1
    run(several, *requests)


def test_an_id_is_taken_in_all_engines_and_free_again_after() -> None:
    several = processor(2, "round_robin")
    first = several.submit([1], request_id="a", max_new_tokens=3)
    with pytest.raises(ValueError, match="request_id must not be that of an unfinished request, got 'a'"):
        several.submit([1], request_id="a")
    several.submit([1], request_id="request-2")
    made_up = [several.submit([1]).request_id for _ in range(2)]
    assert len({*made_up, "request-2"}) == 3
    run(several, first)
    assert several.submit([1], request_id="a", max_new_tokens=3).request_id == "a"


def test_an_id_of_numpy_is_the_integer() -> None:
    several = processor(2, "round_robin")
    request = several.submit([1], request_id=np.int64(7), max_new_tokens=2)  # type: ignore[arg-type]
    alone = several.engines[1].submit([1], request_id=np.int64(7), max_new_tokens=2)  # type: ignore[arg-type]
    assert type(request.request_id) is type(alone.request_id) is int
    with pytest.raises(ValueError, match="request_id must not be that of an unfinished request, got 7"):
        several.submit([1], request_id=7)
    run(several, request)


def test_what_is_refused_takes_no_place() -> None:
    several = processor(2, "round_robin")
    with pytest.raises(ValueError, match="max_new_tokens must be"):
        several.submit([1], request_id="a", max_new_tokens=0)
    with pytest.raises(ValueError, match="cache_salt must be a string or None, got 5"):
        several.submit([1], cache_salt=5)  # type: ignore[arg-type]
    request = several.submit([1], request_id="a", max_new_tokens=2)
    assert place(several, request) == 0
    run(several, request)


def test_background_threads_of_all_engines() -> None:
    several, before = processor(3, "least_loaded"), threading.enumerate()
    with several.running():
        requests = [several.submit([n], max_new_tokens=12) for n in range(12)]
        results = [request.result(timeout=60) for request in requests]
        names = [thread.name for thread in threading.enumerate() if thread not in before]
        assert len(names) == 3 and all(name.startswith("selective-compile") for name in names)
    assert all(result.finish_reason == "length" for result in results)
    assert not any(engine.driven for engine in several.engines)


def test_wrong_engines() -> None:
    engine: Engine = simulated_engine()
    for engines, message in (
        ([], "engines must be at least one"),
        ([engine, engine], "each a different one"),
        ([engine, simulated_engine(block_size=2)], "one vocabulary size, block size and seed"),
        ([engine, simulated_engine(seed=2)], "one vocabulary size, block size and seed"),
    ):
        with pytest.raises(ValueError, match=message):
            RequestProcessor(engines)
    with pytest.raises(ValueError, match="routing must be one of .*, got 'random'"):
        RequestProcessor([engine], routing="random")  # type: ignore[arg-type]


def test_samples_have_ids_that_no_engine_has_otherwise() -> None:
    several = processor(2, "round_robin")
    sampled: dict[str, Any] = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 4}
    first = several.submit([1, 2, 3], request_id="a", **sampled)
    assert [place(several, sample) for sample in first.samples] == [0, 0, 0]
    with pytest.raises(ValueError, match="request_id must not be that of an unfinished request, got 'a/2'"):
        several.submit([1], request_id="a/2")
    other = several.submit([1, 2], request_id="b/1", max_new_tokens=4)
    assert place(several, other) == 1
    with pytest.raises(ValueError, match="request_id must not be that of an unfinished request, got 'b/1'"):
        several.submit([1], request_id="b", **sampled)
    run(several, *first.samples, other)
    assert all(stats.blocks_used == stats.running == stats.waiting == 0 for stats in several.stats())


def test_made_up_ids_are_free_in_engines_that_others_use_too() -> None:
    engines = [simulated_engine(), simulated_engine()]
    processor = RequestProcessor(engines)
    theirs = engines[0].submit([1], max_new_tokens=3)
    scored = engines[1].submit([1], max_new_tokens=3)
    own = [processor.submit([2], max_new_tokens=3) for _ in range(3)]
    while processor.step():
        pass
    assert all(len(request.tokens) == 3 for request in (theirs, scored, *own))
