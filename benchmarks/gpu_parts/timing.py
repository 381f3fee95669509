"""The clocks: CUDA events in a captured graph on a GPU, `time.perf_counter` in a dry run on a CPU.

A launch takes the host longer than a small kernel the device, so that calls are captured, and replayed without the
host. Between two of them the second-level cache is overwritten and read full, which the events leave out of the time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
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
            captured or were not to be; or by the host's clock.
        quartiles: of the last calls, in seconds: a fourth took less, and a fourth more.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flush = flush_of(device) if device.type == "cuda" else None
        self._clocks: dict[How, float] = {}
        self.how: How = "host"
        self.quartiles = (0.0, 0.0)

    def about(self, whose: str = "") -> dict[str, Any]:
        """Figures of how the last calls were timed, with `whose` in front of their names. What the clock itself takes,
        between two moments with nothing between them, is in every time, and not subtracted."""
        return {
            f"{whose}timed_by": self.how,
            f"{whose}quartile_microseconds": [1e6 * seconds for seconds in self.quartiles],
            f"{whose}clock_microseconds": 1e6 * self._clocks[self.how],
        }

    def seconds(self, call: Callable[[], Any], repeats: int, *, launched: bool = False) -> float:
        """The call is made twice before on a GPU, so that what is compiled at first sight is. `launched`: one by one,
        even if it could be captured."""
        if self._flush is None:
            found = _by_host(call, repeats)
        else:
            for _ in range(2):
                call()
            found = self._on_device(call, repeats, self._flush, launched=launched)
        self.quartiles = quartiles(found)
        if self.how not in self._clocks:
            self._clocks[self.how] = self._clock(repeats)
        return statistics.median(found)

    def _on_device(
        self, call: Callable[[], Any], repeats: int, flush: Callable[[], None], *, launched: bool
    ) -> list[float]:
        if not launched:
            try:
                found = self._in_a_graph(call, repeats, flush)
            except RuntimeError:  # of peers, and of what a torch knows of events in graphs
                pass
            else:
                self.how = "graph"
                return found
        self.how = "events"
        return self._one_by_one(call, repeats, flush)

    def _clock(self, repeats: int) -> float:
        """Seconds of no call, by the way in which the last calls were timed."""
        if self._flush is None:
            return statistics.median(_by_host(_nothing, repeats))
        timed = self._in_a_graph if self.how == "graph" else self._one_by_one
        return statistics.median(timed(_nothing, repeats, self._flush))

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


def beside(timer: Timer, ours: Callable[[], Any], apart: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """Figures of both, those of the second with "apart_" before their names."""
    figures: dict[str, Any] = {}
    for whose, call in (("", ours), ("apart_", apart)):
        figures |= {f"{whose}microseconds": 1e6 * timer.seconds(call, repeats), **timer.about(whose)}
    return figures


def quartiles(found: Sequence[float]) -> tuple[float, float]:
    first, _, last = statistics.quantiles(found, n=4, method="inclusive")
    return first, last


def _nothing() -> None:
    pass


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
