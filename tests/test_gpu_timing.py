"""The clocks and the ceilings that a run on a GPU measures by."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_parts import (
    ceilings,
    decoding,
    launches,
    steps_profiled,
    timing,
)
from benchmarks.gpu_parts import found as found_so_far
from benchmarks.gpu_parts.floors import Ceilings
from benchmarks.gpu_parts.jobs import Context, perform
from benchmarks.gpu_parts.rows import Row
from tests.gpu_job import a_job

CPU = torch.device("cpu")


class HostEvent:
    """Stands for `torch.cuda.Event`."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.moment = time.perf_counter()

    def elapsed_time(self, other: HostEvent) -> float:
        return 1e3 * (other.moment - self.moment)


def test_the_span_of_a_step_is_that_of_the_models_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", HostEvent)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    share = SimpleNamespace(start=11, tokens=1)
    records: list[Any] = []

    class Runner:
        def run(self, inputs: int) -> None:
            time.sleep(0.01)

    class Engine:
        _runner = Runner()

        def step(self) -> None:
            time.sleep(0.02)
            self._runner.run(1)
            records.append(SimpleNamespace(shares=[share] * len(records)))

    found = decoding.decoded(Engine(), records, 3)  # type: ignore[arg-type]
    assert found.span is not None and 0.01 <= found.span <= found.wall - 0.02
    assert 0.03 <= found.quartiles[0] <= found.wall <= found.quartiles[1]
    assert found.contexts == (12,) and "run" not in vars(Engine._runner)


class CountedEvent:
    """Knows how many calls there were when it was recorded, and of them which were to the cache."""

    calls: list[str] = []
    captures = True

    def __init__(self, *, enable_timing: bool, external: bool = False) -> None:
        assert enable_timing
        if external and not self.captures:
            raise RuntimeError("operation not permitted when stream is capturing")

    def record(self) -> None:
        self.moment = len(self.calls)

    def elapsed_time(self, other: CountedEvent) -> float:
        between = self.calls[self.moment : other.moment]
        assert between in (["call"], []), "the cache is overwritten outside of the events"
        return 5.0 if between else 0.5


@pytest.mark.parametrize("captures", [True, False])
def test_kernels_are_timed_in_a_graph_or_else_between_events(captures: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    replays: list[int] = []
    monkeypatch.setattr(CountedEvent, "calls", calls)
    monkeypatch.setattr(CountedEvent, "captures", captures)
    monkeypatch.setattr(torch.cuda, "Event", CountedEvent)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: replays.append(1)))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **how: contextlib.nullcontext())
    for name in ("synchronize", "current_stream", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *which: None)
    timer = timing.Timer(CPU)
    assert timer.seconds(lambda: None, 2) >= 0 and timer.how == "host"
    timer._flush = lambda: calls.append("flush")
    assert timer.seconds(lambda: calls.append("call"), 4) == 5e-3
    assert calls == ["call"] * 2 + ["flush", "call"] * 4 + ["flush"] * 4, "and the clock itself, by the same way"
    how, replayed = ("graph", 4) if captures else ("events", 0)
    assert (timer.how, len(replays)) == (how, replayed)
    about = {"timed_by": how, "quartile_microseconds": [5e3, 5e3], "clock_microseconds": 500.0}
    assert timer.about() == about and timer.about("apart_") == {f"apart_{name}": about[name] for name in about}
    assert timer.seconds(lambda: calls.append("call"), 4) == 5e-3 and len(replays) == replayed * 3 // 2, "once"
    assert timer.seconds(lambda: calls.append("call"), 4, launched=True) == 5e-3 and timer.how == "events"
    assert len(replays) == replayed * 3 // 2, "what is to be launched is not captured"


def test_quartiles_are_of_the_repeats() -> None:
    assert timing.quartiles([1.0, 9.0, 2.0, 3.0, 4.0]) == (2.0, 4.0)


def test_two_that_are_timed_side_by_side() -> None:
    times = iter([2e-6, 3e-6])
    timer: Any = SimpleNamespace(seconds=lambda call, repeats: next(times), about=lambda whose: {f"{whose}how": 1})
    found = timing.beside(timer, print, print, 1)
    assert found == pytest.approx({"microseconds": 2, "how": 1, "apart_microseconds": 3, "apart_how": 1})


