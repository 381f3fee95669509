"""Whether handing out tokens and calling the server while the next step computes pays (`EngineConfig(overlap=True)`).

    python benchmarks/overlap.py --json overlap.json

The Llama of `make bench` in float32, 64 requests that decode 64 tokens each, served twice in turns, with and without
overlap: to a thread for each request, which makes text of every token (`readers`), and through a batch manager whose
requests stream, with statistics and stops asked for each step (`batch manager`). Tokens a second, medians of the rounds
after one that warms up; and the share of a step that is not the model's run, which is all that any overlap could hide.

Prediction before the first run: on a CPU all cores compute, so that whoever works beside a step takes from it what is
won behind it: a ratio between 0.97 and 1.03 for a model of this size, and a host's share below 5 %. On a GPU the
model's run leaves the CPU free, and the ratio comes to 1 plus the share of readers and callbacks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from selective_compile.backend import Program, compile_step_program
from selective_compile.bench.arguments import benchmark_parser, keep, parsed
from selective_compile.bench.peers import greedy_without_end
from selective_compile.bench.serving import random_decoder
from selective_compile.bench.settings import chosen
from selective_compile.options import EngineConfig
from selective_compile.runtime import BatchManager, Engine, InferenceRequest

Server = Callable[[Engine, list[list[int]], int], None]


def main() -> None:
    arguments = _arguments()
    settings = chosen(quick=arguments.quick)
    model = random_decoder(settings.shape).to(arguments.device)
    slots = arguments.requests * (32 + arguments.tokens)
    config = EngineConfig(
        max_requests=arguments.requests,
        max_kv_tokens=-(-slots // 16) * 16 + 16 * arguments.requests,
        compile=arguments.compile,
        block_reuse=False,
    )
    program = compile_step_program(model, config)
    results = {name: compare(model, config, program, serve, arguments) for name, serve in SERVERS.items()}
    print(f"{'server':14} {'off tokens/s':>13} {'on tokens/s':>13} {'on/off':>7} {'host share off':>15} {'on':>6}")
    for name, found in results.items():
        speeds = f"{found['off']['tokens_per_second']:13.0f} {found['on']['tokens_per_second']:13.0f}"
        shares = f"{found['off']['host_share']:15.1%} {found['on']['host_share']:6.1%}"
        print(f"{name:14} {speeds} {found['ratio']:7.3f} {shares}")
    keep(arguments.json, {"requests": arguments.requests, "tokens": arguments.tokens, **results})


def compare(
    model: Any, config: EngineConfig, program: Program, serve: Server, arguments: argparse.Namespace
) -> dict[str, Any]:
    """In turns, so that whatever else the machine does meets both."""
    rounds: dict[str, list[tuple[float, float]]] = {"off": [], "on": []}
    for number in range(arguments.rounds + 1):
        for name, overlap in (("off", False), ("on", True)) if number % 2 else (("on", True), ("off", False)):
            engine = Engine(model, dataclasses.replace(config, overlap=overlap), program=program)
            rounds[name].append(timed(engine, serve, arguments))
    medians = {
        name: {
            "tokens_per_second": statistics.median(speed for speed, _ in found[1:]),
            "host_share": statistics.median(share for _, share in found[1:]),
            "rounds": [speed for speed, _ in found[1:]],
        }
        for name, found in rounds.items()
    }
    ratios = [on / off for (on, _), (off, _) in zip(rounds["on"][1:], rounds["off"][1:], strict=True)]
    return {**medians, "ratio": statistics.median(ratios)}


def timed(engine: Engine, serve: Server, arguments: argparse.Namespace) -> tuple[float, float]:
    """Tokens a second, and the share of the time in which the model did not run."""
    draw = random.Random(0)
    prompts = [draw.choices(range(engine.vocab_size), k=32) for _ in range(arguments.requests)]
    run, model_seconds = engine._runner.run, [0.0]

    def clocked(step: Any) -> Any:
        started = time.perf_counter()
        logits = run(step)
        engine._runner.stream.mark()()
        model_seconds[0] += time.perf_counter() - started
        return logits

    engine._runner.run = clocked  # type: ignore[method-assign]
    started = time.perf_counter()
    serve(engine, prompts, arguments.tokens)
    seconds = time.perf_counter() - started
    return len(prompts) * arguments.tokens / seconds, 1 - model_seconds[0] / seconds


def to_readers(engine: Engine, prompts: list[list[int]], tokens: int) -> None:
    """A thread for each request, which keeps the text so far, as for a stream of server-sent events."""

    def read(request: Any) -> None:
        text = ""
        for token in request:
            text += bytes([token % 128]).decode()
            json.dumps({"id": request.request_id, "delta": text[-1], "length": len(text)})

    requests = [engine.submit(prompt, greedy_without_end(tokens), number) for number, prompt in enumerate(prompts)]
    readers = [threading.Thread(target=read, args=(request,)) for request in requests]
    for reader in readers:
        reader.start()
    with engine.running():
        for reader in readers:
            reader.join()


def through_batch_manager(engine: Engine, prompts: list[list[int]], tokens: int) -> None:
    queue = [
        InferenceRequest(
            request_id=number, input_ids=prompt, generation_config=greedy_without_end(tokens), streaming=True
        )
        for number, prompt in enumerate(prompts)
    ]
    left = threading.Semaphore(0)

    def get_requests(count: int) -> list[InferenceRequest]:
        taken = queue.copy()
        queue.clear()
        return taken

    errors: list[str] = []

    def send_response(request_id: Any, tensors: dict[str, Any], is_final: bool, error: str) -> None:
        if error:
            errors.append(error)
        else:
            json.dumps({"id": request_id, "tokens": tensors["output_ids"].tolist()})
        if is_final or error:
            left.release()

    with BatchManager(engine, get_requests, send_response, set, json.loads):
        for _ in prompts:
            left.acquire()
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(prompts)} requests failed: {errors[0]}")


SERVERS: dict[str, Server] = {"readers": to_readers, "batch manager": through_batch_manager}


def _arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    return parsed(parser)


if __name__ == "__main__":
    main()
