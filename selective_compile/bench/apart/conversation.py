"""A peer that serves traces in a process of its own: a trace as a line of JSON comes in, what came of it goes out.

Run by the python of the peer's own environment, where there may be neither torch nor this package:

    python conversation.py serve_openvino '{"folder": ..., "dtype": ..., "threads": ..., ...}'

The module named first makes the server. The first line that goes out says what it is.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, Protocol


class Server(Protocol):
    """Another engine, by the names that this one needs of it."""

    def about(self) -> dict[str, Any]:
        """Attention, precision of weights and keys, version, and what else a reader must know."""

    def add(self, number: int, prompt_ids: list[int], new_tokens: int) -> None:
        """Greedy, and exactly so many tokens."""

    def step(self) -> Iterator[tuple[int, list[int]]]:
        """Run an iteration; the numbers and tokens of requests that have ended."""


def served(server: Server, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Serve each when it arrives; seconds from the first arrival, and for each request its tokens and its own."""
    waiting = list(enumerate(requests))
    tokens: list[list[int]] = [[] for _ in requests]
    latencies = [0.0] * len(requests)
    running = 0
    began = time.perf_counter()
    while waiting or running:
        while waiting and waiting[0][1]["arrival"] <= time.perf_counter() - began:
            number, asked = waiting.pop(0)
            server.add(number, asked["prompt_ids"], asked["new_tokens"])
            running += 1
        if not running:
            time.sleep(max(0.0, waiting[0][1]["arrival"] - (time.perf_counter() - began)))
            continue
        for number, found in server.step():
            tokens[number] = found
            latencies[number] = time.perf_counter() - began - requests[number]["arrival"]
            running -= 1
    return {"seconds": time.perf_counter() - began, "tokens": tokens, "latencies": latencies}


def main() -> None:
    # Whatever the engine prints goes to where errors go.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    server = importlib.import_module(sys.argv[1]).server(**json.loads(sys.argv[2]))
    print(json.dumps(server.about()), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(served(server, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
