"""A run of the GPU benchmark: jobs in processes of their own, their time, and what ends them."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_parts import command, isolated, jobs
from benchmarks.gpu_parts import found as found_so_far
from benchmarks.gpu_parts.command import measure
from benchmarks.gpu_parts.jobs import CACHES, ROOT, SECONDS, WEIGHTS, Job
from benchmarks.gpu_parts.measures import HEADER, Measure
from tests.gpu_job import a_job

SCRIPT = ROOT / "benchmarks" / "gpu.py"


class WorkerHere:
    """Stands for `Worker`: tells what `ceilings` would, and what job it got."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment, self.jobs, self.closed, self.ready = environment, [], False, False
        WORKERS.append(self)

    def wait_until_ready(self, seconds: float) -> None:
        self.ready, self.waited = True, seconds

    def perform(self, job: Job, tell: Any, keep_log: Any) -> bool:
        assert self.ready and not self.closed
        self.alone = WORKERS[-1] is self
        self.jobs.append(job)
        values = {"bytes_per_second": 4e12, "flops_per_second": 8e14} if job.part == "ceilings" else {}
        tell(job.row(job.name, figures=values))
        keep_log(f"{job.name} said this")
        return False

    def close(self) -> None:
        self.closed = True


WORKERS: list[WorkerHere] = []


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[WorkerHere]]:
    monkeypatch.setattr(command, "Worker", WorkerHere)
    WORKERS.clear()
    yield WORKERS
    WORKERS.clear()


def full_run(path: Path, minutes: float | None, began: float | None = None) -> tuple[int, dict[str, Any]]:
    options = {"requests": None, "token_budget": 64, "quick": False, "dry_run": False}
    status = measure(argparse.Namespace(parts=list(WEIGHTS), json=path, minutes=minutes, **options), began)
    return status, json.loads(path.read_text())


def test_jobs_of_a_full_run(tmp_path: Path, workers: list[WorkerHere]) -> None:
    """Each has a process, the ceilings once they are known, and caches by which only a second start is a warm one."""
    status, found = full_run(tmp_path / "found.json", 7.5)
    jobs = [job for worker in workers for job in worker.jobs]
    assert status == 0 and found["complete"] and [len(worker.jobs) for worker in workers] == [1] * len(workers)
    assert [(job.part, job.name) for job in jobs] == [(part, name) for part in WEIGHTS for name in WEIGHTS[part]]
    assert [job.ceilings for job in jobs] == [None, *[(4e12, 8e14)] * (len(jobs) - 1)]
    # What imports beside a start makes it slower.
    assert [job.part for worker in workers for job in worker.jobs if worker.alone] == ["start", "drift"]
    assert all(found["logs"][job.part][job.name] == f"{job.name} said this" for job in jobs)
    for name in CACHES:
        caches = {job.part: worker.environment[name] for worker in workers for job in worker.jobs}
        assert caches["attention"] != caches["start"] == caches["steps"] == caches["trace"]


@pytest.mark.parametrize(
    ("asked", "imports", "expected"), [(None, 15.0, 440.0), (None, 50.0, 410.0), (9.0, 50.0, 540.0)]
)
def test_all_is_over_in_eight_minutes_however_long_imports_take(
    asked: float | None, imports: float, expected: float, tmp_path: Path, workers: list[WorkerHere], monkeypatch: Any
) -> None:
    """Unless more time is asked for. Jobs have what is left of it when the first process is ready."""
    given: list[float] = []

    def allowance(parts: Any, seconds: float) -> jobs.Allowance:
        given.append(seconds)
        return jobs.Allowance(parts, seconds)

    monkeypatch.setattr(command, "Allowance", allowance)
    full_run(tmp_path / "found.json", asked, began=time.monotonic() - imports)
    waited = [worker.waited for worker in workers]
    assert max(waited) <= isolated.IMPORTS and all(seconds <= expected for seconds in waited[1:])
    assert given == [pytest.approx(expected, abs=1)] and sum(SECONDS.values()) == 440
    assert asked or expected + imports + isolated.GRACE < 8 * 60 - isolated.GRACE


def test_a_dry_run_goes_through_everything_however_slow_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: list[float] = []
    monkeypatch.setattr(command, "perform", lambda job, tell: seconds.append(job.seconds))
    options = {"minutes": None, "requests": None, "token_budget": 64, "quick": False, "dry_run": True}
    began = time.monotonic() - 10_000
    assert measure(argparse.Namespace(parts=list(WEIGHTS), json=None, **options), began) == 0
    assert len(seconds) == sum(map(len, WEIGHTS.values())) - 1 and min(seconds) > 60, "of four models three"


