"""Where a start's time goes, as the GPU benchmark sees it."""

from __future__ import annotations

import json
import statistics
import threading
import time

import pytest

from benchmarks.gpu_parts.whereabouts import Whereabouts


def in_the_statistics_module(seconds: float) -> None:
    """Calls what is not this project's, which waits there."""
    statistics.median([_Slow(seconds), _Slow(seconds)])


class _Slow(float):
    def __add__(self, other: float) -> float:
        time.sleep(float(self))
        return 0.0


def in_json(until: float) -> None:
    while time.perf_counter() < until:
        json.loads(json.dumps(list(range(1000))), parse_int=float)


def test_it_tells_how_long_each_function_of_the_project_took_and_whose_code_it_ran() -> None:
    where = Whereabouts()
    in_the_statistics_module(0.4)
    in_json(time.perf_counter() + 0.2)
    found = where.longest()
    first, second = list(found)[:2]
    assert first.endswith("test_gpu_whereabouts.__add__") and found[first] == pytest.approx(0.4, rel=0.3)
    assert "test_gpu_whereabouts.in_json" in second
    assert sum(found.values()) == pytest.approx(0.6, rel=0.3)
    assert where.in_words().splitlines()[0].endswith(first)
    assert len(where.longest(1)) == 1


def test_what_others_run_is_theirs() -> None:
    where = Whereabouts()
    threading.Thread(target=in_json, args=(time.perf_counter() + 0.3,)).start()
    time.sleep(0.4)
    assert not any("in_json" in place for place in where.longest())


def test_it_ends_with_the_thread_that_it_looks_at() -> None:
    before = threading.active_count()
    thread = threading.Thread(target=Whereabouts)
    thread.start()
    thread.join()
    deadline = time.perf_counter() + 5
    while threading.active_count() > before and time.perf_counter() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before
