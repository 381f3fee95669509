"""Requests that end long before they must: throughput by what a request is admitted with.

    python benchmarks/policies.py --json policies.json

The Llama of `make bench` in float32, its weights made so that it counts through its vocabulary. Each of 64 requests
may generate 400 tokens and ends after 100 on average, at the token that it is told to end with. "guaranteed_no_evict"
keeps blocks for all that may come, "max_utilization" admits by what is there and pauses requests when blocks run short;
there are blocks for six requests in full. The tokens must be the same under both; only the second may pause anybody.

Prediction before the first run: six requests at a time by guarantees, about 40 without; a step of 40 rows takes twice
as long as one of six: three times the throughput.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import time
from typing import Any

from selective_compile.backend import Program, compile_step_program
from selective_compile.bench.arguments import benchmark_parser, keep, parsed
from selective_compile.bench.serving import random_decoder
from selective_compile.bench.settings import chosen
from selective_compile.bench.walking import cycles, walking
from selective_compile.options import EngineConfig
from selective_compile.runtime import Engine

POLICIES = ("guaranteed_no_evict", "max_utilization")
PROMPT, MEAN = 32, 100


def main() -> None:
    arguments = _arguments()
    settings = chosen(quick=arguments.quick)
    most = settings.shape.positions // 2 if arguments.quick else 400
    model = walking(random_decoder(settings.shape))
    config = EngineConfig(
        token_budget=settings.token_budget,
        max_requests=64,
        max_kv_tokens=(3 if arguments.quick else 6) * (PROMPT + most),
        block_reuse=False,
        compile=arguments.compile,
    )
    program = compile_step_program(model, config)
    runs: dict[str, list[dict[str, Any]]] = {policy: [] for policy in POLICIES}
    for turn in range(arguments.rounds + 1):
        tokens = []
        for policy in POLICIES:
            way = dataclasses.replace(config, scheduler_policy=policy)
            found = measure(model, way, program, arguments.requests, most=most, seed=turn)
            tokens.append(found.pop("tokens"))
            if turn:  # the first warms up
                runs[policy].append(found)
        assert tokens[0] == tokens[1], "a pause has changed tokens"
    results = {
        policy: {name: statistics.median(run[name] for run in of_policy) for name in of_policy[0]}
        for policy, of_policy in runs.items()
    }
    assert results["guaranteed_no_evict"]["preemptions"] == 0
    for policy, found in results.items():
        print(f"{policy:20}", ", ".join(f"{name} {value:,.1f}" for name, value in found.items()))
    ratio = results["max_utilization"]["tokens_per_second"] / results["guaranteed_no_evict"]["tokens_per_second"]
    met = ratio > 1 and results["max_utilization"]["preemptions"] > 0
    print(f"max_utilization over guaranteed_no_evict: {ratio:.2f}, tokens the same")
    print(f"bar above 1, with pauses: {'met' if met else 'MISSED'}")
    keep(arguments.json, {"requests": arguments.requests, "ratio": ratio, **results})


def measure(
    model: Any, config: EngineConfig, program: Program, requests: int, *, most: int, seed: int
) -> dict[str, Any]:
    draw = random.Random(seed)
    engine = Engine(model, config, program=program)
    asked = [a_walk(draw, program.vocab_size, most) for _ in range(requests)]
    started = time.perf_counter()
    handles = [
        engine.submit(prompt, max_new_tokens=most, do_sample=False, eos_token_id=end, request_id=number)
        for number, (prompt, end) in enumerate(asked)
    ]
    while engine.step():
        pass
    seconds = time.perf_counter() - started
    stats = engine.stats()
    return {
        "tokens": [handle.result().tokens for handle in handles],
        "tokens_per_second": stats.tokens_generated / seconds,
        "steps": stats.steps,
        "preemptions": stats.preemptions,
    }


def a_walk(draw: random.Random, vocabulary: int, most: int) -> tuple[list[int], int]:
    """A prompt, and the token that ends what follows."""
    length = min(most, 1 + int(draw.expovariate(1 / MEAN)))
    last = draw.randrange(cycles(vocabulary), vocabulary - most)
    return [*draw.choices(range(vocabulary), k=PROMPT - 1), last], last + length


def _arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    return parsed(parser)


if __name__ == "__main__":
    main()
