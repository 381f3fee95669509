"""Steps a second of an engine alone, and beside processes that keep the cores busy, with and without `SharedCores`.

    python benchmarks/shared_cores.py --json result.json

All in turns, medians of the rounds.  Beside as many busy processes as there are cores half of the speed is what a fair
share of the cores allows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from selective_compile.bench.machine import machine, versions
from selective_compile.options import EngineConfig
from selective_compile.runtime.engine import Engine
from selective_compile.runtime.request import Request
from selective_compile.shared_cores import SharedCores

REQUESTS = 16


def main() -> None:
    arguments = _arguments()
    engine = _engine(arguments)
    _steps_per_second(engine, arguments.seconds)
    found: dict[str, list[float]] = {name: [] for name in ("alone", "spinning", "sleeping")}
    for _ in range(arguments.rounds):
        found["alone"].append(_steps_per_second(engine, arguments.seconds))
        with _busy(arguments.processes):
            with mock.patch.object(SharedCores, "look", lambda self: None):
                found["spinning"].append(_steps_per_second(engine, arguments.seconds))
            _steps_per_second(engine, 2)  # until it is noticed
            found["sleeping"].append(_steps_per_second(engine, arguments.seconds))
        _steps_per_second(engine, arguments.calm)  # until it is noticed that nobody else is there
    rates = {name: statistics.median(values) for name, values in found.items()}
    print(f"steps a second: {rates['alone']:.0f} alone; beside {arguments.processes} busy processes")
    print(f"{rates['spinning']:.0f} with threads that spin, {rates['sleeping']:.0f} with threads that sleep")
    if arguments.json:
        content = {"machine": machine(), "versions": versions(), "steps_per_second": rates, "rounds": found}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _engine(arguments: argparse.Namespace) -> Engine:
    """Of 5 million parameters, so that a step has many short operations."""
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    sizes = (
        {"hidden_size": 64, "num_hidden_layers": 1} if arguments.quick else {"hidden_size": 256, "num_hidden_layers": 6}
    )
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(intermediate_size=688, vocab_size=1000, **heads, **sizes)).eval()
    return Engine(model, EngineConfig(max_kv_tokens=8192, compile=arguments.compile))


def _steps_per_second(engine: Engine, seconds: float) -> float:
    requests: list[Request] = []
    begin, steps = time.perf_counter(), 0
    while (took := time.perf_counter() - begin) < seconds:
        requests = [request for request in requests if not request.finished]
        missing = REQUESTS - len(requests)
        requests += [engine.submit([1, 2, 3, 4, 5], max_new_tokens=64, do_sample=False) for _ in range(missing)]
        engine.step()
        steps += 1
    for request in requests:
        request.cancel()
    return steps / took


@contextmanager
def _busy(count: int) -> Iterator[None]:
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, help="of torch's; default: as torch chooses")
    parser.add_argument("--processes", type=int, default=2, help="that keep cores busy; default: 2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4, help="of each measurement")
    parser.add_argument("--calm", type=float, default=5, help="seconds between rounds")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    return parser.parse_args()


if __name__ == "__main__":
    main()
