"""One system prompt of 1,000 tokens before 64 requests: work of prefill and time to first token, by reuse of blocks.

    python benchmarks/shared_prefix.py --json prefix.json

The Llama of `make bench` in float32; every request has 16 tokens of its own and gets 16, all are there at the start.
The bar: prefill falls by at least 0.9 of the shared tokens, the median time to first token by a factor of at least 5.

Prediction before the first run: 63 x 992 of 64,640 tokens are not computed, which leaves 3 %; the median request then
waits for one prompt and half of the others' 16 tokens in place of for 32 prompts: a factor of about 15. It takes about
three minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
from typing import Any

from selective_compile.backend import Program, compile_step_program
from selective_compile.bench.arguments import benchmark_parser, keep, parsed
from selective_compile.bench.serving import random_decoder, serve
from selective_compile.bench.settings import chosen
from selective_compile.bench.trace import Asked, Trace
from selective_compile.options import EngineConfig
from selective_compile.runtime import Engine

OWN, NEW = 16, 16


def main() -> None:
    arguments = _arguments()
    settings = chosen(quick=arguments.quick)
    shared = 96 if arguments.quick else arguments.shared
    model = random_decoder(settings.shape)
    config = EngineConfig(
        token_budget=settings.token_budget, max_requests=64, max_kv_tokens=64 * 1100, compile=arguments.compile
    )
    program = compile_step_program(model, config)
    runs: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for turn in range(arguments.rounds + 1):
        trace = one_prefix(shared, arguments.requests, settings.shape.vocabulary, seed=turn)
        for reuse in (False, True):
            figures = measure(model, dataclasses.replace(config, block_reuse=reuse), program, trace)
            if turn:  # the first warms up
                runs[reuse].append(figures)
    without, with_reuse = (medians(runs[reuse]) for reuse in (False, True))
    saved = (without["tokens_computed"] - with_reuse["tokens_computed"]) / (arguments.requests * shared)
    factor = without["first_token_p50"] / with_reuse["first_token_p50"]
    met = saved >= 0.9 and factor >= 5
    print(f"without reuse: {without}\nwith reuse:    {with_reuse}")
    print(f"prefill saved: {saved:.3f} of the shared tokens; median time to first token: {factor:.1f} times shorter")
    print(f"bar 0.9 and 5: {'met' if met else 'MISSED'}")
    found = {"saved": saved, "first_token_factor": factor, "without": without, "with": with_reuse}
    keep(arguments.json, {"requests": arguments.requests, "shared": shared, **found})


def one_prefix(shared: int, requests: int, vocabulary: int, seed: int) -> Trace:
    draw = random.Random(seed)
    system = draw.choices(range(vocabulary), k=shared)
    prompts = [[*system, *draw.choices(range(vocabulary), k=OWN)] for _ in range(requests)]
    return Trace(requests=tuple(Asked(prompt_ids=prompt, new_tokens=NEW, arrival=0.0) for prompt in prompts))


def measure(model: Any, config: EngineConfig, program: Program, trace: Trace) -> dict[str, Any]:
    engine = Engine(model, config, program=program)
    run = serve(engine, trace)
    return {
        "tokens_computed": engine.stats().tokens_computed,
        "first_token_p50": run.quantile("first_token", 0.5),
        "first_token_p99": run.quantile("first_token", 0.99),
        "seconds": run.seconds,
    }


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def _arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--shared", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    return parsed(parser)


if __name__ == "__main__":
    main()
