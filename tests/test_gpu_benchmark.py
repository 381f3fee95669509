"""The GPU benchmark where there is no GPU: a dry run goes through every part and gives no figure."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_parts import command, isolated
from benchmarks.gpu_parts.command import measure
from benchmarks.gpu_parts.isolated import Worker
from benchmarks.gpu_parts.jobs import ROOT, WEIGHTS, Job
from benchmarks.gpu_parts.ragged_step import TINY, check, make_step, nan_filled_outputs, worst_error
from benchmarks.gpu_parts.rows import Row

SCRIPT = ROOT / "benchmarks" / "gpu.py"
CPU = torch.device("cpu")
STEP = ((3, 40), (1, 33), (40, 40))


def dry_run(path: Path, *parts: str) -> tuple[int, dict[str, Any]]:
    options = {"minutes": 5.0, "requests": None, "token_budget": 64, "quick": False, "dry_run": True}
    status = measure(argparse.Namespace(parts=list(parts), json=path, **options))
    return status, json.loads(path.read_text())


def numbers(value: Any) -> Iterator[float]:
    """Every number in it that is no truth value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from numbers(each)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


def test_kernels_and_their_peers(tmp_path: Path) -> None:
    status, found = dry_run(tmp_path / "found.json", "ceilings", "attention")
    assert status == 0 and found["dry_run"] and found["complete"] and not list(numbers(found))
    names = {row["name"]: row for row in found["rows"]}
    assert {"copy", "bf16 product", "decode 1 x 40", "decode 3 x 40", "prefill 24"} <= set(names)
    assert "share_of_copy" in names["decode 3 x 40"]["figures"]["names"]
    assert names["mixed: 24 rows and 3 x 40"]["figures"]["names"] == ["microseconds", "over_sum"]
    assert names["flex_attention, prefill 24"]["state"] == "measured"
    # What torch does not have on a CPU is named, and the others have gone on.
    refused = [row for row in found["rows"] if row["state"] == "failed"]
    assert refused and not any(row["ours"] for row in refused) and found["failed"] == []


@pytest.mark.slow
def test_steps_and_the_trace(tmp_path: Path) -> None:
    status, found = dry_run(tmp_path / "found.json", "steps", "trace")
    assert status == 0 and not found["failed"] and not list(numbers(found))
    names = [row["name"] for row in found["rows"] if row["state"] == "measured"]
    assert names == [
        *(f"{model}, {count} requests" for model in command.TINY_MODELS for count in (1, 2)),
        *(f"{peer}, {what}" for peer in WEIGHTS["trace"] for what in ("a sample", "the trace")),
    ]


@pytest.mark.slow
def test_starts_are_processes_of_their_own(tmp_path: Path) -> None:
    status, found = dry_run(tmp_path / "found.json", "start")
    assert status == 0 and [row["figures"]["names"] for row in found["rows"]] == [["seconds", "stamps"]] * 2


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


def test_a_failure_is_named_and_the_exit_status_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def perform(job: Job, tell: Any) -> None:
        if job.name == "prefill":
            raise RuntimeError("misaligned address\nmore of it")
        tell(job.row(job.name, figures={"seconds": 1.0}))

    monkeypatch.setattr(command, "perform", perform)
    status, found = dry_run(tmp_path / "found.json", "attention")
    assert status == 1 and found["failed"] == ["attention: prefill"] and len(found["rows"]) == 5
    assert found["rows"][1]["text"] == "RuntimeError: misaligned address"


def a_job(**values: Any) -> Job:
    return Job(**{"part": "ceilings", "name": "ceilings", "seconds": 60.0, "ceilings": None, "tiny": True, **values})


def test_a_worker_hands_on_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Row] = []
    Worker({}).perform(a_job(), rows.append)
    assert [(row.name, row.state) for row in rows] == [("copy", "measured"), ("bf16 product", "measured")]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os; os.kill(os.getpid(), 11)", "ended with status -11: it said nothing"),
        ("raise ValueError('no such thing')", "ended with status 1: ValueError: no such thing"),
        ("import time; time.sleep(60)", "stopped after 0 s"),
    ],
    ids=["fault", "error", "hang"],
)
def test_what_ends_a_worker_is_named(monkeypatch: pytest.MonkeyPatch, code: str, said: str) -> None:
    started = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **options: started([sys.executable, "-c", code], **options)
    )
    monkeypatch.setattr(isolated, "GRACE", 0.0)
    rows: list[Row] = []
    Worker({}).perform(a_job(seconds=0.2 if "sleep" in code else 60.0), rows.append)
    assert [(row.state, row.text) for row in rows] == [("failed", said)]


def test_a_job_is_the_same_behind_a_pipe() -> None:
    job = a_job(ceilings=(1.0, 2.0), requests=7)
    assert Job.from_json(job.to_json()) == job


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
