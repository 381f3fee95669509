"""`selective-compile bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from selective_compile.bench import settings
from selective_compile.choices import MOST_THREADS
from selective_compile.interrupts import ending_at_once
from selective_compile.terminal import begin, check_file

if TYPE_CHECKING:
    from selective_compile.bench.figures import Figures

Rate = Annotated[
    float | None, typer.Option(help="Requests per second, arriving.", show_default="what the engine can do")
]


def bench_command(
    model: Annotated[str, typer.Option(help=f"Sizes, of {', '.join(settings.MODELS)}; or all.")] = "125m",
    trace: Annotated[str, typer.Option(help=f"What is asked, of {', '.join(settings.TRACES)}; or all.")] = "skewed",
    peers: Annotated[str, typer.Option(help=f"Which to run, of {', '.join(settings.PEERS)}; or all.")] = ",".join(
        settings.QUICK_PEERS
    ),
    dtypes: Annotated[str, typer.Option(help="Of weights and keys.")] = ",".join(settings.DTYPES),
    modes: Annotated[str, typer.Option(help=f"Of {', '.join(settings.MODES)}: at once, over time.")] = "saturated",
    requests: Annotated[int | None, typer.Option(min=1, help="How many.", show_default="as the trace has")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed ones, after one that warms up.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, lengths, prompts and arrivals.")] = 0,
    arrival_rate: Rate = None,
    token_budget: Annotated[int, typer.Option(min=1, help="Most tokens in one step of a peer.")] = 512,
    threads: Annotated[
        int | None, typer.Option(min=1, max=MOST_THREADS, help="Of all peers.", show_default="all cores")
    ] = None,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Use Inductor in the engine.")] = True,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.")] = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes, one round: does it run?")] = False,
    out_file: Annotated[Path | None, typer.Option("--out", help="JSON; other results in it are kept.")] = None,
    plot: Annotated[Path | None, typer.Option(help="A folder for pictures of the results.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Run nothing: print, and plot, what --out has.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of text.")] = False,
) -> None:
    """Measure speed, waiting times and memory next to generate, generate_batch and other engines.

    Models of known sizes with random weights. The peers run in turns, each in a process of its own, all in memory at
    the same time. It wants a quiet machine and half an hour or more for each model, trace and dtype.

    OpenVINO GenAI and vLLM run in virtual environments of their own, made the first time.

    A peer that fails is named, the others go on; exit status 1 then.

    \b
    selective-compile bench --out result.json --plot pictures
    selective-compile bench --peers engine,openvino --model 0.5b --trace alone --dtypes bfloat16
    selective-compile bench --peers all --model 135m,1b --trace all --out result.json
    selective-compile bench --show --out result.json
    selective-compile bench --quick
    """
    check_file("--out", out_file)
    if show and (out_file is None or not out_file.exists()):
        got = "none" if out_file is None else repr(str(out_file))
        raise ValueError(f"--show must come with an --out that exists, got {got}")
    with ending_at_once():
        from selective_compile.bench.figures import stored
        from selective_compile.bench.peers import PeerError

    kept = {} if out_file is None else stored(out_file)
    runs = [
        settings.chosen(
            quick=quick,
            model=each_model,
            trace=each_trace,
            requests=requests,
            rounds=rounds,
            seed=seed,
            dtypes=settings.listed(dtypes),
            modes=settings.listed(modes),
            peers=settings.listed(peers, settings.PEERS),
            arrival_rate=arrival_rate,
            token_budget=token_budget,
            threads=threads or settings.all_cores(),
            compile=compiled,
            device=device,
        )
        for each_model in settings.listed(model, settings.MODELS)
        for each_trace in settings.listed(trace, settings.TRACES)
    ]
    results = kept if show else measured(runs, kept, out_file)
    tell(results, out_file, plot, as_json)
    failed = [f"{peer} in {name}" for name, result in results.items() for peer in result["failed"]]
    if failed and not show:
        raise PeerError(f"failed: {', '.join(failed)}")


def measured(runs: list[settings.BenchSettings], kept: dict[str, Figures], out_file: Path | None) -> dict[str, Figures]:
    """The results of these runs; written, beside those kept, as soon as each is there."""
    with ending_at_once():
        from selective_compile.bench.figures import store
        from selective_compile.bench.rounds import run_benchmark

    stages, _ = begin()
    results: dict[str, Figures] = {}
    for each in runs:
        for name, figures in run_benchmark(each, stages):
            results[name] = figures
            if out_file is not None:
                store(out_file, {**kept, **results})
    return results


def tell(results: dict[str, Figures], out_file: Path | None, plot: Path | None, as_json: bool) -> None:
    from selective_compile.bench.plots import draw_results
    from selective_compile.bench.table import result_tables
    from selective_compile.tables import console

    pictures = [] if plot is None else draw_results(results, plot)
    if as_json:
        typer.echo(json.dumps({"results": results}, indent=1))
        return
    out = console()
    out.print(result_tables(results))
    if out_file is not None:
        out.print(Text(f"figures: {out_file.absolute()}"), soft_wrap=True)
    for path in pictures:
        out.print(Text(f"picture: {path.absolute()}"), soft_wrap=True)
