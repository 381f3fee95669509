"""The trace of the GPU benchmark: what is served for how long, and when a peer goes on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu_parts import trace
from benchmarks.gpu_parts.jobs import Context
from benchmarks.gpu_parts.rows import Row
from selective_compile.bench.trace import Trace
from tests.gpu_job import a_job


@pytest.mark.parametrize(("slow", "served"), [(0.0, 2), (30.0, 1), (1000.0, 1)])
def test_a_sample_counts_when_all_is_captured(slow: float, served: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that takes so many seconds for a sample, with 60 of them left; the first time twice as many."""
    asked: list[Trace] = []

    def peer(context: Any, model: Any, whole: Trace) -> Any:
        def serve(of: Trace) -> trace.Took:
            asked.append(of)
            return trace.Took(2 * slow + 0.1 if len(asked) == 2 else slow + 0.1, 0.0)

        return (lambda: "none"), serve

    play_a_peer(monkeypatch, "generate", peer)
    rows: list[Row] = []
    trace.run(Context(a_job(part="trace", name="generate", requests=8), rows.append))
    small = rows[0]
    assert small.figures["served"] == served and asked[1:][:served] == [asked[1]] * served
    assert small.figures["seconds"] == (slow + 0.1 if served == 2 else 2 * slow + 0.1)
    assert [row.state for row in rows] == (["measured"] * 3 if served == 2 else ["measured", "skipped"])
    assert [len(each.requests) for each in asked[1:]] == ([2, 2, 8, 8, 8] if served == 2 else [2])
    prompts = [[one.prompt_ids for one in each.requests] for each in asked[1:]]
    assert all(some == prompts[-1][: len(some)] for some in prompts), "samples have the prompts of the trace"
    outputs = [[one.new_tokens for one in each.requests] for each in asked[1:]]
    assert served == 1 or outputs[2] == [-(-length // trace.SHORTENED) for length in outputs[-1]]


def test_a_peer_goes_on_as_far_as_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 60 s; what it has served twice by then costs nothing here."""
    seconds = {2: trace.Took(4.0, 2.0), 8: trace.Took(14.0, 4.0)}
    play_a_peer(monkeypatch, "generate", lambda *what: ((lambda: "none"), lambda of: seconds[len(of.requests)]))
    rows: list[Row] = []
    trace.run(Context(a_job(part="trace", name="generate", requests=8), rows.append))
    assert [(row.name, row.state) for row in rows] == [
        ("generate, a small sample", "measured"),
        ("generate, a sample", "measured"),
        ("generate, the trace", "skipped"),
    ]


def play_a_peer(monkeypatch: pytest.MonkeyPatch, name: str, peer: Any) -> None:
    """In place of who has that name, without a model."""
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=9))
    monkeypatch.setitem(trace.PEERS, name, peer)
    monkeypatch.setattr(trace, "random_model", lambda *what, **how: model)


def test_prompts_of_a_sample_are_all_prompts() -> None:
    """Of 6.3 s for a sample, 5 were prompts: the other 1.3 are eight times as many in the trace, and not all of it."""
    whole = trace.uniform_trace(64, (8, 64), 9)
    sample = trace.shortened(whole)
    expected = trace.seconds_by(trace.Took(6.3, 5.0), sample, whole)
    assert expected == pytest.approx(5 + trace.HASTE * 1.3 * whole.new_tokens / sample.new_tokens) and expected < 20
    assert trace.seconds_by(trace.Took(2.0, 1.0), sample, sample) == 1 + trace.HASTE
    small = trace.fewer(sample)
    of_more = 3.0 * sample.prompt_tokens / small.prompt_tokens, sample.new_tokens / small.new_tokens / trace.FEWER
    assert trace.seconds_by(trace.Took(5.0, 3.0), small, sample) == pytest.approx(of_more[0] + 2.4 * of_more[1])


@pytest.mark.parametrize(("captured", "said"), [(0, ""), (3, "; 3 graphs were captured meanwhile"), (None, "")])
def test_graphs_that_were_captured_meanwhile_are_told(
    captured: int | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    play_a_peer(monkeypatch, "engine", lambda *what: ((lambda: "none"), lambda of: trace.Took(1.0, 0.5, captured)))
    rows: list[Row] = []
    trace.run(Context(a_job(part="trace", name="engine", requests=4), rows.append))
    assert len(rows) == 3 and all(row.figures["captured"] == captured for row in rows)
    assert all(row.text.endswith(f"none){said}") for row in rows)


@pytest.mark.parametrize(("name", "state"), [("engine", "measured"), ("generate", "skipped")])
def test_the_engine_serves_the_trace_however_long_it_may_take(
    name: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    play_a_peer(monkeypatch, name, lambda *what: ((lambda: "none"), lambda of: trace.Took(30.0, 1.0)))
    rows: list[Row] = []
    trace.run(Context(a_job(part="trace", name=name, requests=4), rows.append))
    assert (rows[-1].name, rows[-1].state) == (f"{name}, the trace", state)


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
