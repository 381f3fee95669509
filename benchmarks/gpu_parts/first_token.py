"""A process that gets to its first token, and says when it had come how far.

    python -m benchmarks.gpu_parts.first_token MODEL PARENT STARTED SECONDS [--tiny]

PARENT: the process that it ends with. STARTED: when it was started, in seconds since the epoch. SECONDS: it is ended
then, and says before where it is. What anything else prints goes to its error output.

Behind the line that says it, it ends at once: what comes at exit is no part of a start, and torch waits there for its
processes that compile, which once took longer than all before. The next start finds what it needs: a capture is
written when it is made (`kept_captures.save`), what Inductor and Triton compile before its first call, and of what
torch registers for its exit nothing writes to a cache but for a dump that an environment variable has to ask for.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import sys
import time
from typing import Any

from benchmarks.gpu_parts.watching import end_with, say_where_after

TRACED, PHASES = "graphs traced", "phases"
# Of an engine's making and of its first step, one within another: by the names that their callers know.
FUNCTIONS = {
    "selective_compile.runtime.model_runner.compile_step_program": "the program",
    "selective_compile.programs.prove": "proofs",
    "selective_compile.rewriting.capture_once": "capture",
    "selective_compile.rewriting.rewrite": "passes",
    "selective_compile.isolation.one_token_refusal": "steps of one token",
    "selective_compile.programs.step_program": "the step",
    "selective_compile.programs.join": "joining",
    "selective_compile.programs.fuse_rotary": "fusing rotary",
    "selective_compile.step_program.LiveWeights": "the weights that are live",
    "selective_compile.joined_weights.joined": "moving weights",
    "selective_compile.joined_weights.give_back_memory": "memory of the device given back",
    "selective_compile.step_program.compiled": "compiling",
    "selective_compile.compiling.cut": "cutting layers",
    "selective_compile.compiling.compile_fx": "Inductor",
    "selective_compile.compiling.give_back_memory": "memory given back",
    "selective_compile.runtime.engine_parts.ModelRunner": "the runner",
    "selective_compile.runtime.model_runner.DeviceChooser": "the chooser",
    "selective_compile.runtime.model_runner.allocate_pools": "pools",
}
LONGEST = 12  # of torch's own phases, which are told beside them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("parent", type=int)
    parser.add_argument("started", type=float)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("selective_compile").setLevel(logging.INFO)  # why a capture was not taken, say
    faulthandler.enable()
    end_with(arguments.parent)
    say_where_after(max(0.5, arguments.seconds - 0.5))
    stamps = {}

    def stamp(stage: str) -> None:
        stamps[stage] = time.time() - arguments.started

    import torch

    from benchmarks.gpu_parts.models import random_model
    from benchmarks.phases import watched
    from selective_compile import Engine, EngineConfig
    from selective_compile.bench.peers import greedy_without_end

    stamp("imports")
    model = random_model(arguments.model, torch.device("cpu" if arguments.tiny else "cuda"), tiny=arguments.tiny)
    stamp("weights")
    # A dry run compiles nothing: it has a C++ compiler's half minute for that, and no GPU.
    less: dict[str, Any] = {"compile": False, "implementation": "reference"} if arguments.tiny else {}
    with watched(FUNCTIONS) as phases:
        engine = Engine(model, EngineConfig(max_kv_tokens=2048, **less))
        stamp("engine")
        next(iter(engine.submit(range(100), greedy_without_end(2))))
    stamp("first token")
    from torch._dynamo import utils

    found = {TRACED: utils.counters["stats"]["unique_graphs"]}
    own = {phase: clock for phase, (_, clock) in phases.items()}
    torchs = {f"torch: {name}": sum(times) for name, times in utils.compilation_time_metrics.items()}
    longest = sorted(torchs, key=torchs.__getitem__, reverse=True)[:LONGEST]
    told = {PHASES: own | {name: torchs[name] for name in longest}}
    print(json.dumps(stamps | found | told), file=out, flush=True)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
