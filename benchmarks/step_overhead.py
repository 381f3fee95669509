"""What a step costs beside the model's run: looking for changes, planning, inputs, sampling, handing out tokens.

    python benchmarks/step_overhead.py --json benchmarks/results/step_overhead.json

A Llama of 5 million parameters with random weights (hidden 256, 6 layers; then 24 layers of half the width), 16 and 64
requests that decode.  Of each step the seconds in the compiled graph are taken off; medians over the steps, after
those that warm up, and the 99th percentile.  What happens between the parts that are listed is the rest.

Prediction before the first run: the plan, the inputs, sampling and handing out grow with the requests, looking for
changes with the layers; at 16 requests and 6 layers 0.1 ms each, 0.7 ms in all.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

from selective_compile.bench.arguments import benchmark_parser, keep, parsed
from selective_compile.bench.peers import greedy_without_end
from selective_compile.bench.serving import quantile, random_decoder
from selective_compile.bench.settings import DecoderShape
from selective_compile.options import EngineConfig
from selective_compile.runtime import Engine

SHAPES = {
    6: DecoderShape(hidden=256, layers=6, heads=4, kv_heads=2, mlp=704, vocabulary=2048),
    24: DecoderShape(hidden=128, layers=24, heads=2, kv_heads=1, mlp=352, vocabulary=2048),
}
QUICK = {2: DecoderShape(hidden=64, layers=2, heads=4, kv_heads=2, mlp=128, vocabulary=256)}
REQUESTS = (16, 64)
PROMPT, WARM = 32, 20
RUN, CHANGES, SAMPLE = "model", "changes", "sample"
BAR, GOAL = 1.5e-3, 0.5e-3  # at 16 requests and 6 layers


def main() -> None:
    arguments = _arguments()
    found = []
    print(f"{'layers':>6} {'requests':>8} {'model':>8} {'beside it':>10} {'p99':>6}  of which, in ms")
    for layers, shape in (QUICK if arguments.quick else SHAPES).items():
        model = random_decoder(shape)
        for requests in REQUESTS:
            row = {"layers": layers, "requests": requests, **measured(model, requests, arguments)}
            parts = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in row["parts"].items())
            beside, p99 = 1e3 * row["beside"], 1e3 * row["beside_p99"]
            print(f"{layers:6} {requests:8} {1e3 * row[RUN]:8.2f} {beside:10.2f} {p99:6.2f}  {parts}", flush=True)
            found.append(row)
    print(
        f"Milliseconds. The bar is {1e3 * BAR} beside the model with 6 layers and 16 requests, the goal {1e3 * GOAL}."
    )
    keep(arguments.json, {"rows": found})


def measured(model: Any, requests: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Medians over the steps, in seconds."""
    slots = requests * (PROMPT + WARM + arguments.steps + 1)
    config = EngineConfig(
        max_requests=requests,
        max_kv_tokens=-(-slots // 32) * 32 + 32 * requests,
        compile=arguments.compile,
        block_reuse=False,
    )
    engine = Engine(model, config)
    clock = _Clock(engine)
    wanted = greedy_without_end(WARM + arguments.steps)
    for number in range(requests):
        engine.submit([(number + place) % engine.vocab_size for place in range(PROMPT)], wanted)
    for _ in range(WARM):
        engine.step()
    gc.collect()
    gc.freeze()  # what the model and its graph are made of is not looked through in a step
    steps = [clock.step() for _ in range(arguments.steps - 1)]
    gc.unfreeze()
    beside = [each["step"] - each[RUN] for each in steps]
    parts = {name: statistics.median(each[name] for each in steps) for name in steps[0] if name not in ("step", RUN)}
    rest = statistics.median(each["step"] - sum(s for name, s in each.items() if name != "step") for each in steps)
    return {
        RUN: statistics.median(each[RUN] for each in steps),
        "beside": statistics.median(beside),
        "beside_p99": quantile(beside, 0.99),
        "parts": {**parts, "rest": rest},
    }


class _Clock:
    """Stands before the parts of an engine and keeps what each took in a step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seconds: dict[str, float] = {}
        self._ran = 0.0
        for name, owner, method in (
            (CHANGES, engine._runner, "weights_changed"),
            ("plan", engine._scheduler, "schedule"),
            ("inputs", engine._steps._assembler, "assemble"),
            (RUN, engine._program, "_run"),
            ("hand out", engine._steps._publisher, "publish"),
        ):
            self._put_before(name, owner, method)

    def _put_before(self, name: str, owner: Any, method: str) -> None:
        inner = getattr(owner, method)

        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            if name == "hand out":  # from the run to here
                self._seconds[SAMPLE] = started - self._ran
            try:
                return inner(*arguments)
            finally:
                self._ran = time.perf_counter()
                self._seconds[name] = self._ran - started

        setattr(owner, method, timed)

    def step(self) -> dict[str, float]:
        started = time.perf_counter()
        self._engine.step()
        return {"step": time.perf_counter() - started, **self._seconds}


def _arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--steps", type=int, default=400)
    return parsed(parser)


if __name__ == "__main__":
    main()
