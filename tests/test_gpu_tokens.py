"""The GPU benchmark's look at an engine's tokens: right ones pass, and those of a step that went wrong do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu_parts import steps, steps_profiled, tokens
from benchmarks.gpu_parts.decoding import Decoded
from benchmarks.gpu_parts.jobs import Context, Job
from benchmarks.gpu_parts.models import random_model
from benchmarks.gpu_parts.profiled import Ran
from benchmarks.gpu_parts.rows import Row
from selective_compile.options import EngineConfig
from selective_compile.runtime.device_chooser import DeviceChooser
from selective_compile.runtime.engine import Engine
from selective_compile.runtime.stats import StepRecord
from tests.runtime.played_stream import TapedStream

CPU = torch.device("cpu")


def looked_at(monkeypatch: pytest.MonkeyPatch) -> Row:
    """The row of a small model in float32 whose steps are captured."""
    monkeypatch.setattr(tokens, "REQUESTS", 5)
    monkeypatch.setattr(tokens, "GENERATED", 12)
    monkeypatch.setattr(tokens, "LENGTHS", (3, 40))
    model = random_model("qwen3-0.6b", CPU, tiny=True)
    config = EngineConfig(compile=False, max_requests=5, max_kv_tokens=tokens.room(), block_size=16)
    engine = Engine(model, config, stream=TapedStream(captures=True))
    rows: list[Row] = []
    context = Context(Job(part="steps", name="tokens", seconds=60.0, ceilings=None, tiny=True), rows.append)
    tokens.compare(context, "some tokens", model, engine)
    (row,) = rows
    return row


def test_tokens_of_captured_steps_are_those_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    row = looked_at(monkeypatch)
    assert row.state == "measured" and row.figures["tokens"] == 60 and row.figures["worst_behind"] < 1e-4
    assert row.figures["captured"] > 10


def test_a_step_that_reads_a_token_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a graph does whose memory of the last tokens is not that which they are written to."""
    monkeypatch.setattr(DeviceChooser, "input_ids", lambda self, known, sources: known.clone())
    row = looked_at(monkeypatch)
    assert row.state == "failed" and "of 60 are 0.001 spreads behind" in row.text and row.ours


def test_a_row_that_lies_in_the_wrong_slot_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from selective_compile.runtime import step_graphs

    right = step_graphs._Rows.slot_mapping

    def wrong(self: Any, place: int, block_size: int) -> Any:
        found = right(self, place, block_size)
        return found // block_size * block_size + (found + 1) % block_size

    monkeypatch.setattr(step_graphs._Rows, "slot_mapping", wrong)
    assert looked_at(monkeypatch).state == "failed"


def test_nan_is_no_token_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "behind_best", lambda model, prompt, found: torch.full((12,), torch.nan))
    assert looked_at(monkeypatch).state == "failed"