def test_the_help_has_the_minutes_of_a_full_run(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--help"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert f"default: {sum(SECONDS.values()) / 60:.2f}, with --quick 3, of a dry run 60" in " ".join(
        capsys.readouterr().out.split()
    )


def test_without_time_nothing_is_begun_and_the_status_tells(tmp_path: Path, workers: list[WorkerHere]) -> None:
    status, found = full_run(tmp_path / "found.json", 1e-3)
    left_out = [row for row in found["rows"] if row["name"] in jobs.NEEDED]
    assert {row["text"] for row in found["rows"] if row not in left_out} == {"no time was left"}
    assert status == 1 and {row["state"] for row in left_out} == {"skipped"} and len(left_out) == len(jobs.NEEDED)
    assert left_out[0]["text"] == "no time was left for it: it takes 30 s, 0 s are its"
    assert not any(worker.jobs for worker in workers) and all(worker.closed for worker in workers)
    assert [worker.ready for worker in workers] == [True] + [False] * (len(workers) - 1), (
        "nobody waits for their imports"
    )


@pytest.mark.parametrize(
    ("name", "seconds", "quick", "begun"),
    [
        ("llama-3.2-1b", 29.0, False, False),
        ("llama-3.2-1b", 30.0, False, True),
        ("llama-3.2-1b", 3.0, True, True),
        ("llama-3.1-8b", 3.0, False, True),
        ("llama-3.1-8b", 1.0, False, False),
    ],
)
def test_a_job_that_would_get_nowhere_is_not_begun(name: str, seconds: float, quick: bool, begun: bool) -> None:
    assert a_job(part="steps", name=name, seconds=seconds, quick=quick).has_time is begun


def test_a_full_run_has_time_for_what_its_table_shows() -> None:
    """By what jobs took on an H200, and some seconds for each process: for what is ours, and the peers' samples."""
    took: dict[str, dict[str, float]] = {
        "ceilings": {"ceilings": 7},
        "attention": {"decode": 11, "prefill": 7, "mixed": 4, "fp8": 8, "latent": 12, "rotary": 10, "choice": 5},
        "start": {"start": 42 + 15 + 15},
        "steps": {"tokens": 25, "llama-3.1-8b": 25},
        "trace": {"engine": 40, "generate_batch": 70, "generate": 45},
    }
    took["attention"] |= {"joined": 3, "variants": 15, "tiles": 14, "varlen_attn": 5, "flex_attention": 30}
    now, late = 0.0, []
    allowance = jobs.Allowance(list(SECONDS), sum(SECONDS.values()), clock=lambda: now)
    for part, of_part in took.items():
        for place, name in enumerate(of_part):
            now += 8 if name == "tokens" else 1  # what it imports, of which nothing is there behind a start
            seconds = allowance.of(part, list(WEIGHTS[part])[place:])
            late += [name] if of_part[name] > seconds else []
            now += min(of_part[name], seconds)
    assert late == ["flex_attention"] and allowance.left > SECONDS["drift"]


def test_processes_import_beside_others_and_none_beside_a_start() -> None:
    names = [("attention", "a"), ("attention", "b"), ("start", "c"), ("steps", "d"), ("steps", "e"), ("drift", "f")]
    assert [command._ahead(names, number) for number in range(6)] == [3, 3, 3, 6, 6, 6]


