"""From the start of a process to its first token: with nothing captured or compiled before, and with all that on disk.

Weights are made at random on the device, which takes the place of loading them. The device's own caches of what it
compiled from a kernel's intermediate code are the driver's, and may be warm.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.gpu_parts.first_token import TRACED
from benchmarks.gpu_parts.jobs import ROOT, Context, caches_in
from benchmarks.gpu_parts.rows import reason

GRAPHS = {"cold": 1, "warm": 0}  # that each start traces


def run(context: Context) -> None:
    """In this process's caches; of a dry run, which has none, in some of its own."""
    if not context.tiny:
        start_twice(context, os.environ)
        return
    with tempfile.TemporaryDirectory() as folder:
        start_twice(context, os.environ | caches_in(Path(folder)))


def start_twice(context: Context, environment: Mapping[str, str]) -> None:
    for name, graphs in GRAPHS.items():
        try:
            stamps = first_token(context, environment)
            traced = stamps.pop(TRACED)
            if context.tiny and traced != graphs:
                raise ValueError(f"a {name} start must trace {graphs} graphs, got {traced}")
        except (subprocess.SubprocessError, ValueError) as error:
            context.fail(f"{context.job.start_model}, {name} start", reason(error))
            return
        figures = {"seconds": stamps["first token"], "stamps": stamps}
        stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in stamps.items())
        text = f"{stamps['first token']:9.1f} s  ({stages}; {TRACED}: {traced})"
        context.tell(context.job.row(f"{context.job.start_model}, {name} start", figures=figures, text=text))


def first_token(context: Context, environment: Mapping[str, str]) -> dict[str, float]:
    """Seconds from the start of a process to each of its stages, and how many graphs it `TRACED`; the next one finds
    what it compiled and captured.

    Raises:
        subprocess.SubprocessError: it took too long.
        ValueError: it failed.
    """
    command = [sys.executable, "-m", "benchmarks.gpu_parts.first_token", context.job.start_model]
    command += [str(time.time()), *(["--tiny"] if context.tiny else [])]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=max(1.0, context.seconds_left)
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise ValueError(f"the process must end well, got status {done.returncode}: {''.join(last)}")
    return dict(json.loads(done.stdout.splitlines()[-1]))
