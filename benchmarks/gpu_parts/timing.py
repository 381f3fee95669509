"""The clocks: CUDA events on a GPU, `time.perf_counter` in a dry run on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

# Overwriting it takes longer than a launch does on the host: what is timed then waits in the stream, and not for it.
# It is also many times the second-level cache, which is left without anything that a call could find there.
FLUSHED = 2**30


class Timer:
    """Median seconds of calls that find nothing of their inputs in a cache."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flush = torch.empty(FLUSHED, dtype=torch.int8, device=device) if device.type == "cuda" else None

    def seconds(self, call: Callable[[], Any], repeats: int) -> float:
        """The call is made twice before, so that what is compiled at first sight is."""
        for _ in range(2):
            call()
        of_all = _by_host if self._flush is None else self._with_events
        return statistics.median(of_all(call, repeats))

    def _with_events(self, call: Callable[[], Any], repeats: int) -> list[float]:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        torch.cuda.synchronize(self._device)
        for before, after in pairs:
            assert self._flush is not None
            self._flush.zero_()
            before.record()
            call()
            after.record()
        torch.cuda.synchronize(self._device)
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
