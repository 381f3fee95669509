"""What a start takes before the first step: capture, passes, compiling; layers that are alike once or each by itself.

    python benchmarks/startup.py --json benchmarks/results/startup.json
    python benchmarks/startup.py --wide --json benchmarks/results/startup_wide.json

A Llama of 8 and of 32 layers of tiny width, so that weights and their arithmetic take no time, and the graph that an
engine on a GPU compiles, whose layers are joined and left to the library; each start is a process of its own, the first
with no captures kept and nothing in Inductor's cache (cold), the others with what that one left: as engines start by
default (warm), and tracing all the same (traced).
Seconds of the processor and of the clock, without importing.  ``--wide``: one of 1.2 billion parameters, in bfloat16,
whose trials take their time.

Prediction before the first run: each layer by itself takes 0.8 s for capture and passes and 1 s for compiling; once, a
tenth of that beyond the first few layers.  That holds for passes and compiling; capture is Dynamo's, which goes through
every layer in both.  Prediction for captures that are kept: 0.3 of its 8 s at 32 layers, of which a third is reading
the graph, and the rest two runs on a few tokens and what Dynamo guards; to keep one takes a cold start 0.5 s more.
Prediction for trials that are kept: of a wide one's 4 s, the 0.4 that it takes to read 2.5 GB of weights once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from selective_compile import compiling, isolation, passes, programs, rewriting, step_program
from selective_compile.bench.arguments import benchmark_parser, keep, parsed
from selective_compile.bench.serving import random_decoder
from selective_compile.bench.settings import DecoderShape
from selective_compile.options import EngineConfig
from selective_compile.passes import retrace
from selective_compile.passes.lower import lower
from selective_compile.passes.merge import merge
from selective_compile.programs import compile_step_program

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script knows its own folder alone
from benchmarks.phases import timed, watched

LAYERS, WIDE, QUICK = (8, 32), (16,), (7,)
TINY: dict[str, Any] = {"hidden": 64, "heads": 4, "kv_heads": 2, "mlp": 128, "vocabulary": 256}
OF_A_BILLION: dict[str, Any] = {"hidden": 2048, "heads": 32, "kv_heads": 8, "mlp": 8192, "vocabulary": 128256}
QUICK_STARTS = {False: ("cold", "warm", "traced"), True: ("cold",)}  # does it run?
CALLED = {f"{rewriting.__name__}.{name}": "capture" for name in ("capture", "capture_once")}
CALLED |= {f"{rewriting.__name__}.rewrite": "passes", f"{step_program.__name__}.compiled": "compiling"}
CALLED |= {f"{programs.__name__}.join": "joining", f"{isolation.__name__}.tried": "trials"}
STARTS = {"cold": True, "warm": True, "traced": False}  # whether captures are kept, and taken
PARTS = (*dict.fromkeys(CALLED.values()), "all")


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--start", type=int, help=argparse.SUPPRESS)  # of so many layers, in this very process
    parser.add_argument("--wide", action="store_true", help="one of 1.2 billion parameters, its layers compiled once")
    parser.add_argument("--each", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--trace", action="store_true", help=argparse.SUPPRESS)
    arguments = parsed(parser)
    if arguments.start:
        options = {"each": arguments.each, "inductor": arguments.compile, "keep_captures": not arguments.trace}
        print(json.dumps(started(arguments.start, wide=arguments.wide, **options)))
        return
    print(f"{'layers':>6} {'alike':>6} {'start':>6}" + "".join(f"{part:>16}" for part in PARTS))
    rows = []
    for layers in QUICK if arguments.quick else WIDE if arguments.wide else LAYERS:
        for each in (False,) if arguments.wide else (False, True):
            with tempfile.TemporaryDirectory() as folder:
                for start in QUICK_STARTS[each] if arguments.quick else STARTS:
                    found = in_process(layers, each, folder, arguments, keep_captures=STARTS[start])
                    rows.append({"layers": layers, "each": each, "start": start, **found})
                    times = "".join(f"{cpu:8.1f}{clock:8.1f}" for cpu, clock in (found[part] for part in PARTS))
                    print(f"{layers:6} {'each' if each else 'once':>6} {start:>6}{times}", flush=True)
    print("Seconds of the processor and of the clock.")
    keep(arguments.json, {"rows": rows})


def in_process(
    layers: int, each: bool, folder: str, arguments: argparse.Namespace, *, keep_captures: bool
) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__)), "--start", str(layers), *(["--each"] if each else [])]
    command += ([] if keep_captures else ["--trace"]) + (["--wide"] if arguments.wide else [])
    command += ["--threads", str(arguments.threads)] if arguments.threads else []
    command += [] if arguments.compile else ["--no-compile"]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder, "XDG_CACHE_HOME": folder}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, encoding="utf-8")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def started(
    layers: int, *, wide: bool, each: bool, inductor: bool, keep_captures: bool
) -> dict[str, tuple[float, float]]:
    """Seconds of the processor and of the clock, by part."""
    passes.REWRITES = tuple(each for each in passes.REWRITES if each[1] not in (lower, merge))
    model = random_decoder(DecoderShape(layers=layers, **(OF_A_BILLION if wide else TINY)))
    model = model.bfloat16() if wide else model
    config = EngineConfig(implementation="triton", compile=inductor, keep_captures=keep_captures)
    if each:
        retrace.repeats = lambda *_: []
        compiling.cut = lambda *_: None
    with watched(CALLED) as found:
        found["all"] = timed(lambda: compile_step_program(model, config))[1]
    return found


if __name__ == "__main__":
    main()
