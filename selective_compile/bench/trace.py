"""Who asks for what, and when."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from selective_compile.bench.settings import BenchSettings


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request: its prompt, how many tokens it gets, and the second of its arrival."""

    prompt_ids: list[int]
    new_tokens: int
    arrival: float


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Requests in the order of their arrival."""

    requests: tuple[Asked, ...]

    @property
    def new_tokens(self) -> int:
        return sum(asked.new_tokens for asked in self.requests)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(asked.prompt_ids) for asked in self.requests)

    def arriving(self, rate: float, seed: int) -> Trace:
        """The same requests as a Poisson process of `rate` requests per second, the first at once."""
        rng = Random(seed)
        moment = 0.0
        spread = []
        for asked in self.requests:
            spread.append(replace(asked, arrival=moment))
            moment += rng.expovariate(rate)
        return Trace(requests=tuple(spread))


def make_trace(settings: BenchSettings) -> Trace:
    """Skewed lengths and random tokens, all there from the start."""
    rng = Random(settings.seed)
    return Trace(
        requests=tuple(
            Asked(
                prompt_ids=rng.choices(range(settings.shape.vocabulary), k=log_uniform(rng, settings.prompt_tokens)),
                new_tokens=log_uniform(rng, settings.output_tokens),
                arrival=0.0,
            )
            for _ in range(settings.requests)
        )
    )


def log_uniform(rng: Random, limits: tuple[int, int]) -> int:
    """An integer from `limits`, ends included, whose logarithm is as likely anywhere between theirs."""
    low, high = limits
    return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))


class Clock:
    """Seconds since a run began, and the requests as they arrive."""

    def __init__(self, trace: Trace) -> None:
        self._waiting = list(enumerate(trace.requests))
        self._began = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._began

    @property
    def more_to_come(self) -> bool:
        return bool(self._waiting)

    def arrived(self) -> Iterator[tuple[int, Asked]]:
        """Those that have arrived since the last call, with their numbers."""
        while self._waiting and self._waiting[0][1].arrival <= self.now():
            yield self._waiting.pop(0)

    def wait_for_next(self) -> None:
        """Sleep until the next request arrives; a server with nothing to do does just that."""
        if self._waiting:
            time.sleep(max(0.0, self._waiting[0][1].arrival - self.now()))