def test_time_begins_when_a_process_is_ready(
    tmp_path: Path, workers: list[WorkerHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first job has all that is its own; later ones share what is left then."""
    now = 0.0

    def imports(worker: WorkerHere, seconds: float) -> None:
        nonlocal now
        now, worker.ready = now + 7.0, True

    monkeypatch.setattr(WorkerHere, "wait_until_ready", imports)
    allowance = partial(jobs.Allowance, clock=lambda: now)
    monkeypatch.setattr(command, "Allowance", allowance)
    full_run(tmp_path / "found.json", sum(SECONDS.values()) / 60)
    made = {job.name: job.seconds for worker in workers for job in worker.jobs}
    assert made["ceilings"] == pytest.approx(SECONDS["ceilings"])
    of_attention = WEIGHTS["attention"]["decode"] / sum(WEIGHTS["attention"].values())
    assert made["decode"] == pytest.approx((SECONDS["ceilings"] + SECONDS["attention"] - 7) * of_attention)


def test_a_bar_that_is_not_reached_is_named(
    tmp_path: Path, workers: list[WorkerHere], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    low = Measure(name="low", bar=1, goal=2, found=0.5, why="2 cells")
    found = (low, Measure(name="right", bar=1, goal=2, found=1))
    monkeypatch.setattr(found_so_far, "measures", lambda rows: found)
    full_run(tmp_path / "found.json", 7.5)
    assert capsys.readouterr().out.splitlines()[-1] == "bar not reached: low: 2 cells"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ended_by_a_signal_it_tells_what_there_is(
    number: int,
    tmp_path: Path,
    workers: list[WorkerHere],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    perform = WorkerHere.perform

    def until_prefill(worker: WorkerHere, job: Job, *where: Any) -> bool:
        if job.name == "prefill":
            os.kill(os.getpid(), number)
        return perform(worker, job, *where)

    monkeypatch.setattr(WorkerHere, "perform", until_prefill)
    handler = signal.getsignal(signal.SIGTERM)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # who is run in the background may ignore it
    try:
        status, found = full_run(tmp_path / "found.json", 7.5)
    finally:
        signal.signal(signal.SIGINT, before)
    assert status == 1 and not found["complete"] and [row["name"] for row in found["rows"]] == ["ceilings", "decode"]
    assert len(workers) == 3 + command.AHEAD and all(worker.closed for worker in workers)
    said = capsys.readouterr().out
    assert "ended by a signal" in said and HEADER in said and signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.parametrize("error", [RuntimeError("out of the blue"), KeyError("figure")])
def test_whatever_ends_a_run_it_prints_its_table(
    error: Exception, tmp_path: Path, workers: list[WorkerHere], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    perform = WorkerHere.perform

    def until_prefill(worker: WorkerHere, job: Job, *where: Any) -> bool:
        if job.name == "prefill":
            raise error
        return perform(worker, job, *where)

    monkeypatch.setattr(WorkerHere, "perform", until_prefill)
    with pytest.raises(type(error)):
        full_run(tmp_path / "found.json", 7.5)
    kept = json.loads((tmp_path / "found.json").read_text())
    assert not kept["complete"] and [row["name"] for row in kept["rows"]] == ["ceilings", "decode"]
    assert HEADER in capsys.readouterr().out and all(worker.closed for worker in workers)


def test_a_file_that_cannot_be_written_does_not_end_a_run(
    tmp_path: Path, workers: list[WorkerHere], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def full(*what: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(found_so_far, "store", full)
    with pytest.raises(FileNotFoundError):  # of this test, which looks for it
        full_run(tmp_path / "found.json", 7.5)
    said = capsys.readouterr().out
    assert "the file is not written: OSError: No space left on device" in said and HEADER in said


@pytest.mark.parametrize("losses", [1, 2])
def test_cells_behind_a_lost_device_go_to_another_process_once(
    losses: int, tmp_path: Path, workers: list[WorkerHere], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, ...]] = []

    def losing(worker: WorkerHere, job: Job, tell: Any, keep_log: Any) -> bool:
        worker.jobs.append(job)
        keep_log(".")
        if job.name != "prefill":
            return False
        worker.close()
        told.append(job.done)
        tell(job.row(f"prefill {len(told)}", state="failed", text="AcceleratorError: CUDA error"))
        return len(told) <= losses

    monkeypatch.setattr(WorkerHere, "perform", losing)
    _, found = full_run(tmp_path / "found.json", 7.5)
    assert told == [(), ("prefill 1",)] and found["logs"]["attention"]["prefill"] == ".."
    lost_for_good = [row["text"] for row in found["rows"] if row["name"] == "prefill"]
    assert lost_for_good == ["the device was lost twice, and what is left not measured"] * (losses - 1)
    assert [job.name for worker in workers for job in worker.jobs].count("mixed") == 1
    assert all(worker.closed for worker in workers)


@pytest.mark.parametrize(
    ("name", "variable", "value"),
    [("rotary", "TORCHINDUCTOR_COMPILE_THREADS", "1"), ("generate", "PYTORCH_ALLOC_CONF", "expandable_segments:True")],
)
def test_jobs_with_an_environment_of_their_own(name: str, variable: str, value: str, tmp_path: Path) -> None:
    for part in WEIGHTS:
        for each in WEIGHTS[part]:
            found = jobs.environment(part, each, tmp_path)
            assert found.get(variable) == (value if each == name else None) and found["HF_HUB_OFFLINE"] == "1"


def test_bytecode_is_kept_for_a_run_where_none_is_kept_beside_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever the environment says of writing it; and only there."""
    here = tmp_path / "beside.pyc"
    monkeypatch.setattr(importlib.util, "cache_from_source", lambda path: str(here))
    found = jobs.environment("start", "start", tmp_path)
    code = "import json, sys; print(sys.dont_write_bytecode)"
    said = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONDONTWRITEBYTECODE": "1"} | found, capture_output=True, text=True
    )
    assert said.stdout == "False\n" and list((tmp_path / "bytecode").rglob("json/__init__.*.pyc"))
    here.touch()
    assert "PYTHONPYCACHEPREFIX" not in jobs.environment("start", "start", tmp_path)