def test_steps_are_timed_when_all_prompts_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others decode already, and what is known of a step comes when the next one has been given to the device."""
    records: list[StepRecord] = []
    model = random_model("llama-3.1-8b", CPU, tiny=True)
    config = EngineConfig(compile=False, max_requests=8, max_kv_tokens=2000, token_budget=16)
    engine = Engine(model, config, observers=[records.append], stream=TapedStream(captures=True))
    for count in (1, 4):
        more = [engine.submit(range(40), max_new_tokens=100) for _ in range(count)]
        steps.settle(engine, more)
        records.clear()
        for _ in range(3):
            engine.step()
        assert len(records) == 3 and not any(share.is_prefill for record in records for share in record.shares)
    assert len(records[-1].shares) == 5


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-0.6b"], ids=["untied", "tied"])
def test_tokens_of_random_models_go_by_the_context(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(name, CPU, tiny=True)
    engine = Engine(model, EngineConfig(compile=False, max_kv_tokens=400))
    request = engine.submit([3, 4, 5, 6], max_new_tokens=20)
    while engine.step():
        pass
    assert len(set(request.tokens)) > 4, "of 128, and it may come round to where it was"
    monkeypatch.setattr(tokens, "GENERATED", 20)
    assert tokens.behind_best(model, [3, 4, 5, 6], request.tokens).max() < 1e-4
    assert (tokens.behind_best(model, [3, 4, 6, 5], request.tokens) > 1e-3).any()


def test_a_comparison_that_fails_says_nothing_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*what: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(tokens, "behind_best", failing)
    row = looked_at(monkeypatch)
    assert row.state == "failed" and row.text == "not compared: OutOfMemoryError: out of memory"


def test_a_request_that_lost_tokens_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    found = tokens.generate

    def fewer(engine: Any) -> Any:
        requests, captured = found(engine)
        return [SimpleNamespace(prompt_ids=[1], tokens=[1]), *requests[1:]], captured

    monkeypatch.setattr(tokens, "generate", fewer)
    row = looked_at(monkeypatch)
    assert row.state == "failed" and row.text == "[1, 12, 12, 12, 12] tokens, each must get 12"


def test_fewer_requests_go_on_with_what_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those that leave, leave their blocks."""
    records: list[StepRecord] = []
    model = random_model("llama-3.1-8b", CPU, tiny=True)
    config = EngineConfig(compile=False, max_requests=4, max_kv_tokens=4 * 80)
    engine = Engine(model, config, observers=[records.append], stream=TapedStream(captures=True))
    context = Context(Job(part="steps", name="llama-3.1-8b", seconds=60.0, ceilings=None, tiny=True), print)
    running: list[Any] = []
    for count in (1, 4, 3, 2, 4):
        first = running[:1]
        steps.resize(context, engine, running, count)
        steps.settle(engine, running)
        records.clear()
        engine.step()
        engine.step()
        assert [len(record.shares) for record in records[-1:]] == [count] == [len(running)]
        assert running[:1] == first or not first
    assert not any(request.finished for request in running)


@pytest.mark.parametrize(("name", "told"), [("llama-3.2-1b", 1), ("llama-3.1-8b", 0)])
def test_an_engine_of_the_1b_finds_its_pool_itself(name: str, told: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Row] = []
    context = Context(Job(part="steps", name=name, seconds=60.0, ceilings=None, tiny=True), rows.append)
    engine = steps.make_engine(context, random_model(name, CPU, tiny=True), 12, [])
    stats = engine.stats()
    # As many positions as the model has, of each request; or what they need.
    slots = 12 * 512 if told else max(12 * (steps.TINY_PROMPT + steps.TINY_GENERATED), tokens.room())
    assert slots - stats.block_size < stats.blocks_max * stats.block_size <= slots + 12 * stats.block_size
    assert [row.state for row in rows] == ["measured"] * told
    assert not told or rows[0].figures["tokens"] == stats.blocks_max * stats.block_size
    monkeypatch.setattr(steps, "TINY_GENERATED", 1000)
    steps.make_engine(context, random_model(name, CPU, tiny=True), 12, [])
    assert [row.state for row in rows] == ["measured", "failed"][: 2 * told]


