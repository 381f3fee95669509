"""Static against in-flight batching over arrival rates: throughput and latency, as in figure 10 of Orca (OSDI 2022).

    python benchmarks/arrival_rates.py --json rates.json --picture rates.png

The Llama of `make bench` in float32; one trace of 48 requests (prompts log-uniform in 8-512 tokens, outputs in 8-256)
arrives as a Poisson process, at rates from a tenth to one and a half of what in-flight batching finishes per second
with all requests there from the start. Latency is from a request's arrival to its last token; normalised, it is
divided by the number of its tokens.

Prediction before the first run: at low rates both have the latency of a request alone; from about a third of that rate
on static batches queue, since a batch lasts as long as its longest answer and nobody joins it: throughput 2 to 3 times
lower at saturation, p50 latency 3 to 10 times higher in between. It takes about ten minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from selective_compile.backend import compile_step_program
from selective_compile.bench.arguments import benchmark_parser, keep, parsed
from selective_compile.bench.serving import TraceRun, random_decoder, serve
from selective_compile.bench.settings import chosen
from selective_compile.bench.trace import Trace, make_trace
from selective_compile.options import EngineConfig
from selective_compile.runtime import Engine

MODES = {"static": "static", "in-flight": "inflight_fused"}
SHARES = (0.1, 0.2, 0.33, 0.5, 0.75, 1.0, 1.5)
COLOURS = {"static": "#b3002d", "in-flight": "#2b6cb0"}


def main() -> None:
    arguments = _arguments()
    settings = chosen(quick=arguments.quick, requests=arguments.requests, compile=arguments.compile)
    trace = make_trace(settings)
    model = random_decoder(settings.shape)
    config = EngineConfig(
        token_budget=settings.token_budget,
        max_requests=arguments.batch,
        max_kv_tokens=arguments.batch * 1024,
        compile=settings.compile,
        block_reuse=False,  # or every run but the first would find its prompts computed
    )
    program = compile_step_program(model, config)

    def run(batching: str, one: Trace) -> TraceRun:
        return serve(Engine(model, dataclasses.replace(config, batching=batching), program=program), one)

    run("inflight_fused", trace)  # warms up
    saturated = {name: run(batching, trace) for name, batching in MODES.items()}
    most = saturated["in-flight"].requests_per_second
    ratio = most / saturated["static"].requests_per_second
    print(f"all at once: in-flight {most:.2f} requests a second, {ratio:.2f} times static", flush=True)
    results = []
    print(f"{'rate':>8} {'batching':10} {'tokens/s':>9} {'p50':>8} {'p99':>8}  seconds", flush=True)
    for share in SHARES[::3] if arguments.quick else SHARES:
        arriving = trace.arriving(share * most, settings.seed)
        for name, batching in MODES.items():
            results.append(figures(name, share * most, run(batching, arriving)))
            print("{rate:8.2f} {batching:10} {tokens_per_second:9.1f} {p50:8.2f} {p99:8.2f}".format(**results[-1]))
    about = {"settings": dataclasses.asdict(settings), "batch": arguments.batch}
    keep(arguments.json, {**about, "throughput_ratio_saturated": ratio, "results": results})
    if arguments.picture:
        draw(results, arguments.picture)


def figures(name: str, rate: float, run: TraceRun) -> dict[str, Any]:
    return {
        "batching": name,
        "rate": rate,
        "tokens_per_second": run.tokens_per_second,
        "requests_per_second": run.requests_per_second,
        "p50": run.quantile("total", 0.5),
        "p99": run.quantile("total", 0.99),
        "normalised_p50": run.quantile("total", 0.5, per_token=True),
        "first_token_p50": run.quantile("first_token", 0.5),
        "first_token_p99": run.quantile("first_token", 0.99),
    }


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Median normalised latency over throughput, as Orca has it; and latency over the arrival rate."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for name in MODES:
        rows = [row for row in results if row["batching"] == name]
        colour = COLOURS[name]
        throughput = [row["requests_per_second"] for row in rows]
        left.plot(throughput, [1e3 * row["normalised_p50"] for row in rows], "o-", color=colour, label=name)
        rates = [row["rate"] for row in rows]
        right.plot(rates, [row["p50"] for row in rows], "o-", color=colour, label=f"{name}, p50")
        right.plot(rates, [row["p99"] for row in rows], "s--", color=colour, label=f"{name}, p99", alpha=0.6)
    left.set(xlabel="throughput, requests a second", ylabel="median latency for each token, ms", yscale="log")
    right.set(xlabel="arrivals, requests a second", ylabel="latency of a request, s", yscale="log")
    for axes in (left, right):
        axes.grid(which="both", alpha=0.25)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.tick_params(axis="y", which="minor", labelsize=7)
        axes.legend(frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.savefig(path, dpi=150)


def _arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--batch", type=int, default=16, help="most requests in a step, or in a static batch")
    parser.add_argument("--picture", type=Path)
    return parsed(parser)


if __name__ == "__main__":
    main()