class Seen(TorchDispatchMode):
    """Operators called inside, each with the bytes of its first argument."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func.overloadpacket.__name__, args[0].untyped_storage().nbytes()))
        return func(*args, **kwargs or {})


def test_what_overwrites_the_cache_reads_it_full_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "FLUSHED", 2**16)
    monkeypatch.setattr(timing, "READ", 2**14)
    flush = timing.flush_of(CPU)
    with Seen() as seen:
        flush()
    assert seen.calls == [("zero_", 2**16), ("sum", 2**14)]


@pytest.mark.parametrize("fastest", ["copy_ in a graph", "copy_ launched", "a kernel in a graph"])
def test_the_copy_is_of_random_bytes_in_the_fastest_way(fastest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Tensor] = []
    ways: list[bool] = []

    def seconds(call: Any, repeats: int, *, launched: bool) -> float:
        found.append(call().view(torch.uint8))
        ways.append(launched)
        return 0.25 if list(all_ways)[len(found) - 1] == fastest else 0.5

    all_ways = ceilings.ways_to_copy(torch.zeros(4), torch.zeros(4))
    timer: Any = SimpleNamespace(seconds=seconds, about=lambda: {"number": len(found)})
    best = ceilings.best_copy(Context(a_job(), print), timer)
    assert best.way == fastest and best.rate == 8 * found[0].nbytes == best.rates[fastest] == max(best.rates.values())
    assert list(best.rates) == list(all_ways) and best.about == {"number": 1 + list(all_ways).index(fastest)}
    assert ways == [False, True, False] and all(len(each.unique()) == 256 for each in found)


def test_every_way_to_copy_copies_all() -> None:
    source = torch.randint(256, (4096,), dtype=torch.uint8)
    for copy, _ in ceilings.ways_to_copy(source, target := torch.zeros_like(source)).values():
        target.zero_()
        copy()
        assert torch.equal(source, target)


def test_ceilings_at_the_end_are_told_beside_those_of_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "best_copy", lambda *what: ceilings.Copied("copy_", 2e12, {}, {"copy_": 2e12}))
    monkeypatch.setattr(ceilings, "product_rate", lambda *what: 9e14)
    monkeypatch.setattr(timing.Timer, "about", lambda timer: {})
    monkeypatch.setattr(launches, "tell", lambda *what: None)
    rows: list[Row] = []
    for part, first in (("ceilings", None), ("drift", Ceilings(4e12, 6e14))):
        perform(a_job(part=part, name=part, ceilings=first), rows.append)
    assert [row.figures.get("over_first") for row in rows] == [None, None, 0.5, 1.5]
    found = found_so_far.Found(None, dry_run=False, quick=False)
    for row in rows[:2] + [replace(row, figures={**row.figures, "bytes_per_second": 1.0}) for row in rows[2:]]:
        found.tell(row)
    assert found.ceilings == (2e12, 9e14), "those of the beginning"


def test_idle_is_of_one_window_by_one_clock() -> None:
    found = steps_profiled.idle_of([(100.0, 140.0), (130.0, 150.0), (160.0, 200.0)], wall=200e-6)
    assert found is not None and found.share == pytest.approx(0.1)
    assert found.by_host == pytest.approx(0.55) and found.resolution == pytest.approx(0.03)
    assert steps_profiled.idle_of([], 1.0) is None


def test_a_graph_alone_is_replayed_back_to_back(monkeypatch: pytest.MonkeyPatch) -> None:
    replays: list[int] = []

    class Event(HostEvent):
        def record(self) -> None:
            self.moment = 7.0 * len(replays)

    engine: Any = SimpleNamespace(captured_step=lambda: replays.append(1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert decoding.replayed(engine, 3) is None and not replays, "no device"
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    alone = decoding.replayed(engine, 3)
    assert alone == pytest.approx((7.0,) * 3) and len(replays) == 1 + 3 * decoding.LAST, "the first is not timed"
    engine.captured_step = None
    assert decoding.replayed(engine, 3) is None
