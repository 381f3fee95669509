"""The processes of a run on a GPU: what they hand on, and how they end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks.gpu_parts import isolated
from benchmarks.gpu_parts.isolated import Worker
from benchmarks.gpu_parts.jobs import ROOT, Job
from benchmarks.gpu_parts.rows import Row
from tests.gpu_job import a_job


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
