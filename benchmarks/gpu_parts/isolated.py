"""Jobs in processes of their own: what one does to its device, or how long it hangs, ends with it."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import IO

from benchmarks.gpu_parts.failures import said_in
from benchmarks.gpu_parts.jobs import ROOT, Job
from benchmarks.gpu_parts.rows import STOPPED, Row

GRACE = 5.0  # seconds beyond those of a job, which looks at the time itself
READY = "ready"  # a worker's line when it has imported what it needs
LOST = 75  # the status of a worker whose device is of no more use to it
# Seconds for a process's imports, of which only those right behind a start are not over by then: ten where files were
# read before, several times as many where they were not.
IMPORTS = 60.0
ENDING = 3.0  # seconds at least for a process to end that has told all: to free a device's memory takes some
LOG = 8000  # characters that are kept of what a process printed


class Worker:
    """A process that gets its job when it has imported what it needs, from when on its time counts."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """`environment` comes on top of this process's own."""
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu_parts.worker", str(os.getpid())],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            errors="replace",
            start_new_session=True,
            encoding="utf-8",
        )
        assert self._process.stdout is not None
        self._strays = ""  # what it printed among its rows
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=read_lines, args=(self._process.stdout, self._lines), daemon=True).start()

    def wait_until_ready(self, seconds: float = IMPORTS) -> None:
        """Until it has imported what it needs, or has ended, or takes longer: its job fails by that, then."""
        ends = time.monotonic() + seconds
        with contextlib.suppress(queue.Empty):
            while (line := self._lines.get(timeout=max(0.0, ends - time.monotonic()))) is not None:
                if line.strip() == READY:
                    return
                self._strays += line
            self._lines.put(None)

    def perform(self, job: Job, tell: Callable[[Row], None], keep_log: Callable[[str], None]) -> bool:
        """Hand on the job's rows as they come, and one more if it fails or takes too long; then end the process, and
        hand on the end of what it printed besides.

        Returns:
            It ended since its device was lost, which the row of that cell says; another may go on with the others.
        """
        try:
            failure = self._followed(job, tell)
            if failure is not None and self._process.poll() != LOST:
                tell(job.row(job.name, state="failed", text=failure, detail=self._log()))
            return self._process.poll() == LOST
        finally:
            keep_log(self._log())
            self.close()

    def _followed(self, job: Job, tell: Callable[[Row], None]) -> str | None:
        """How the job failed, or None."""
        assert self._process.stdin is not None
        ends = time.monotonic() + job.seconds + GRACE
        with contextlib.suppress(BrokenPipeError):  # its status says more
            self._process.stdin.write(job.to_json() + "\n")
            self._process.stdin.close()
        try:
            while (line := self._lines.get(timeout=max(0.0, ends - time.monotonic()))) is not None:
                if (row := Row.from_line(line)) is not None:
                    tell(row)
                elif line.strip() != READY:  # of who was not waited for
                    self._strays += line
            status = self._process.wait(timeout=max(ENDING, ends - time.monotonic()))
        except (queue.Empty, subprocess.TimeoutExpired):
            return f"{STOPPED} {job.seconds + GRACE:.0f} s"
        return f"ended with status {status}: {said_in(self._log())}" if status else None

    def close(self) -> None:
        """End the process, and those that it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._errors.close()

    def _log(self) -> str:
        """The end of what it printed: among its rows, and to its error output."""
        errors = self._errors.fileno()  # whose place is that of the process, too, which may go on writing there
        said = os.pread(errors, LOG, max(0, os.fstat(errors).st_size - LOG))
        return (self._strays.lstrip() + said.decode(errors="replace"))[-LOG:]


def read_lines(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    """Each as it comes, and None behind the last."""
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)
