"""The clocks: CUDA events in a captured graph on a GPU, `time.perf_counter` in a dry run on a CPU.

A launch takes the host longer than a small kernel the device, so that calls are captured, and replayed without the
host. Between two of them the second-level cache is overwritten and read full, which the events leave out of the time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import torch

# Many times the second-level cache, which is left without anything that a call could find there. Where calls are
# launched by the host, overwriting it takes longer than that does: what is timed then waits in the stream, and not for
# the host.
FLUSHED = 2**30
# Then so much is read, several times that cache: lines that were only written wait there to go to memory, and what is
# timed would share its bandwidth with them.
READ = 2**28

How = Literal["graph", "events", "host"]


class Timer:
    """Median seconds of calls that find nothing of their inputs in a cache.

    Attributes:
        how: the last calls were timed: in a graph; launched one by one, between events, since they could not be
            captured; or by the host's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flush = flush_of(device) if device.type == "cuda" else None
        self.how: How = "host"

    def seconds(self, call: Callable[[], Any], repeats: int) -> float:
        """The call is made twice before on a GPU, so that what is compiled at first sight is."""
        if self._flush is None:
            return statistics.median(_by_host(call, repeats))
        for _ in range(2):
            call()
        try:
            found, self.how = self._in_a_graph(call, repeats, self._flush), "graph"
        except RuntimeError:  # of peers, and of what a torch knows of events in graphs
            found, self.how = self._one_by_one(call, repeats, self._flush), "events"
        return statistics.median(found)

    def _in_a_graph(self, call: Callable[[], Any], repeats: int, flush: Callable[[], None]) -> list[float]:
        """All calls in one graph, replayed twice; the second time counts."""
        # External: they are nodes of the graph, and have a time after each replay.
        pairs = [[torch.cuda.Event(enable_timing=True, external=True) for _ in range(2)] for _ in range(repeats)]
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self._device)
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                _record(call, pairs, flush)
        finally:
            torch.cuda.set_stream(stream)  # where torch fails to end a capture, it stays in its stream
        for _ in range(2):
            graph.replay()
        torch.cuda.synchronize(self._device)
        return _elapsed(pairs)

    def _one_by_one(self, call: Callable[[], Any], repeats: int, flush: Callable[[], None]) -> list[float]:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        torch.cuda.synchronize(self._device)
        _record(call, pairs, flush)
        torch.cuda.synchronize(self._device)
        return _elapsed(pairs)


def flush_of(device: torch.device) -> Callable[[], None]:
    """A call after which the cache has nothing of anyone's inputs, nor what is yet to be written to memory."""
    written = torch.empty(FLUSHED, dtype=torch.int8, device=device)
    read = torch.zeros(2**10, READ // 2**12, dtype=torch.float32, device=device)
    sums = torch.empty(2**10, dtype=torch.float32, device=device)

    def flush() -> None:
        written.zero_()
        torch.sum(read, dim=1, out=sums)

    return flush


def _record(call: Callable[[], Any], pairs: list[list[torch.cuda.Event]], flush: Callable[[], None]) -> None:
    for before, after in pairs:
        flush()
        before.record()
        call()
        after.record()


def _elapsed(pairs: list[list[torch.cuda.Event]]) -> list[float]:
    return [before.elapsed_time(after) / 1e3 for before, after in pairs]


def _by_host(call: Callable[[], Any], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return seconds


def free_bytes(device: torch.device) -> int:
    """Of the device's memory; on a CPU, in a dry run, more than its sizes need."""
    if device.type != "cuda":
        return 2**30
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
