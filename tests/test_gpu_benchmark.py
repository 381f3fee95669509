"""The GPU benchmark where there is no GPU: a dry run goes through every part and gives no figure."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen
from torch import Tensor
from torch.autograd import DeviceType
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_parts import (
    attention_peers,
    ceilings,
    command,
    decoding,
    launches,
    profiled,
    start,
    steps,
    steps_profiled,
    timing,
    tokens,
)
from benchmarks.gpu_parts import found as found_so_far
from benchmarks.gpu_parts.command import measure
from benchmarks.gpu_parts.floors import Ceilings
from benchmarks.gpu_parts.jobs import ROOT, WEIGHTS, Context, Job, perform
from benchmarks.gpu_parts.measures import Measure, without_found
from benchmarks.gpu_parts.ragged_step import TINY, make_step
from benchmarks.gpu_parts.rows import Row
from benchmarks.gpu_parts.step_check import check, nan_filled_outputs, worst_error
from selective_compile import reference
from tests.gpu_job import a_job

SCRIPT = ROOT / "benchmarks" / "gpu.py"
CPU = torch.device("cpu")
STEP = ((3, 40), (1, 33), (40, 40))


def dry_run(path: Path, *parts: str) -> tuple[int, dict[str, Any]]:
    options = {"minutes": 5.0, "requests": None, "token_budget": 64, "quick": False, "dry_run": True}
    status = measure(argparse.Namespace(parts=list(parts), json=path, **options))
    return status, json.loads(path.read_text())


def numbers(value: Any) -> Iterator[float]:
    """Every number in it that is no truth value, nor the bar or the goal of a measure."""
    if isinstance(value, dict):
        value = [each for name, each in value.items() if name not in ("bar", "goal")]
    if isinstance(value, list):
        for each in value:
            yield from numbers(each)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


def test_kernels_and_their_peers(tmp_path: Path, measured: set[str]) -> None:
    status, found = dry_run(tmp_path / "found.json", "ceilings", "attention")
    assert status == 0 and found["dry_run"] and found["complete"] and not list(numbers(found))
    assert len(measured) == 4, measured
    assert len(found["measures"]) == 11 and {each["reached"] for each in found["measures"]} == {"unknown"}
    names = {row["name"]: row for row in found["rows"]}
    assert {"copy", "bf16 product", "decode 1 x 40", "decode 3 x 40", "prefill 24"} <= set(names)
    assert {"a kernel behind another, when that is complete", "copy of 64 MB, read and written"} <= set(names)
    assert "share_of_copy" in names["decode 3 x 40"]["figures"]["names"]
    others = {"fp8 decode 3 x 40", "latent decode 3 x 40, 16 heads", "rotary, prefill 24", "top-k, top-p, 3 x 300"}
    others |= {"temperature, 3 x 300", "greedy, 1 x 300"}
    others |= {"heads of 64, decode 3 x 40", "window of 9, decode 3 x 40", "softcap, decode 3 x 40"}
    others |= {"query, key and value joined, 3 rows", "gate and up joined, 1 rows"}
    assert {names[name]["state"] for name in others} == {"measured"}
    assert {"counts", "microseconds", "over_sum"} < set(names["mixed: 24 rows and 3 x 40"]["figures"]["names"])
    timed = [row["figures"]["names"] for row in found["rows"] if row["state"] == "measured"]
    for kind in ("clock_microseconds", "quartile_microseconds"):
        # But for the summary of the decodes, and two rows that say that all is timed.
        assert sum(any(name.endswith(kind) for name in names) for names in timed) == len(timed) - 3 > 20
    kernels = [names[f"{job}: kernels"] for job in ("decode", "prefill")]
    assert {(row["state"], row["text"]) for row in kernels} == {("skipped", "the profiler saw nothing of the device")}
    assert names["flex_attention, prefill 24"]["state"] == "measured"
    mixed = names["flex_attention, mixed: 24 rows and 3 x 40"]
    assert mixed["state"] == "skipped" and mixed["text"].startswith("all requests must be as long")
    # What torch does not have on a CPU is named, and the others have gone on.
    refused = [row for row in found["rows"] if row["state"] == "failed"]
    assert refused and not any(row["ours"] for row in refused) and found["failed"] == []


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Measures that had a figure before the dry run took it away."""
    names: set[str] = set()

    def hidden(measure: Measure) -> Measure:
        names.update([measure.name] if measure.found is not None else [])
        return without_found(measure)

    monkeypatch.setattr(found_so_far, "without_found", hidden)
    yield names


