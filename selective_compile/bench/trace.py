"""Who asks for what, and when."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Self

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

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> Self:
        """From rows as `dataclasses.asdict` makes them."""
        return cls(requests=tuple(Asked(**row) for row in rows))

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
    """Skewed lengths and random tokens, after the shared ones if there are any; all there from the start."""
    rng = Random(settings.seed)
    words = range(settings.shape.vocabulary)
    prefix = rng.choices(words, k=settings.prefix_tokens)
    return Trace(
        requests=tuple(
            Asked(
                prompt_ids=prefix + rng.choices(words, k=log_uniform(rng, settings.prompt_tokens)),
                new_tokens=log_uniform(rng, settings.output_tokens),
                arrival=0.0,
            )
            for _ in range(settings.requests)
        )
    )


def renewed(trace: Trace, settings: BenchSettings, turn: int) -> Trace:
    """The same lengths and arrivals with other tokens, and another shared prefix, in each turn.

    A peer that keeps what it computed finds none of it in the next round.
    """
    rng = Random(f"{settings.seed} {turn}")
    words = range(settings.shape.vocabulary)
    prefix = rng.choices(words, k=settings.prefix_tokens)

    def prompt(asked: Asked) -> list[int]:
        return prefix + rng.choices(words, k=len(asked.prompt_ids) - len(prefix))

    return Trace(requests=tuple(replace(asked, prompt_ids=prompt(asked)) for asked in trace.requests))


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
        return self.since_beginning(time.perf_counter())

    def since_beginning(self, moment: float) -> float:
        """Of a moment that `time.perf_counter` told."""
        return moment - self._began

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
