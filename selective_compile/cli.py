"""The command line: `selective-compile demo | generate | bench | explain | coverage | replay | logit-error`.

Commands import what they need when they run: torch and transformers take seconds, which nobody should wait for who
asks for help, has mistyped an option, or completes a word.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from selective_compile.bench.command import bench_command
from selective_compile.choices import MOST_THREADS, DtypeName
from selective_compile.coverage.command import coverage_command
from selective_compile.interrupts import INTERRUPTED, WORD, ending_at_once, raising
from selective_compile.measuring import logit_error_command
from selective_compile.replaying import replay_command
from selective_compile.terminal import begin, check_file
from selective_compile.version import __version__

ERRORS_OF_WORK = (
    ("selective_compile.runtime.step_loop", "StepError"),
    ("selective_compile.bench.peers", "PeerError"),
    ("torch", "OutOfMemoryError"),
)


@contextmanager
def failures_in_a_line() -> Iterator[None]:
    """What a user can mend is told in words and not by a traceback; a bug still shows where it is."""
    try:
        with raising():
            yield
    except BrokenPipeError:  # whoever read it has seen enough, which typer knows how to end
        raise
    except users_errors() as error:
        fail(str(error))
    except KeyboardInterrupt:
        typer.echo(WORD, err=True)
        raise typer.Exit(INTERRUPTED) from None


def users_errors() -> tuple[type[Exception], ...]:
    """Of those of work, the ones whose modules have been imported: no other can have been raised."""
    of_work = [getattr(sys.modules[module], name) for module, name in ERRORS_OF_WORK if module in sys.modules]
    return ValueError, OSError, *of_work


def fail(message: str) -> None:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(1)


class Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        with failures_in_a_line():
            return super().invoke(ctx)


class Command(TyperCommand):
    def get_short_help_str(self, limit: int = 0) -> str:
        """Whole in the list of commands, on two lines where it does not fit on one."""
        return super().get_short_help_str(limit=1000)


app = typer.Typer(
    cls=Commands,
    help="Serve Hugging Face decoders with selective batching, proved from the model's own graph.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut names of options off, and its paragraphs keep the lines of the source
    context_settings={"help_option_names": ["-h", "--help"]},
)


def tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=tell_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


Model = Annotated[
    str | None,
    typer.Option("--model", help="A folder or a Hugging Face id.", show_default="the model that ships"),
]
Dtype = Annotated[DtypeName, typer.Option(help="Of the weights; auto: as they are stored.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that lies beside the weights.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.")]
Threads = Annotated[
    int | None, typer.Option(min=1, max=MOST_THREADS, help="For torch on the CPU.", show_default="torch's choice")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON in place of text.")]
Record = Annotated[Path | None, typer.Option(help="Write the engine's event log there, for replay.")]
TokenBudget = Annotated[int, typer.Option(min=1, help="Most tokens in one step of the engine.")]


@app.command("demo", cls=Command)
def demo_command(
    model: Model = None,
    requests: Annotated[int, typer.Option(min=1, help="How many.")] = 24,
    seed: Annotated[int, typer.Option(min=0, help="Of the prompts and their arrival.")] = 0,
    picture: Annotated[Path, typer.Option(help="The schedule, as .png or .svg.")] = Path("schedule.png"),
    as_json: Json = False,
    threads: Threads = None,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Use Inductor.")] = True,
    token_budget: TokenBudget = 128,
    kv_tokens: Annotated[
        int | None,
        typer.Option(min=32, help="Slots of KV memory; few: requests are preempted.", show_default="ample"),
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    trust: Trust = False,
    record: Record = None,
) -> None:
    """Serve requests by generate and by the engine; compare tokens, times; draw the schedule.

    Exit status 1 if a token differs; near ties, which the model that ships has none of, are no difference.

    \b
    selective-compile demo
    selective-compile demo --requests 40 --kv-tokens 640 --picture preempted.svg
    selective-compile demo --model Qwen/Qwen2.5-0.5B --dtype float32 --requests 8
    """
    with ending_at_once():
        from selective_compile import checkpoints, demo, tables
        from selective_compile.options import EngineConfig
        from selective_compile.schedule_picture import check_path, write_schedule

    check_path(picture)
    check_file("--record", record)
    config = EngineConfig(
        token_budget=token_budget, max_kv_tokens=kv_tokens, threads=threads, compile=compiled, record=record
    )
    stages, out = begin(threads)
    with stages("loading the model"):
        checkpoint = checkpoints.load(model, dtype=dtype, device=device, trust_remote_code=trust)
    wanted = demo.make_requests(checkpoint, requests, seed)
    prepared = demo.prepare(checkpoint, config, stages)
    if not as_json:
        out.print(Text(f"{prepared.report}\n{tables.graphs_line(prepared.graphs)}\n"), soft_wrap=True)
    outcome = demo.serve(prepared, wanted, stages)
    write_schedule(
        picture,
        outcome.run.records,
        token_budget=token_budget,
        arrivals=outcome.run.arrivals,
        labels=demo.schedule_labels(wanted),
    )
    if as_json:
        typer.echo(tables.demo_json(prepared, outcome, str(picture.absolute())))
    else:
        out.print(tables.demo_tables(prepared, outcome, out.width))
        out.print(Text(tables.demo_summary(prepared, outcome)), soft_wrap=True)
        out.print(Text(f"picture of the schedule: {picture.absolute()}"), soft_wrap=True)
    if not outcome.ok:
        fail("the engine's tokens differ from those of generate")


@app.command("generate", cls=Command)
def generate_command(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="Without any: one a line, from standard input.", show_default=False),
    ] = None,
    model: Model = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 64,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Sample; 0, not with --top-k or --top-p: always the most probable token.",
            show_default="0; 1 with --top-k or --top-p",
        ),
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Sample among this many.", show_default="off")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Sample among this much probability.", show_default="off"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of sampling.")] = 0,
    stream: Annotated[bool, typer.Option("--stream", help="Print the answer as it comes; one prompt only.")] = False,
    as_json: Json = False,
    threads: Threads = None,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compiling pays off for many prompts.")
    ] = False,
    token_budget: TokenBudget = 512,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    trust: Trust = False,
    record: Record = None,
) -> None:
    """Continue prompts, all at once.

    \b
    selective-compile generate "12+7=" "letters c to j:"
    selective-compile generate --stream --temperature 0.8 --seed 3 "the key is in"
    selective-compile generate --model ./checkpoint --json < prompts.txt
    """
    with ending_at_once():
        from selective_compile import checkpoints
        from selective_compile.generating import Prompts, generate_all, generate_streaming
        from selective_compile.options import EngineConfig

    chosen = Prompts.of(
        prompts or lines_of_stdin(),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
    )
    if stream and as_json:
        raise ValueError("--stream must come without --json, got both")
    if stream and len(chosen.texts) > 1:
        raise ValueError(f"--stream must come with one prompt, got {len(chosen.texts)}")
    check_file("--record", record)
    stages, out = begin(threads)
    with stages("loading the model"):
        checkpoint = checkpoints.load(model, dtype=dtype, device=device, trust_remote_code=trust)
    config = EngineConfig(token_budget=token_budget, threads=threads, seed=seed, compile=compiled, record=record)
    if stream:
        for piece in generate_streaming(checkpoint, config, chosen, stages):
            typer.echo(piece, nl=False)
        typer.echo()
        return
    answers = generate_all(checkpoint, config, chosen, stages)
    if as_json:
        typer.echo(json.dumps([answer.as_json() for answer in answers], indent=2))
    else:
        for answer in answers:
            out.print(Text.assemble((answer.prompt, "dim"), (answer.text, "bold")), soft_wrap=True)


@app.command("explain", cls=Command)
def explain_command(
    model: Model = None,
    as_json: Json = False,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    trust: Trust = False,
) -> None:
    """Say what was proved of a model, and what was not, with its source lines.

    Exit status 1 if the model is refused; isolated and sequential ones are served, slowly.

    \b
    selective-compile explain
    selective-compile explain --model mistralai/Mistral-7B-v0.1 --json
    """
    with ending_at_once():
        from selective_compile import checkpoints
        from selective_compile.backend import explain

    stages, out = begin(None)
    with stages("loading the model"):
        loaded = checkpoints.load_model(model, dtype=dtype, device=device, trust_remote_code=trust)
    with stages(f"proving {type(loaded).__name__}"):
        report = explain(loaded)
    if as_json:
        typer.echo(report.to_json())
    else:
        out.print(Text(str(report)), soft_wrap=True)
    if report.verdict == "refused":
        fail("the model is refused")


app.command("bench", cls=Command)(bench_command)
app.command("coverage", cls=Command)(coverage_command)
app.command("replay", cls=Command)(replay_command)
app.command("logit-error", cls=Command)(logit_error_command)


def lines_of_stdin() -> list[str]:
    """Prompts, one a line, empty lines left out; none from a terminal, where nobody would know what it waits for."""
    if sys.stdin is None or sys.stdin.isatty():
        return []
    return [line.rstrip("\r\n") for line in sys.stdin if line.strip()]


def main() -> None:
    app(prog_name="selective-compile")
