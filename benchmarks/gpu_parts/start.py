"""From the start of a process to its first token: with nothing captured or compiled before, and with all that on disk.

Weights are made at random on the device, which takes the place of loading them. The device's own caches of what it
compiled from a kernel's intermediate code are the driver's, and may be warm. What a process of a start prints goes to
the error output of this one.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts.failures import reason, said_in
from benchmarks.gpu_parts.first_token import PHASES, TRACED
from benchmarks.gpu_parts.isolated import ENDING, read_lines
from benchmarks.gpu_parts.jobs import ROOT, Context, caches_in

GRAPHS = {"cold start": 1, "warm start": 0, "warm start, again": 0}  # that each start traces
AGAIN = "warm start, again"
LOG = 3000  # characters of what each prints, so that the log of a job has room for all


def run(context: Context) -> None:
    """In this process's caches; of a dry run, which has none, in some of its own."""
    if not context.tiny:
        start_each(context, os.environ)
        return
    with tempfile.TemporaryDirectory() as folder:
        start_each(context, os.environ | caches_in(Path(folder)))


def start_each(context: Context, environment: Mapping[str, str]) -> None:
    """The last one, again, if it has time for as long as the one before it."""
    seconds = 0.0
    for start, graphs in GRAPHS.items():
        name = f"{context.job.start_model}, {start}"
        if start == AGAIN and seconds > context.seconds_left:
            context.skip(name, f"the one before it took {seconds:.0f} s, {context.seconds_left:.0f} s are left")
            return
        try:
            stamps = first_token(context, environment)
            traced, phases = int(stamps.pop(TRACED)), stamps.pop(PHASES)
            if context.tiny and traced != graphs:
                raise ValueError(f"a {start} must trace {graphs} graphs, got {traced}")
        except (OSError, ValueError) as error:
            context.fail(name, reason(error))
            return
        seconds = stamps["first token"]
        figures = {"seconds": seconds, "stamps": stamps, "traced": traced, PHASES: phases}
        stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in stamps.items())
        text = f"{stamps['first token']:9.1f} s  ({stages}; {TRACED}: {traced})"
        context.tell(context.job.row(name, figures=figures, text=text))


def first_token(context: Context, environment: Mapping[str, str]) -> dict[str, Any]:
    """Seconds from the start of a process to each of its stages, how many graphs it `TRACED`, and what the
    `PHASES` of the last two took; the next one finds what it compiled and captured. It is ended when it has told them,
    with the processes that it started, since how long these take to end is no part of it.

    Raises:
        ValueError: it took too long, or failed.
    """
    seconds = max(1.0, context.seconds_left)
    command = [sys.executable, "-m", "benchmarks.gpu_parts.first_token", context.job.start_model]
    command += [str(os.getpid()), str(time.time()), str(seconds), *(["--tiny"] if context.tiny else [])]
    with tempfile.TemporaryFile("w+", errors="replace", encoding="utf-8") as errors:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            start_new_session=True,
            encoding="utf-8",
        )
        try:
            line = _first_line(process, seconds)
        finally:
            if process.returncode is None:  # nobody has waited for it, so that the number is still its own
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()  # until the device's memory is free again
            errors.seek(0)
            said = errors.read()
            sys.stderr.write(said[-LOG:])
    if line is None:
        raise ValueError(f"the process must end well, got status {process.returncode}: {said_in(said)}")
    return dict(json.loads(line))


def _first_line(process: subprocess.Popen[str], seconds: float) -> str | None:
    """None: it ended, or is about to, without one.

    Raises:
        ValueError: it took too long.
    """
    assert process.stdout is not None
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=read_lines, args=(process.stdout, lines), daemon=True).start()
    try:
        line = lines.get(timeout=seconds)
    except queue.Empty:
        raise ValueError(f"there must be a token in {seconds:.0f} s, there was none") from None
    if line is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=ENDING)
    return line
