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
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks.gpu_parts import (
    ceilings,
    command,
    profiled,
    steps,
    tokens,
)
from benchmarks.gpu_parts import found as found_so_far
from benchmarks.gpu_parts.command import measure
from benchmarks.gpu_parts.jobs import ROOT, WEIGHTS, Context, Job
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


def test_the_device_is_told_by_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    about = {"name": "some GPU", "total_memory": 8 * 10**10, "multi_processor_count": 99, "L2_cache_size": 5}
    about |= {"major": 9, "minor": 0}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**about))
    rows: list[Row] = []
    ceilings._tell_device(Context(a_job(), rows.append))
    assert rows[0].figures["device"] == "some GPU" and rows[0].figures["memory_bytes"] == 8 * 10**10
    assert rows[0].text.startswith("some GPU, 80 GB, 99 processors, CUDA")


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
