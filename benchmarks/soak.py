"""A hundred thousand short requests through the batch manager, with stops, errors and readers that fail: what is left?

    python benchmarks/soak.py --json soak.json            # or: make soak
    python benchmarks/soak.py --type lfm2                 # states in slots; --type qwen4_exp_text: isolated modules

The model that ships, or a tiny one of a type of transformers, and four kinds of requests: a seventh is stopped at a
random moment, a fiftieth brings a processor that raises, for a fiftieth `send_response` raises as if its reader had
gone, the others run to their end. Exit status 1 if a request has not ended exactly once, if a block, a slot or a state,
a request, a thread or a name is left, if the figures of the engine do not add up, or if memory grew by more than 16 MiB
after the first tenth.

Prediction before the first run: 12,000 steps of 8 ms, under three minutes; memory flat within 4 MiB.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import resource
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selective_compile import tiny_model
from selective_compile.backend import compile_step_program
from selective_compile.bench.machine import machine, versions
from selective_compile.coverage.random_model import random_model, vocabulary_of
from selective_compile.options import EngineConfig
from selective_compile.runtime import BatchManager, Engine, InferenceRequest, StepRecord

GROWTH_ALLOWED = 16 * 2**20


class Broken:
    """A logits processor with a mistake."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        raise RuntimeError("a mistake")


class Clients:
    """Ask, read, stop and go away at random; count every response."""

    def __init__(self, requests: int, seed: int, *, vocabulary: int, longest: int) -> None:
        self._seed = seed
        self._draw = random.Random(seed)  # of when requests come and are stopped, for which threads take turns
        self._requests = requests
        self._vocabulary = vocabulary
        self._longest = longest
        self._lock = threading.Lock()
        self._stops: set[int] = set()
        self.made = 0
        self.finals = bytearray(requests)  # of each request; all that is kept takes its place now, or would look lost
        self.ended = 0
        self.errors = 0
        self.lost = 0
        self.memory: list[int] = []
        self.done = threading.Event()

    def get_requests(self, most: int) -> list[InferenceRequest]:
        count = min(most, self._requests - self.made, self._draw.randint(0, 16))
        return [self._one() for _ in range(count)]

    def _one(self) -> InferenceRequest:
        number, draw = self.made, random.Random(f"{self._seed}: {self.made}")
        self.made += 1
        options: dict[str, Any] = {
            "max_new_tokens": draw.randint(1, 12 if draw.random() < 0.8 else 60),
            "eos_token_id": draw.randrange(3, self._vocabulary),
        }
        if draw.random() < 0.02:
            options["logits_processor"] = [Broken()]
        if draw.random() < 0.3:
            options |= {"do_sample": True, "top_k": 20, "seed": number}
        with self._lock:
            if draw.random() < 1 / 7:
                self._stops.add(number)
        shared = [1 + draw.randrange(4)] * draw.choice([0, 16, 32])
        prompt = shared + draw.choices(range(3, self._vocabulary), k=draw.randint(1, 12))
        options["max_new_tokens"] = min(options["max_new_tokens"], self._longest - len(prompt) + 1)
        return InferenceRequest(request_id=number, input_ids=prompt, streaming=draw.random() < 0.5, options=options)

    def send_response(self, request_id: Any, tensors: dict[str, Tensor], is_final: bool, error: str) -> None:
        if is_final:
            self.finals[request_id] += 1
            self.ended += 1
            self.errors += bool(error)
            self._stops.discard(request_id)
            if self.ended % max(1, self._requests // 50) == 0:
                self.memory.append(resident_bytes())
            if self.ended == self._requests:
                self.done.set()
        elif request_id % 50 == 7:
            self.lost += 1
            raise ConnectionError("the reader has gone")

    def poll_stop(self) -> set[int]:
        with self._lock:
            return {number for number in list(self._stops) if self._draw.random() < 0.3}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * resource.getpagesize()


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)  # each of the failures is logged
    if arguments.type is None:
        model, vocabulary = tiny_model.load()[0], 200
    else:
        model = random_model(arguments.type)
        vocabulary = vocabulary_of(model)
    slots = 320 if arguments.type is None else 128
    config = EngineConfig(
        block_size=8, max_kv_tokens=slots, max_requests=64, compile=arguments.compile, token_budget=256
    )
    kinds: Counter[str] = Counter()
    tokens = 0

    def observe(record: StepRecord) -> None:
        nonlocal tokens
        kinds.update(end.finish_reason for end in record.ended)
        tokens += sum(end.tokens for end in record.ended)

    program = compile_step_program(model, config)
    engine = Engine(model, config, program=program, observers=[observe])
    threads = {thread.ident for thread in threading.enumerate()}
    clients = Clients(arguments.requests, arguments.seed, vocabulary=vocabulary, longest=engine.longest)
    began = time.perf_counter()
    with BatchManager(engine, clients.get_requests, clients.send_response, clients.poll_stop, max_active=256):
        while not clients.done.wait(timeout=10):
            print(f"{clients.ended} of {arguments.requests} requests, {engine.stats().steps} steps", flush=True)
    seconds = time.perf_counter() - began
    growth = clients.memory[-1] - clients.memory[len(clients.memory) // 10]
    left = [thread.name for thread in threading.enumerate() if thread.ident not in threads]
    stats = engine.stats()
    wrong = {
        "not ended exactly once": sum(count != 1 for count in clients.finals),
        "blocks left": stats.blocks_used,
        "requests left": stats.running + stats.waiting + len(engine._requests),
        "slots of states left": len(engine._runner._slots._slots),
        "states left": len(getattr(program, "_requests", ())),
        "threads left": len(left),
        "ends that nobody was told of": abs(clients.ended - kinds.total()),
        "tokens that do not add up": abs(stats.tokens_generated - tokens),
        "errors that do not add up": abs(clients.errors - kinds["error"]),
        "bytes grown beyond what is allowed": max(0, growth - GROWTH_ALLOWED),
    }
    engine._scheduler.check()
    found = {
        "type": arguments.type,
        "requests": arguments.requests,
        "seconds": seconds,
        "steps": stats.steps,
        "ends": dict(kinds),
        "readers lost": clients.lost,
        "preemptions": stats.preemptions,
        "tokens reused": stats.tokens_reused,
        "MiB grown after the first tenth": growth / 2**20,
    }
    for name, value in {**found, **wrong}.items():
        print(f"{name}: {value}")
    if arguments.json:
        about = {"machine": machine(), "versions": versions()}
        arguments.json.write_text(json.dumps({**about, **found, "wrong": wrong}, indent=1) + "\n", encoding="utf-8")
    if any(wrong.values()):
        raise SystemExit(f"must all be 0: {', '.join(name for name, count in wrong.items() if count)}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--type", help="A causal model type of transformers, tiny, with random weights.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
