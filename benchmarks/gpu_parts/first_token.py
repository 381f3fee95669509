"""A process that gets to its first token, and says when it had come how far.

    python -m benchmarks.gpu_parts.first_token MODEL STARTED SECONDS [--tiny]

STARTED: when it was started, in seconds since the epoch. SECONDS: it is ended then, and says before where it is. What
anything else prints goes to its error output.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import time

TRACED = "graphs traced"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("started", type=float)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("selective_compile").setLevel(logging.INFO)  # why a capture was not taken, say
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(0.5, arguments.seconds - 0.5))
    stamps = {}

    def stamp(stage: str) -> None:
        stamps[stage] = time.time() - arguments.started

    import torch

    from benchmarks.gpu_parts.models import random_model
    from selective_compile.bench.peers import greedy_without_end
    from selective_compile.options import EngineConfig
    from selective_compile.runtime.engine import Engine

    stamp("imports")
    model = random_model(arguments.model, torch.device("cpu" if arguments.tiny else "cuda"), tiny=arguments.tiny)
    stamp("weights")
    engine = Engine(model, EngineConfig(max_kv_tokens=2048))
    stamp("engine")
    next(iter(engine.submit(range(100), greedy_without_end(2))))
    stamp("first token")
    from torch._dynamo.utils import counters

    print(json.dumps(stamps | {TRACED: counters["stats"]["unique_graphs"]}), file=out, flush=True)


if __name__ == "__main__":
    main()
