"""The run: job after job, a line and a file that grow with every row, and the exit status."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

from benchmarks.gpu_parts.failures import FAILURES, detail, reason
from benchmarks.gpu_parts.found import Found
from benchmarks.gpu_parts.isolated import GRACE, IMPORTS, Worker
from benchmarks.gpu_parts.jobs import NEEDED, SECONDS, WEIGHTS, Allowance, Job, environment, perform
from benchmarks.gpu_parts.measures import HEADER
from benchmarks.gpu_parts.rows import NO_TIME

QUICK_MODELS = ("llama-3.2-1b", "qwen3-0.6b")
TINY_MODELS = ("llama-3.1-8b", "llama-3.2-1b", "qwen3-moe-small")  # the other is of the same layers
# Seconds of a run from its start to its end, with its imports and those of its first process, if no time is asked for:
# it has to be over in eight minutes, and to free a device's memory takes some of them.
WHOLE = 470.0
AHEAD = 2  # jobs whose processes import what they need beside another one, of which some take less time than that


def measure(arguments: argparse.Namespace, began: float | None = None) -> int:
    """The exit status. However it ends, it tells what there is by then, and ends its workers.

    Args:
        began: when this process did, by `time.monotonic`.
    """
    found = Found(arguments.json, dry_run=arguments.dry_run, quick=arguments.quick)
    parts = [part for part in SECONDS if part in arguments.parts]
    jobs = Jobs(arguments, found, parts, time.monotonic() if began is None else began)
    try:
        with _sigterm_interrupts(), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as caches:
            if arguments.dry_run:
                _in_this_process(jobs, found)
            else:
                _one_after_another(jobs, found, Path(caches))
        found.complete()
    except KeyboardInterrupt:
        print("ended by a signal, before all was measured")
    finally:
        _summarise(found)
    return 1 if found.failures or not found.is_complete else 0


def _summarise(found: Found) -> None:
    print("", HEADER, *(measure.line for measure in found.measures), "", sep="\n")
    for row in found.failures:
        print(f"failed: {row.part}: {row.name}: {row.text}")
    for missed in found.measures:
        if missed.reached == "neither":
            print(f"bar not reached: {missed.name}: {missed.why}")
    sys.stdout.flush()


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """The first one, so that whatever is entered is left; another one would keep it from that."""

    def interrupt(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _names(arguments: argparse.Namespace, parts: list[str]) -> list[tuple[str, str]]:
    models = TINY_MODELS if arguments.dry_run else QUICK_MODELS if arguments.quick else tuple(WEIGHTS["steps"])
    every = [(part, name) for part in parts for name in WEIGHTS[part]]
    return [(part, name) for part, name in every if part != "steps" or name in ("tokens", *models)]


class Jobs:
    """Each made when it is its turn, by the time that is left and the ceilings that are known.

    Attributes:
        names: of all of them, (part, name).
    """

    def __init__(self, arguments: argparse.Namespace, found: Found, parts: list[str], began: float) -> None:
        self.names = _names(arguments, parts)
        self._arguments, self._found, self._parts, self._began = arguments, found, parts, began

    @cached_property
    def _allowance(self) -> Allowance:
        """Its time begins with the first job, whose process is ready by then."""
        arguments = self._arguments
        if arguments.minutes is not None:
            seconds = 60 * arguments.minutes
        elif arguments.dry_run:
            seconds = 3600.0  # which is of what runs, however slow the machine is
        else:
            left = WHOLE - 2 * GRACE - (time.monotonic() - self._began)
            seconds = min(left, 180.0 if arguments.quick else sum(SECONDS.values()))
        return Allowance(self._parts, seconds)

    @property
    def seconds_left(self) -> float:
        """Of all jobs together."""
        return self._allowance.left

    def make(self, number: int) -> Job:
        part, name = self.names[number]
        arguments = self._arguments
        return Job(
            part=part,
            name=name,
            seconds=self._allowance.of(part, [other for of, other in self.names[number:] if of == part]),
            ceilings=self._found.ceilings,
            quick=arguments.quick,
            tiny=arguments.dry_run,
            requests=arguments.requests or (3 if arguments.dry_run else 32 if arguments.quick else 256),
            token_budget=arguments.token_budget,
            start_model="llama-3.2-1b" if arguments.quick else "llama-3.1-8b",
        )


def _one_after_another(jobs: Jobs, found: Found, caches: Path) -> None:
    """Each in a process that was started beside the jobs before it, since half of a short one is importing; but not
    beside a start, which is of the host's time. A job's time begins when its process is ready."""
    workers: list[Worker] = []

    def start_up_to(end: int) -> None:
        workers.extend(Worker(environment(*each, caches)) for each in jobs.names[len(workers) : end])

    try:
        for number, (part, name) in enumerate(jobs.names):
            start_up_to(number + 1)
            if number == 0:
                found.look_at_devices("before")
                workers[number].wait_until_ready(IMPORTS)
            elif jobs.make(number).has_time:
                workers[number].wait_until_ready(min(IMPORTS, jobs.seconds_left))
            start_up_to(_ahead(jobs.names, number))
            if _performed(workers[number], jobs.make(number), found):
                workers[number] = Worker(environment(part, name, caches))
                _go_on(workers[number], jobs, number, found)
            if all(other != part for other, _ in jobs.names[number + 1 :]):
                found.look_at_devices(f"after {part}")
    finally:
        for worker in workers:
            worker.close()


def _ahead(names: list[tuple[str, str]], number: int) -> int:
    """Behind the last job whose process is to be there beside that one: none comes behind a start until it is over."""
    end = number + 1
    while end < len(names) and end - number <= AHEAD and names[end - 1][0] != "start":
        end += 1
    return end


def _performed(worker: Worker, job: Job, found: Found) -> bool:
    """Whether the device was lost, and the cells behind that are to be measured by another process."""
    if not job.has_time:
        if job.can_be_left_out:
            text = f"{NO_TIME} for it: it takes {NEEDED[job.name]:.0f} s, {job.seconds:.0f} s are its"
            found.tell(job.row(job.name, state="skipped", text=text))
        else:
            found.tell(job.row(job.name, state="failed", text=NO_TIME))
        worker.close()
        return False
    return worker.perform(job, found.tell, partial(found.keep_log, job.part, job.name))


def _go_on(worker: Worker, jobs: Jobs, number: int, found: Found) -> None:
    """Once: what takes the device from two processes takes it from a third."""
    worker.wait_until_ready(min(IMPORTS, max(0.0, jobs.seconds_left)))
    job = jobs.make(number)
    if _performed(worker, replace(job, done=found.names_told(job.part, job.name)), found):
        found.tell(job.row(job.name, state="failed", text="the device was lost twice, and what is left not measured"))


def _in_this_process(jobs: Jobs, found: Found) -> None:
    for number in range(len(jobs.names)):
        job = jobs.make(number)
        try:
            perform(job, found.tell)
        except FAILURES as error:
            found.tell(job.row(job.name, state="failed", text=reason(error), detail=detail(error)))
