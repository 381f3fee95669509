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
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_parts import command, isolated, jobs
from benchmarks.gpu_parts import found as found_so_far
from benchmarks.gpu_parts.command import measure
from benchmarks.gpu_parts.isolated import Worker
from benchmarks.gpu_parts.jobs import CACHES, ROOT, SECONDS, WEIGHTS, Job
from benchmarks.gpu_parts.measures import HEADER, Measure
from benchmarks.gpu_parts.rows import Row
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
    took["attention"] |= {"joined": 3, "variants": 15, "tiles": 9, "varlen_attn": 5, "flex_attention": 30}
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


def test_a_worker_ends_when_its_parent_has_ended() -> None:
    """With what it started: nobody holds the other end of its output then."""
    seen, held = os.pipe()
    child = f"""
import subprocess, sys, time
from benchmarks.gpu_parts.watching import end_with
end_with(int(sys.argv[1]))
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], pass_fds=[{held}])
print("ready", flush=True)
time.sleep(1000)
"""
    parent = f"""
import os, subprocess, sys
command = [sys.executable, "-c", sys.stdin.read(), str(os.getpid())]
child = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, pass_fds=[{held}])
os.write(1, child.stdout.readline())
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", parent], input=child, cwd=ROOT, capture_output=True, text=True, pass_fds=[held]
    )
    os.close(held)
    assert done.stdout == "ready\n", done.stderr
    assert os.read(seen, 1) == b""
    os.close(seen)


def test_a_worker_hands_on_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Row] = []
    assert not Worker({}).perform(a_job(), rows.append, print)
    names = [
        "copy",
        "bf16 product",
        "a kernel behind another, when that is complete",
        "copy of 64 MB, read and written",
    ]
    assert [(row.name, row.state) for row in rows] == [(name, "measured") for name in names]


def test_a_worker_says_when_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, rows = Worker({}), []
    worker.wait_until_ready()
    began = Path(f"/proc/{worker._process.pid}/maps").read_text()
    assert "libtorch" in began, "it has imported what it needs"
    worker.perform(a_job(), rows.append, print)
    assert [row.state for row in rows] == ["measured"] * 4


@pytest.mark.parametrize(
    ("code", "said"),
    [("raise ImportError('no triton')", "ended with status 1: ImportError: no triton")],
)
def test_a_worker_that_ends_before_it_is_ready_is_named(monkeypatch: pytest.MonkeyPatch, code: str, said: str) -> None:
    start_in_its_place(monkeypatch, code)
    rows: list[Row] = []
    logs: list[str] = []
    worker = Worker({})
    worker.wait_until_ready()
    worker.perform(a_job(), rows.append, logs.append)
    assert [(row.state, row.text) for row in rows] == [("failed", said)]
    assert rows[0].detail == logs[0] and "Traceback" in logs[0] and "no triton" in logs[0]


def start_in_its_place(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """A process of other code than a worker's."""
    started = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **options: started([sys.executable, "-c", code], **options)
    )


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os; os.kill(os.getpid(), 11)", "ended with status -11: it said nothing"),
        ("raise ValueError('no such thing')", "ended with status 1: ValueError: no such thing"),
        (
            "raise ValueError('no such thing\\n\\nSet TORCHDYNAMO_VERBOSE=1 for more')",
            "ended with status 1: ValueError: no such thing",
        ),
        ("import time; time.sleep(60)", "stopped after 0 s"),
    ],
    ids=["fault", "error", "wordy", "hang"],
)
def test_what_ends_a_worker_is_named(monkeypatch: pytest.MonkeyPatch, code: str, said: str) -> None:
    start_in_its_place(monkeypatch, code)
    monkeypatch.setattr(isolated, "GRACE", 0.0)
    rows: list[Row] = []
    Worker({}).perform(a_job(seconds=0.2 if "sleep" in code else 60.0), rows.append, print)
    assert [(row.state, row.text) for row in rows] == [("failed", said)]


def test_a_job_is_the_same_behind_a_pipe() -> None:
    job = a_job(ceilings=(1.0, 2.0), requests=7, done=("decode 1 x 512",))
    assert Job.from_json(job.to_json()) == job


GARBLED = """
import json, sys
print("a library greets")
print("\\nready", flush=True)
job = json.loads(sys.stdin.readline())
row = {"part": job["part"], "name": "copy", "job": job["name"]}
for line in ("it warns", json.dumps({"no": "row"}), "7", json.dumps(row), '{"part": '):
    print(line, flush=True)
sys.stdout.buffer.write(b"\\xff\\n")
print("and an engine, that steps are not captured", file=sys.stderr)
"""


