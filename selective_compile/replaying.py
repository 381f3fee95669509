"""`selective-compile replay`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from selective_compile import checkpoints
from selective_compile.progress import ProgressBars
from selective_compile.runtime.replay import EventLog, Replayed, replay_schedule
from selective_compile.runtime.replay_engine import replay_engine
from selective_compile.tables import console


def replay_command(
    log: Annotated[Path, typer.Argument(help="What --record or EngineConfig(record=...) wrote.", show_default=False)],
    model: Annotated[
        str | None,
        typer.Option("--model", help="The one of the log: a folder or an id.", show_default="the one that ships"),
    ] = None,
    schedule_only: Annotated[bool, typer.Option("--schedule-only", help="Batches alone; needs no model.")] = False,
    record: Annotated[Path | None, typer.Option(help="Write the log of the replay there.")] = None,
    compiled: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Use Inductor.", show_default="as in the log")
    ] = None,
    dtype: Annotated[checkpoints.DtypeName, typer.Option(help="Of the weights; auto: as they are stored.")] = "auto",
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
    selective-compile replay run.jsonl --schedule-only --json
    """
    events = EventLog.read(log)
    stages = ProgressBars(console(stderr=True))
    if schedule_only:
        with stages("deciding again"):
            replayed = replay_schedule(events)
    else:
        with stages("loading the model"):
            loaded = checkpoints.load_model(model, dtype=dtype, device=device, trust_remote_code=trust)
        config = events.config if compiled is None else dataclasses.replace(events.config, compile=compiled)
        steps = sum(1 for _ in events.named("planned"))
        with stages("serving again", steps) as advance:
            replayed = replay_engine(events, loaded, config=config, record=record, progress=advance)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(replayed), indent=1))
    else:
        console().print(Text(summary(replayed, schedule_only=schedule_only)), soft_wrap=True)
    if replayed.difference is not None:
        raise ValueError(f"the replay must be what was recorded, got a difference: {replayed.difference}")


def summary(replayed: Replayed, *, schedule_only: bool) -> str:
    counts = f"{replayed.requests} requests, {replayed.steps} steps, {replayed.tokens} tokens"
    if replayed.difference is not None:
        return counts
    return f"{counts}: the same batches{'' if schedule_only else ' and tokens'}"
