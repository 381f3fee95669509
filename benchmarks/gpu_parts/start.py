"""From the start of a process to its first token: with nothing compiled before, and with all that on disk, as engines
start by default and with the capture on disk, too.

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

KEPT = "kept-capture"
# Whether the engine keeps its capture. That one is kept may cost the cold start a second.
STARTS = {"cold": True, "warm": False, KEPT: True}


def run(context: Context) -> None:
    """In this process's caches; of a dry run, which has none, in some of its own."""
    if not context.tiny:
        start_thrice(context, os.environ)
        return
    with tempfile.TemporaryDirectory() as folder:
        start_thrice(context, os.environ | caches_in(Path(folder)))


def start_thrice(context: Context, environment: Mapping[str, str]) -> None:
    for name, keep in STARTS.items():
        try:
            stamps = first_token(context, environment, keep=keep)
            traced = stamps.pop(TRACED)
            if context.tiny and traced != (name != KEPT):
                raise ValueError(f"a start must trace one graph, and a {KEPT} one none, got {traced} in the {name} one")
        except (subprocess.SubprocessError, ValueError) as error:
            context.fail(f"{context.job.start_model}, {name} start", reason(error))
            return
        figures = {"seconds": stamps["first token"], "stamps": stamps}
        stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in stamps.items())
        text = f"{stamps['first token']:9.1f} s  ({stages}; {TRACED}: {traced})"
        context.tell(context.job.row(f"{context.job.start_model}, {name} start", figures=figures, text=text))


def first_token(context: Context, environment: Mapping[str, str], *, keep: bool) -> dict[str, float]:
    """Seconds from the start of a process to each of its stages, and how many graphs it `TRACED`; the next one finds
    what it compiled and captured.

    Raises:
        subprocess.SubprocessError: it took too long.
        ValueError: it failed.
    """
    command = [sys.executable, "-m", "benchmarks.gpu_parts.first_token", context.job.start_model]
    command += [str(time.time()), *(["--keep"] if keep else []), *(["--tiny"] if context.tiny else [])]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=max(1.0, context.seconds_left)
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise ValueError(f"the process must end well, got status {done.returncode}: {''.join(last)}")
    return dict(json.loads(done.stdout.splitlines()[-1]))
