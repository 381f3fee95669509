"""Starts to the first token, each a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks.gpu_parts import (
    start,
)
from benchmarks.gpu_parts.jobs import Context
from benchmarks.gpu_parts.rows import Row
from tests.gpu_job import a_job


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