@pytest.mark.slow
def test_steps_and_the_trace(tmp_path: Path, measured: set[str]) -> None:
    status, found = dry_run(tmp_path / "found.json", "steps", "trace")
    assert len(measured) == 4, measured  # without a device no graph is replayed, and its idle part not known
    assert status == 0 and not found["failed"] and not list(numbers(found))
    names = [row["name"] for row in found["rows"] if row["state"] == "measured"]
    of_models = (": tokens", ", 1 requests", ", 2 requests", ": all timed")
    pool = f"{steps.PROFILED_POOL}: pool"
    assert pool in names
    kinds = ("a short sample", "a sample", "the trace")
    assert [name for name in names if name != pool] == [
        f"{tokens.MODEL}, {tokens.LAYERS} layers, float32: tokens",
        *(f"{model}{what}" for model in command.TINY_MODELS for what in of_models),
        *(f"engine, {what}" for what in (kinds[0], kinds[2], kinds[1], f"{kinds[0]}, again")),
        *(f"{peer}, {what}" for peer in ("generate_batch", "generate") for what in kinds),
    ]


@pytest.mark.slow
def test_a_start_is_a_process_of_its_own(tmp_path: Path, measured: set[str]) -> None:
    status, found = dry_run(tmp_path / "found.json", "start")
    names = ["phases", "seconds", "stamps", "traced"]
    assert status == 0 and [row["figures"]["names"] for row in found["rows"]] == [names] * 3
    starts = {"cold start to the first token", "warm start to the first token"}
    assert measured == starts


def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit, match="a CUDA device must be there"):
        runpy.run_path(str(SCRIPT), run_name="__main__")


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sympy", None)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry-run"])
    with pytest.raises(SystemExit, match="must be installed, and are not: sympy"):
        runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.mark.parametrize("lacking", ["a C compiler", "Python.h"])
def test_without_what_triton_compiles_launchers_with_it_says_so(
    lacking: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None if lacking == "a C compiler" else f"/usr/bin/{name}")
    if lacking == "Python.h":
        monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit, match=f"Triton must find {lacking}"):
        runpy.run_path(str(SCRIPT), run_name="__main__")