@pytest.mark.parametrize("waits", [True, False])
def test_what_is_no_row_goes_to_the_log(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a job that ends well, too."""
    start_in_its_place(monkeypatch, GARBLED)
    rows: list[Row] = []
    logs: list[str] = []
    worker = Worker({})
    if waits:
        worker.wait_until_ready()
        assert worker._lines.empty(), "the greeting is not taken for what says that it is ready"
    assert not worker.perform(a_job(), rows.append, logs.append)
    assert [(row.name, row.state) for row in rows] == [("copy", "measured")]
    said = ["a library greets", "it warns", '{"no": "row"}', "7", '{"part": ', "\ufffd"]
    assert [line for line in logs[0].splitlines() if line] == [*said, "and an engine, that steps are not captured"]


def test_a_worker_writes_nothing_but_rows_where_they_are_read() -> None:
    """Whatever is imported, by that also which prints on import."""
    code = """
import io, os, runpy, sys
import importlib.abc
class Loud(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in ("torch", "triton"):
            os.write(1, f"greetings of {name}\\n".encode())
sys.meta_path.insert(0, Loud())
sys.argv = ["worker", str(os.getppid())]
runpy.run_module("benchmarks.gpu_parts.worker", run_name="__main__")
"""
    command_line = [sys.executable, "-c", code]
    done = subprocess.run(command_line, cwd=ROOT, input=a_job().to_json(), capture_output=True, text=True)
    ready, *rows = (line for line in done.stdout.splitlines() if line)
    assert ready == isolated.READY and len(rows) == 4 and all(map(Row.from_line, rows)), done.stderr
    assert "greetings of torch" in done.stderr


def test_the_log_is_the_end_of_what_was_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    start_in_its_place(monkeypatch, "import sys; sys.stderr.write('x' * 100_000 + 'the end')")
    logs: list[str] = []
    Worker({}).perform(a_job(), lambda row: None, logs.append)
    assert len(logs[0]) == isolated.LOG and logs[0].endswith("xthe end")


def test_a_log_that_is_read_leaves_the_process_writing_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; sys.stderr.write('one '); sys.stderr.flush(); input(); sys.stderr.write('two')"
    start_in_its_place(monkeypatch, code)
    worker, logs = Worker({}), []
    while worker._log() != "one ":
        time.sleep(0.01)
    worker.perform(a_job(), lambda row: None, logs.append)
    assert logs == ["one two"]


def test_where_a_job_hangs_is_in_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import sys, time
from benchmarks.gpu_parts import jobs, worker
def hang_here(job, tell):
    time.sleep(60)
jobs.perform = hang_here
sys.argv = ["worker", str(__import__("os").getppid())]
worker.main()
"""
    start_in_its_place(monkeypatch, code)
    monkeypatch.setattr(isolated, "GRACE", isolated.GRACE + 20)  # the worker's is not changed
    rows: list[Row] = []
    logs: list[str] = []
    worker = Worker({})
    worker.wait_until_ready()
    threading.Thread(target=end_when_said, args=(worker, "hang_here"), daemon=True).start()
    worker.perform(a_job(seconds=0.1), rows.append, logs.append)
    assert "in hang_here" in logs[0] and rows[0].state == "failed"


def test_a_process_says_where_it_is() -> None:
    """While other threads run; and one that ends before does not."""
    code = """
import sys, threading, time
from benchmarks.gpu_parts.watching import say_where_after
say_where_after(float(sys.argv[1]))
def busy():
    while True:
        sum(range(100))
for _ in range(3):
    threading.Thread(target=busy, daemon=True).start()
def waits_here():
    time.sleep(1000)
if sys.argv[1] == "0.2":
    waits_here()
"""
    command_line = [sys.executable, "-c", code]
    process = subprocess.Popen([*command_line, "0.2"], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline() == "after 0.2 s it is here, the innermost call last:\n"
    while "in waits_here" not in process.stderr.readline():
        pass
    process.kill()
    process.wait()
    process.stderr.close()
    done = subprocess.run([*command_line, "1000"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_a_worker_ends_at_once_when_its_job_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is to come at its exit; with what it started, which holds the other end of the pipe until then."""
    seen, held = os.pipe()
    code = f"""
import atexit, subprocess, sys, time
from benchmarks.gpu_parts import jobs, worker
def done(job, tell):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], pass_fds=[{held}])
    atexit.register(time.sleep, 1000)
    tell(job.row("copy"))
    if job.quick:
        raise ValueError("no such thing")
jobs.perform = done
sys.argv = ["worker", str(__import__("os").getppid())]
worker.main()
"""
    started = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **how: started([sys.executable, "-c", code], **how, pass_fds=[held])
    )
    for quick, said in ((False, []), (True, ["ended with status 1: ValueError: no such thing"])):
        rows: list[Row] = []
        Worker({}).perform(a_job(quick=quick), rows.append, print)
        assert rows[0].name == "copy" and [row.text for row in rows[1:]] == said
    os.close(held)
    assert os.read(seen, 1) == b""
    os.close(seen)


def end_when_said(worker: Worker, what: str) -> None:
    while what not in worker._log():
        time.sleep(0.05)
    worker._process.kill()


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


def test_a_worker_says_that_its_device_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import sys
from benchmarks.gpu_parts import failures, jobs, worker
def lose(job, tell):
    jobs.is_lost = lambda device: True
    jobs.Context(job, tell).failed("prefill 1024", RuntimeError("CUDA error: an illegal memory access"))
jobs.perform = lose
sys.argv = ["worker", str(__import__("os").getppid())]
worker.main()
"""
    start_in_its_place(monkeypatch, code)
    rows: list[Row] = []
    assert Worker({}).perform(a_job(part="attention", name="prefill"), rows.append, print)
    assert [(row.name, row.text) for row in rows] == [
        ("prefill 1024", "RuntimeError: CUDA error: an illegal memory access")
    ]


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
