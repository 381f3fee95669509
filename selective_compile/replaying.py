"""`selective-compile replay`."""

from __future__ import annotations

import dataclasses
import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from selective_compile.choices import DtypeName
from selective_compile.interrupts import ending_at_once
from selective_compile.terminal import begin, check_file

if TYPE_CHECKING:
    from selective_compile.runtime.replay import Replayed
    from selective_compile.runtime.stats import StepObserver, StepRecord


def replay_command(
    log: Annotated[Path, typer.Argument(help="What --record or EngineConfig(record=...) wrote.", show_default=False)],
    model: Annotated[
        str | None,
        typer.Option("--model", help="The one of the log: a folder or an id.", show_default="the one that ships"),
    ] = None,
    schedule_only: Annotated[bool, typer.Option("--schedule-only", help="Batches alone; needs no model.")] = False,
    record: Annotated[Path | None, typer.Option(help="Write the log of the replay there.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the schedule there, as .png or .svg.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the steps there for chrome://tracing and Perfetto.")] = None,
    compiled: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Use Inductor.", show_default="as in the log")
    ] = None,
    dtype: Annotated[DtypeName, typer.Option(help="Of the weights; auto: as they are stored.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.")] = "cpu",
    trust: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that lies beside the weights.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of text.")] = False,
) -> None:
    """Serve a recorded run again, at the times of the log, and compare every batch and token.

    Exit status 1 at the first difference. Tokens are those of one machine: on another, two logits that are closer than
    its rounding may change places; --schedule-only takes them from the log.

    \b
    selective-compile generate --record run.jsonl "12+7=" "letters c to j:"
    selective-compile replay run.jsonl
    selective-compile replay run.jsonl --schedule-only --picture run.svg --trace run.json
    """
    if not log.is_file():
        raise ValueError(f"the log must be a file, got {str(log)!r}")
    with ending_at_once():
        from selective_compile import checkpoints
        from selective_compile.runtime.replay import EventLog, replay_schedule
        from selective_compile.runtime.replay_engine import replay_engine
        from selective_compile.runtime.trace_file import TraceFile
        from selective_compile.schedule_picture import write_schedule

    check_files(log, picture=picture, record=record, trace=trace)
    if record is not None and schedule_only:
        raise ValueError("--record must not come with --schedule-only, which serves nothing")
    events = EventLog.read(log)
    stages, out = begin()
    records: list[StepRecord] = []
    with ExitStack() as stack:
        observers: list[StepObserver] = [records.append]
        if trace is not None:
            observers.append(stack.enter_context(TraceFile(trace)).observe)
        if schedule_only:
            with stages("deciding again"):
                replayed = replay_schedule(events, observers)
        else:
            with stages("loading the model"):
                loaded = checkpoints.load_model(model, dtype=dtype, device=device, trust_remote_code=trust)
            config = events.config if compiled is None else dataclasses.replace(events.config, compile=compiled)
            steps = sum(1 for _ in events.named("planned"))
            with stages("serving again", steps) as advance:
                replayed = replay_engine(
                    events, loaded, config=config, record=record, observers=observers, progress=advance
                )
    if picture is not None:
        write_schedule(picture, records, token_budget=events.config.token_budget, arrivals=events.arrivals)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(replayed), indent=1))
    else:
        out.print(Text(summary(replayed, schedule_only=schedule_only)), soft_wrap=True)
        for name, path in (("picture of the schedule", picture), ("trace", trace)):
            if path is not None:
                out.print(Text(f"{name}: {path.absolute()}"), soft_wrap=True)
    if replayed.difference is not None:
        raise ValueError(f"the replay must be what was recorded, got a difference: {replayed.difference}")


def check_files(log: Path, *, picture: Path | None, **others: Path | None) -> None:
    """Raises ValueError where something would be written that cannot be, or over the log."""
    from selective_compile.schedule_picture import check_path

    if picture is not None:
        check_path(picture)
    for name, path in others.items():
        if path is not None and path.resolve() == log.resolve():
            raise ValueError(f"--{name} must be another file than the log, got {str(path)!r}")
        check_file(f"--{name}", path)


def summary(replayed: Replayed, *, schedule_only: bool) -> str:
    counts = f"{replayed.requests} requests, {replayed.steps} steps, {replayed.tokens} tokens"
    if replayed.difference is not None:
        return counts
    return f"{counts}: the same batches{'' if schedule_only else ' and tokens'}"