@pytest.mark.parametrize(("requests", "rows"), [(1, 2), (3, 4), (8, 8)])
def test_a_step_says_how_many_rows_it_multiplies(requests: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request alone has a step of two rows, as the engine's own replays show."""
    model = random_model("llama-3.1-8b", CPU, tiny=True)
    config = EngineConfig(compile=False, max_requests=8, max_kv_tokens=2000)
    engine = Engine(model, config, stream=TapedStream(captures=True))
    context = Context(Job(part="steps", name="llama-3.1-8b", seconds=60.0, ceilings=None, tiny=True), print)
    steps.resize(context, engine, running := [], requests)
    steps.settle(engine, running)
    launched = engine._runner._launched
    assert launched is not None and launched.kind.size.tokens == rows
    found = Decoded(wall=2e-3, last_wall=2.5e-3, quartiles=(1e-3, 3e-3), span=None, contexts=(20,) * requests)
    told = steps.row(context, "some", found, None, 1e-3)
    assert told.figures["rows"] == rows and (f"{rows} rows" in told.text) == (rows != requests)
    assert told.figures["idle"] is None and "no graph" in told.text
    assert told.figures["quartile_microseconds"] == [1e3, 3e3]
    beside_its_graph = steps.row(context, "some", found, (2e-3, 4e-3), 1e-3)
    assert beside_its_graph.figures["replays_microseconds"] == [2e3, 4e3] and "not known" not in beside_its_graph.text
    assert beside_its_graph.figures["idle"] == pytest.approx(0.2) and "idle 20.00%" in beside_its_graph.text
    slowed = steps.row(context, "some", found, (3e-3,), 1e-3)
    assert slowed.figures["idle"] is None and slowed.figures["over_replay_microseconds"] == pytest.approx(-500)
    assert "idle not known: the graph alone took longer" in slowed.text


def test_all_counts_are_timed_before_any_is_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those that are profiled go on with the requests that there are."""
    rows: list[Row] = []
    context = Context(Job(part="steps", name="llama-3.1-8b", seconds=600.0, ceilings=None, tiny=True), rows.append)
    monkeypatch.setattr(steps, "_that_fit", lambda context, of_a_token: iter((1, 3, 2)))
    monkeypatch.setattr(tokens, "compare", lambda *what: None)
    seen: list[str] = []

    def profile(context: Context, name: str, engine: Engine) -> None:
        seen.append(name)
        if len(seen) == 2:
            raise RuntimeError("CUPTI_ERROR_INVALID_DEVICE")

    monkeypatch.setattr(steps, "profile_steps", profile)
    steps.run(context)
    model = "llama-3.1-8b"
    timed = [f"{model}, {count} requests" for count in (1, 3, 2)]
    assert [row.name for row in rows] == [*timed, f"{model}: all timed", f"{model}, 1 requests: profiled"]
    assert seen == [f"{model}, 2 requests: profiled", f"{model}, 1 requests: profiled"]
    assert [row.state for row in rows] == ["measured"] * 4 + ["failed"]


def test_a_process_goes_on_where_another_lost_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Row] = []
    done = ("llama-3.1-8b: tokens", "llama-3.1-8b, 1 requests")
    job = Job(part="steps", name="llama-3.1-8b", seconds=600.0, ceilings=None, tiny=True, done=done)
    monkeypatch.setattr(steps, "profile_counts", lambda *what: None)
    steps.run(Context(job, rows.append))
    assert [row.name for row in rows] == ["llama-3.1-8b, 2 requests", "llama-3.1-8b: all timed"]


@pytest.mark.parametrize(("seen", "state"), [(True, "measured"), (False, "skipped")])
def test_what_a_profiler_sees_has_figures_of_its_own(seen: bool, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Row] = []
    idle = steps_profiled.Idle(share=0.03, by_host=0.05, resolution=0.02) if seen else None
    ran = [Ran("attention_kernel", 0.0, 3.0), Ran("attention_kernel", 4.0, 5.0)] if seen else []
    monkeypatch.setattr(steps_profiled, "on_device", lambda run: (ran, 1.0))
    monkeypatch.setattr(steps_profiled, "idle_of", lambda spans, wall: idle)
    context = Context(Job(part="steps", name="llama-3.1-8b", seconds=60.0, ceilings=None, tiny=True), rows.append)
    steps_profiled.profile_steps(context, "some", SimpleNamespace())  # type: ignore[arg-type]
    assert [row.state for row in rows] == [state] and "idle" not in rows[0].figures
    figures = {"strict_idle": 0.03, "strict_idle_by_host": 0.05, "resolution": 0.02}
    figures |= {"launches": 1.0, "kernel_microseconds": 2.0}  # of each of two steps
    kernels = [{"name": "attention_kernel", "launches": 1.0, "microseconds": 2.0}]
    assert not seen or rows[0].figures == {**figures, "kernels": kernels}