def test_it_needs_nothing_but_torch_triton_and_transformers() -> None:
    """With what these bring: prometheus_client, rich and others of ours are not there."""
    code = """
import sys
for name in ("prometheus_client", "rich", "matplotlib", "llguidance", "psutil", "PIL"):
    sys.modules[name] = None
import benchmarks.gpu_parts.command, benchmarks.gpu_parts.first_token, benchmarks.gpu_parts.worker
for part in ("attention", "attention_peers", "ceilings", "start", "steps", "tokens", "trace"):
    __import__(f"benchmarks.gpu_parts.{part}")
import selective_compile.bench.transformers_peers
from selective_compile import runtime
try:
    runtime.EngineMetrics
except ImportError as error:
    assert "prometheus_client" in str(error), error
else:
    raise AssertionError("without prometheus_client there can be no metrics")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_failure_is_named_and_the_exit_status_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def perform(job: Job, tell: Any) -> None:
        if job.name == "prefill":
            raise RuntimeError("misaligned address\nmore of it")
        tell(job.row(job.name, figures={"seconds": 1.0}))

    monkeypatch.setattr(command, "perform", perform)
    status, found = dry_run(tmp_path / "found.json", "attention")
    assert status == 1 and found["failed"] == ["attention: prefill"] and len(found["rows"]) == len(WEIGHTS["attention"])
    assert found["rows"][1]["text"] == "RuntimeError: misaligned address"
    assert "in perform" in found["rows"][1]["detail"] and "more of it" in found["rows"][1]["detail"]
    assert {row["detail"] for row in found["rows"] if row["state"] == "measured"} == {""}


def test_the_check_of_a_step_can_fail() -> None:
    step = make_step(STEP, TINY, CPU)
    with nan_filled_outputs():
        right = step()
    assert check(step, right) < 1e-5
    swapped = right.clone()
    swapped[[0, 1]] = right[[1, 0]]
    with pytest.raises(ValueError, match="error of a row must be at most"):
        check(step, swapped)
    holed = right.clone()
    holed[3, 2, 5] = torch.nan
    with pytest.raises(ValueError, match="got NaN"):
        worst_error(step, holed)
    step.key_pool[step.slot_mapping[7] // TINY.block_size] += 1
    with pytest.raises(ValueError, match="written to their slots"):
        worst_error(step, right)


def test_rows_from_the_middle_of_a_prompt_are_checked() -> None:
    step = make_step(((200, 210),), TINY, CPU)
    tensors = step.query, step.key, step.value, step.key_pool, step.value_pool, step.cu_seqlens_q, step.context_lens
    right = reference.ragged_attention(*tensors, step.block_table, step.slot_mapping, step.scale, 0, 0.0)
    assert check(step, right) < 1e-5
    for first in range(0, 160, 20):
        wrong = right.clone()
        wrong[first : first + 41] *= 1.1
        with pytest.raises(ValueError, match="error of a row must be at most"):
            check(step, wrong)


def paged(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: None, max_q: int, max_k: int, *,
    scale: float, window_size: tuple[int, int], enable_gqa: bool, seqused_k: Tensor, block_table: Tensor,
) -> Tensor:  # fmt: skip
    """`varlen_attn` of a torch with block tables, by the reference."""
    assert (max_q, max_k) == (40, 40) and window_size == (-1, 0) and enable_gqa
    rows, pools = torch.zeros(len(query), *key.shape[2:]), (each.transpose(1, 2) for each in (key, value))
    slots = torch.full((len(query),), -1)
    return reference.ragged_attention(query, rows, rows, *pools, cu_seq_q, seqused_k, block_table, slots, scale, 0, 0.0)


def packed(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    scale: float, window_size: tuple[int, int],
) -> Tensor:  # fmt: skip
    """That of torch 2.11, without, by the same: heads share keys as they have them, and nothing has to say so."""
    assert cu_seq_k[-1] == len(key)
    block, lengths = int(cu_seq_k.diff().max()), cu_seq_k.diff().tolist()
    pools = torch.zeros(2, len(lengths), block, *key.shape[1:])
    for pool, each in zip(pools, (key, value), strict=True):
        for n, own in enumerate(each.split(lengths)):
            pool[n, : len(own)] = own
    table = torch.arange(len(lengths), dtype=torch.int32)[:, None]
    seqused = cu_seq_k.diff()
    both = {"seqused_k": seqused, "block_table": table, "scale": scale, "window_size": window_size}
    return paged(query, *pools, cu_seq_q, None, max_q, max_k, enable_gqa=True, **both)


def apart(query: Tensor, key: Tensor, *rest: Any, scale: float, window_size: tuple[int, int]) -> Tensor:
    """That of one which takes as many heads of keys only."""
    if key.shape[1] != query.shape[1]:
        raise RuntimeError("as many heads, please")
    return packed(query, key, *rest, scale=scale, window_size=window_size)


def mistaken(query: Tensor, key: Tensor, *rest: Any, scale: float, window_size: tuple[int, int]) -> Tensor:
    """That of one which takes fewer, and gets them wrong."""
    found = packed(query, key, *rest, scale=scale, window_size=window_size)
    return found if key.shape[1] == query.shape[1] else found.flip(1)


@pytest.mark.parametrize(
    ("attend", "how"),
    [
        (paged, "blocks of 256"),
        (packed, "keys in one piece"),
        (apart, "keys in one piece, repeated for each head; in one piece RuntimeError: as many heads, please"),
        (mistaken, "keys in one piece, repeated for each head; in one piece ValueError: the error of a row"),
    ],
)
def test_varlen_attn_gets_what_it_takes(attend: Any, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", attend)
    step = make_step(STEP, TINY, CPU)
    step()
    made = attention_peers.varlen(step)
    assert made.how.startswith(how) and check(step, made.call()) < 1e-5
    assert ("repeated" in made.how) == ("repeated" in how)


def test_varlen_attn_that_takes_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*what: Any, scale: float, window_size: tuple[int, int]) -> Tensor:
        raise RuntimeError("no such device")

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", refusing)
    with pytest.raises(RuntimeError, match="no such device"):
        attention_peers.varlen(make_step(STEP, TINY, CPU))


def test_flex_attention_gets_what_lies_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.nn.attention.flex_attention as flex

    given: list[Tensor] = []
    attend = flex.flex_attention
    monkeypatch.setattr(flex, "flex_attention", lambda *what, **how: given.extend(what) or attend(*what, **how))
    step = make_step(((1, 40), (1, 40)), TINY, CPU)
    step()
    made = attention_peers.flex(step)
    assert check(step, made.as_rows(made.call())) < 1e-5
    assert len(given) == 3 and all(each.is_contiguous() for each in given)


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


def test_the_device_is_told_by_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    about = {"name": "some GPU", "total_memory": 8 * 10**10, "multi_processor_count": 99, "L2_cache_size": 5}
    about |= {"major": 9, "minor": 0}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**about))
    rows: list[Row] = []
    ceilings._tell_device(Context(a_job(), rows.append))
    assert rows[0].figures["device"] == "some GPU" and rows[0].figures["memory_bytes"] == 8 * 10**10
    assert rows[0].text.startswith("some GPU, 80 GB, 99 processors, CUDA")


@pytest.mark.parametrize(("seconds", "states"), [(60.0, ["measured"] * 3), (9.0, ["measured", "measured", "skipped"])])
def test_a_warm_start_is_made_again_if_there_is_time(
    seconds: float, states: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stamps, graphs = {"imports": 4.0, "first token": 9.5, start.PHASES: {"capture": 0.3}}, iter([1, 0, 0])
    monkeypatch.setattr(start, "first_token", lambda *what: {**stamps, start.TRACED: next(graphs)})
    rows: list[Row] = []
    start.start_each(Context(a_job(part="start", name="start", seconds=seconds), rows.append), {})
    assert [row.name for row in rows] == [f"llama-3.1-8b, {each}" for each in start.GRAPHS]
    assert [row.state for row in rows] == states
    assert [row.figures["traced"] for row in rows if row.figures] == [1, 0, 0][: states.count("measured")]
    assert rows[0].figures["phases"] == {"capture": 0.3} and "phases" not in rows[0].text


def test_what_a_start_prints_is_told_and_its_rows_are_not_mistaken(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code = "import sys; print('a warning', file=sys.stderr); raise ImportError('no module\\n\\nSet this for more')"
    run_in_its_place(monkeypatch, code)
    rows: list[Row] = []
    start.start_each(Context(a_job(part="start", name="start"), rows.append), os.environ)
    assert [row.text for row in rows] == ["ValueError: the process must end well, got status 1: ImportError: no module"]
    assert "a warning" in capfd.readouterr().err


def run_in_its_place(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """A process of other code than that of a first token."""
    started = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **options: started([sys.executable, "-c", code], **options)
    )


def test_a_start_is_over_with_its_line_however_long_the_process_takes_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it started is ended with it: nobody holds the other end of the pipe then."""
    seen, held = os.pipe()
    os.set_inheritable(held, True)
    code = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], pass_fds=[{held}])
