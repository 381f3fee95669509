"""The trace of the GPU benchmark: what is served for how long, and when a peer goes on."""

from __future__ import annotations

from functools import reduce
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu_parts import trace
from benchmarks.gpu_parts.jobs import Context
from benchmarks.gpu_parts.rows import Row
from selective_compile.bench.trace import Trace
from tests.gpu_job import a_job

WHOLE = trace.uniform_trace(20, (100, 1024), 9)


def served(name: str, took: Any, monkeypatch: pytest.MonkeyPatch, requests: int = 16) -> tuple[list[Row], list[Trace]]:
    """The rows of one that takes `took(trace, times)` for a trace that it has served so many times before, and what it
    was asked for, behind what warms up; it has 60 s, which do not pass."""
    asked: list[Trace] = []

    def serve(of: Trace) -> trace.Took:
        asked.append(of)
        return trace.Took(0.0, 0.0) if len(asked) == 1 else took(of, asked.count(of) - 1)

    play_a_peer(monkeypatch, name, lambda *what: ((lambda: "none"), serve))
    rows: list[Row] = []
    trace.run(Context(a_job(part="trace", name=name, requests=requests), rows.append))
    return rows, asked[1:]


def test_samples_are_like_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of all its requests, with an eighth of both prompts and outputs, the other of an eighth of them."""
    monkeypatch.setattr(trace, "uniform_trace", lambda *what, **how: WHOLE)
    _, (short, sample, whole) = served("generate", lambda of, times: trace.Took(0.1, 0.0), monkeypatch)
    assert whole is WHOLE and sample.requests == WHOLE.requests[::8] and len(sample.requests) == 3
    assert [len(one.prompt_ids) for one in short.requests] == [-(-len(one.prompt_ids) // 8) for one in WHOLE.requests]
    assert [one.new_tokens for one in short.requests] == [-(-one.new_tokens // 8) for one in WHOLE.requests]


def test_the_engine_serves_the_trace_first_and_samples_in_what_time_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = served("engine", lambda of, times: trace.Took(2.0 - times, 0.5), monkeypatch)
    assert [row.name for row in rows] == [
        "engine, a short sample",
        "engine, the trace",
        "engine, a sample",
        "engine, a short sample, again",
    ]
    assert rows[-1].figures["seconds"] == 1.0 and rows[-1].figures["again"] and not rows[0].figures["again"]


def test_the_engine_serves_the_trace_however_long_it_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no sample for which there is no time then, as it would be here if these seconds passed."""
    rows, _ = served("engine", lambda of, times: trace.Took(100.0, 1.0), monkeypatch)
    assert [(row.name, row.state) for row in rows] == [
        ("engine, a short sample", "measured"),
        ("engine, the trace", "measured"),
        ("engine, a sample", "skipped"),
        ("engine, a short sample, again", "measured"),
    ]
    assert "takes" in rows[2].text and "60 s are left" in rows[2].text


@pytest.mark.parametrize(
    ("first", "then", "of_sample", "expected"),
    [
        (1.0, 1.0, 10.0, ["short", "sample", "trace"]),
        (1.0, 1.0, 59.0, ["short", "sample", "no trace"]),
        (10.0, 10.0, 10.0, ["short", "sample", "no trace"]),
        (20.0, 2.0, 10.0, ["short", "short, again", "sample", "trace"]),
        (30.0, 29.0, 10.0, ["short", "short, again", "no sample", "no trace"]),
    ],
    ids=["all", "no trace", "slower with more requests", "captures", "nothing more"],
)
def test_a_peer_goes_on_as_far_as_there_is_time(
    first: float, then: float, of_sample: float, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what it has served before; and first that once more, in which graphs were captured, if it seems too long."""

    def took(of: Trace, times: int) -> trace.Took:
        if len(of.requests) < 16:
            return trace.Took(of_sample, 1.0)
        return trace.Took(then if times else first, 0.0)

    rows, _ = served("generate", took, monkeypatch)
    kinds = {trace.SHORT: "short", trace.SAMPLE: "sample", trace.TRACE: "trace"}
    names = [reduce(lambda name, kind: name.replace(*kind), kinds.items(), row.name) for row in rows]
    without = ["no " * (row.state == "skipped") for row in rows]
    assert [name.replace("generate, ", no) for name, no in zip(names, without, strict=True)] == expected


def play_a_peer(monkeypatch: pytest.MonkeyPatch, name: str, peer: Any) -> None:
    """In place of who has that name, without a model."""
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=9))
    monkeypatch.setitem(trace.PEERS, name, peer)
    monkeypatch.setattr(trace, "random_model", lambda *what, **how: model)


def test_what_a_trace_takes_by_its_samples() -> None:
    """Eight times the outputs of as many requests, and some more for longer contexts; or as long, of more requests."""
    whole = trace.uniform_trace(64, (8, 64), 9)
    short, sample = trace.shortened(whole), trace.sampled(whole)
    expected = trace.seconds_by(trace.Took(2.3, 1.0), short, whole)
    times = whole.prompt_tokens / short.prompt_tokens, whole.new_tokens / short.new_tokens
    assert expected == pytest.approx(times[0] + trace.HASTE * 1.3 * times[1]) and 6 < min(times) < 8
    assert trace.seconds_by(trace.Took(2.0, 1.0), short, short) == 1 + trace.HASTE
    prompts, outputs = whole.prompt_tokens / sample.prompt_tokens, whole.new_tokens / sample.new_tokens / 8
    of_more = trace.seconds_by(trace.Took(5.0, 3.0), sample, whole)
    assert of_more == pytest.approx(3 * prompts + trace.HASTE * 2 * outputs)
    longer = sample.new_tokens * 8 / short.new_tokens
    assert trace.seconds_by(trace.Took(2.0, 0.0), short, sample) == pytest.approx(2 * longer), "of fewer requests"


@pytest.mark.parametrize(("captured", "said"), [(0, ""), (3, "; 3 graphs were captured meanwhile"), (None, "")])
def test_graphs_that_were_captured_meanwhile_are_told(
    captured: int | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, _ = served("engine", lambda of, times: trace.Took(1.0, 0.5, captured), monkeypatch)
    assert len(rows) == 4 and all(row.figures["captured"] == captured for row in rows)
    assert all(row.text.endswith(f"none){said}") for row in rows)


def test_the_engine_tells_prompts_from_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """All prompts are computed when the last request has its first token, at the third of four steps."""
    moments = iter([0.0, 2.0, 3.0, 9.0, 9.0, 9.0])
    monkeypatch.setattr(trace, "time", SimpleNamespace(perf_counter=lambda: next(moments)))
    handles = [SimpleNamespace(tokens=[]), SimpleNamespace(tokens=[])]
    captured = iter([5, 7])
    steps = iter([handles[:1], [], handles[1:], handles, []])

    class Server:
        def __init__(self, *what: Any) -> None:
            self._left = iter(handles)

        def submit(self, *what: Any) -> Any:
            return next(self._left)

        def stats(self) -> Any:
            return SimpleNamespace(captured=next(captured))

        def step(self) -> bool:
            some = next(steps)
            for handle in some:
                handle.tokens.append(1)
            return bool(some) or any(not handle.tokens for handle in handles)

    monkeypatch.setattr(trace, "Engine", Server)
    _, serve = trace.engine(Context(a_job(), print), SimpleNamespace(), whole := two_requests())  # type: ignore[arg-type]
    assert serve(whole) == trace.Took(9.0, 3.0, captured=2)


def two_requests() -> Trace:
    return trace.uniform_trace(2, (2, 2), 9)
