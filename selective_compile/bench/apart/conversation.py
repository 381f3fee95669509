"""A peer that serves traces in a process of its own: a trace as a line of JSON comes in, what came of it goes out.

Run by the python of the peer's own environment, where there may be neither torch nor this package:

    python conversation.py serve_openvino '{"folder": ..., "dtype": ..., "threads": ..., ...}'

The module named first makes the server. The first line that goes out says what it is.

**Memory** is that of this process, as the kernel counts it: `VmHWM`, the most that was ever resident, less `VmRSS`
before the model is loaded and after everything is imported. So it has the weights, in however many copies, what
loading, compiling and serving take besides, and as much of the pools of keys and values as was ever touched; it has
neither the code of the libraries nor the compilers that are run as other processes. The mark is reset, where the kernel
lets a process do so, before loading, so that importing does not count, and before each run, so that what loading alone
took can be told from what serving takes. A page that is mapped from a file counts while it is resident, as in `top`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a server is to be.

    Attributes:
        folder: of the checkpoint, as the server wants it.
        slots: of keys and values in its pool, each of `slot_bytes`; they suffice for all requests of a trace at once.
        longest: tokens that a request can have in the end.
        reuse: whether requests may find each other's beginnings computed.
    """

    folder: str
    dtype: str
    threads: int
    slots: int
    slot_bytes: int
    longest: int
    token_budget: int
    reuse: bool


class Loaded(Protocol):
    """What every server is. Made, it has imported all that it needs."""

    def load(self) -> None: ...

    def about(self) -> dict[str, Any]:
        """Attention, version, and what else a reader must know."""


class Server(Loaded, Protocol):
    """Another engine, by the names that this one needs of it."""

    def add(self, number: int, prompt_ids: list[int], new_tokens: int) -> None:
        """Greedy, and exactly so many tokens."""

    def step(self) -> Iterator[tuple[int, list[int], bool]]:
        """Run an iteration; of requests that got tokens or ended, number, new tokens, and whether they have ended."""


Made = TypeVar("Made", bound=Loaded)


def served(server: Server, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Serve each when it arrives.

    Returns:
        seconds from the first arrival, and for each request its tokens, and when each was there, in seconds from the
        request's arrival: at the end of the iteration that gave it.
    """
    waiting = list(enumerate(requests))
    tokens: list[list[int]] = [[] for _ in requests]
    moments: list[list[float]] = [[] for _ in requests]
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
        found = list(server.step())
        now = time.perf_counter() - began
        for number, new, ended in found:
            tokens[number] += new
            moments[number] += [now - requests[number]["arrival"]] * len(new)
            running -= ended
    return {"seconds": time.perf_counter() - began, "tokens": tokens, "moments": moments}


def resident(name: str) -> int | None:
    """Bytes of this process: `VmRSS` now, `VmHWM` at most so far. None where the system does not tell."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
    found = (int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
    return next(found, None)


def forget_peak() -> None:
    """`VmHWM` begins again from `VmRSS`; where that is not allowed, it stays that of the whole life."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def above(before: int | None) -> int | None:
    """The peak since it was forgotten, above what was resident before."""
    peak = resident("VmHWM")
    return None if peak is None or before is None else peak - before


def converse(made: Callable[[], Made], serve: Callable[[Made, list[dict[str, Any]]], dict[str, Any]]) -> None:
    """Make a server, and have it serve what comes in."""
    # Whatever the engine prints goes to where errors go.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    server = made()
    forget_peak()
    before = resident("VmRSS")
    server.load()
    loading = above(before)
    print(json.dumps(server.about()), file=answers, flush=True)
    for line in sys.stdin:
        forget_peak()
        answer = serve(server, json.loads(line))
        memory = {"loading_bytes": loading, "serving_bytes": above(before)}
        print(json.dumps({**answer, **memory, "about": server.about()}), file=answers, flush=True)


def main() -> None:
    converse(lambda: importlib.import_module(sys.argv[1]).server(Wanted(**json.loads(sys.argv[2]))), served)


if __name__ == "__main__":
    main()