print('{{"first token": 2.5, "{start.TRACED}": 1}}', flush=True)
time.sleep(1000)
"""
    started = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **how: started([sys.executable, "-c", code], **how, pass_fds=[held])
    )
    found = start.first_token(Context(a_job(part="start", name="start"), print), os.environ)
    os.close(held)
    assert found == {"first token": 2.5, start.TRACED: 1} and os.read(seen, 1) == b""
    os.close(seen)


def test_a_start_that_takes_too_long_is_ended_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    run_in_its_place(monkeypatch, "import time; time.sleep(1000)")
    rows: list[Row] = []
    start.start_each(Context(a_job(part="start", name="start", seconds=0.0), rows.append), os.environ)
    assert [row.text for row in rows] == ["ValueError: there must be a token in 1 s, there was none"]


def test_kernels_of_a_step_that_take_most() -> None:
    ran = [profiled.Ran("a" * 90, 0.0, 4.0), profiled.Ran("b", 5.0, 6.0), profiled.Ran("b", 7.0, 12.0)]
    assert profiled.longest(ran, 2) == [
        {"name": "b", "launches": 1.0, "microseconds": 3.0},
        {"name": "a" * 80, "launches": 0.5, "microseconds": 2.0},
    ]
    assert profiled.longest(ran, 2, count=1)[0]["name"] == "b" and len(profiled.longest(ran, 2, count=1)) == 1
    assert profiled.medians(ran) == {"a" * 80: 4.0, "b": 3.0}


def test_the_profiler_tells_kernels_and_copies_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def event(name: str, start: float, *, device: Any = DeviceType.CUDA, annotation: bool = False) -> Any:
        span = SimpleNamespace(start=start, end=start + 2)
        return SimpleNamespace(name=name, time_range=span, device_type=device, is_user_annotation=annotation)

    events = [event("late", 9.0), event("host", 1.0, device=DeviceType.CPU), event("early", 3.0)]
    events.append(event("a step", 2.0, annotation=True))
    seen = SimpleNamespace(events=lambda: events)
    monkeypatch.setattr(profiled, "profile", lambda **how: contextlib.nullcontext(seen))
    calls: list[int] = []
    ran, wall = profiled.on_device(lambda: calls.append(1))
    assert ran == [("early", 3.0, 5.0), ("late", 9.0, 11.0)] and calls == [1] and wall >= 0


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


def test_a_file_is_whole_at_any_time(tmp_path: Path) -> None:
    found = command.Found(tmp_path / "found.json", dry_run=False, quick=True)
    found.tell(Row(part="ceilings", name="copy", figures={"bytes_per_second": 2.0}))
    assert found.ceilings is None
    found.tell(Row(part="ceilings", name="bf16 product", figures={"flops_per_second": 3.0}))
    assert found.ceilings == (2.0, 3.0)
    kept = json.loads((tmp_path / "found.json").read_text())
    assert not kept["complete"] and len(kept["rows"]) == 2 and os.listdir(tmp_path) == ["found.json"]
    assert Row(**kept["rows"][0]) == Row(part="ceilings", name="copy", figures={"bytes_per_second": 2.0})


@pytest.mark.gpu
@pytest.mark.parametrize("part", ["ceilings", "attention", "steps"])
def test_a_quick_run_on_a_gpu(part: str, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    command_line = [sys.executable, str(SCRIPT), "--quick", "--parts", part, "--json", str(found)]
    done = subprocess.run(command_line, capture_output=True, text=True)
    kept = json.loads(found.read_text())
    assert done.returncode == 0, (done.stdout, done.stderr, kept["failed"])
    assert kept["complete"] and not kept["dry_run"] and any(row["state"] == "measured" for row in kept["rows"])
