"""One model type measured in a process of its own, which may hang, crash or run out of memory."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import transformers

from selective_compile.coverage.measure import Facts, measure, without_machine
from selective_compile.coverage.trial import Trial

MEMORY = 12 << 30  # bytes that a process may allocate: a table that no rule made small must not take the machine


def work(model_type: str, trial: Trial, send: Connection, errors: str) -> None:
    """The process: sends facts as they come; what it says on standard error goes to the file ``errors``.

    Of Ctrl-C its parent tells it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for facts in measure(model_type, trial):
        send.send(facts)


@dataclass(kw_only=True)
class Job:
    """A running process and what it has said so far."""

    model_type: str
    process: ForkServerProcess
    receive: Connection
    errors: Path
    deadline: float
    facts: Facts

    @staticmethod
    def start(context: ForkServerContext, model_type: str, trial: Trial, limit: float, folder: Path) -> Job:
        receive, send = context.Pipe(duplex=False)
        errors = folder / f"{model_type}.txt"
        process = context.Process(target=work, args=(model_type, trial, send, str(errors)), daemon=True)
        process.start()
        send.close()
        return Job(
            model_type=model_type,
            process=process,
            receive=receive,
            errors=errors,
            deadline=time.monotonic() + limit,
            facts={},
        )

    def take(self) -> bool:
        """One message, or its end: True when the process has nothing more to say."""
        try:
            self.facts |= self.receive.recv()
        except EOFError:
            return True
        return False

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def stop(self) -> None:
        """Whatever it is doing."""
        self.process.kill()
        self.process.join()
        self.receive.close()

    def finish(self) -> Facts:
        """All facts; ``failure`` says why there are no more, unless all were measured."""
        late = self.late and "seconds" not in self.facts
        if late:
            self.process.kill()
        self.process.join()
        self.receive.close()
        if late:
            return self.facts | {"failure": {"stage": stage(self.facts), "error": "took longer than the time limit"}}
        if self.process.exitcode != 0 or "seconds" not in self.facts:
            return self.facts | {
                "failure": {"stage": stage(self.facts), **last_words(self.errors, self.process.exitcode)}
            }
        return self.facts


def stage(facts: Facts) -> str:
    """What was being done after ``facts`` were known."""
    if "engine" in facts or facts.get("verdict") == "refused":
        return "padded call"
    for key, following in (("verdict", "engine"), ("causal", "compile"), ("class", "oracle")):
        if key in facts:
            return following
    return "build"


def last_words(errors: Path, exitcode: int | None) -> dict[str, Any]:
    """The error that ended a process, in one line, and the innermost line of code that its traceback names.

    Messages of Dynamo go on for many lines and quote tracebacks themselves.
    """
    lines = [
        line.rstrip() for line in errors.read_text(errors="replace", encoding="utf-8").splitlines() if line.strip()
    ]
    raised = [
        index for index, line in enumerate(lines) if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Divergence)\b", line)
    ]
    frames = [line for line in lines[: raised[-1]] if line.startswith("  File ")] if raised else []
    if not frames:
        return {"error": f"the process ended with {exitcode}", "source_line": ""}
    _, path, place = frames[-1].split('"')[:3]
    number = place.split(",")[1].replace("line", "").strip()
    return {"error": lines[raised[-1]], "source_line": f"{without_machine(path)}:{number}"}
