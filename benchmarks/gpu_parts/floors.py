"""The arithmetic of the figures: bytes, operations, the least time for them, and how near a time comes to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from selective_compile.bench.floor import experts_hit

# Below, a step of one layer is over before a device's memory is at its full speed.
LARGE_KV = 64e6


class Ceilings(NamedTuple):
    """What the device was measured to do at best; bytes of a copy count twice, read and written."""

    bytes_per_second: float
    flops_per_second: float


class Spread(NamedTuple):
    """Of several shares the smallest, and how it compares with the largest."""

    worst: float
    worst_over_best: float


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """What a decode step of a model costs.

    Attributes:
        weight_bytes: that every step reads, the LM head among them; of a mixture, without its experts.
        flops_per_token: two for every element of the matrices that a token is multiplied with.
        kv_bytes_per_token: keys and values of one token in all layers.
        expert_bytes: of one expert, in all layers together; 0: there are none.
        experts, chosen: how many experts a layer has, and how many of them a token goes to.
    """

    weight_bytes: int
    flops_per_token: int
    kv_bytes_per_token: int
    expert_bytes: int = 0
    experts: int = 0
    chosen: int = 0

    def read(self, requests: int) -> float:
        """Bytes of weights in a step of so many requests."""
        return self.weight_bytes + self.expert_bytes * experts_hit(self.experts, self.chosen, requests)

    def floor_seconds(self, contexts: Iterable[int], ceilings: Ceilings) -> float:
        """The least time for a step in which each request computes a token, with so many tokens then in its context.

        Keys and values are read beside the weights; while these are, the device can multiply.
        """
        lengths = list(contexts)
        weights = self.read(len(lengths)) / ceilings.bytes_per_second
        products = self.flops_per_token * len(lengths) / ceilings.flops_per_second
        return max(weights, products) + sum(lengths) * self.kv_bytes_per_token / ceilings.bytes_per_second


def kv_bytes(tokens: int, kv_heads: int, head_size: int, itemsize: int) -> int:
    """Keys and values of so many tokens in one layer."""
    return 2 * tokens * kv_heads * head_size * itemsize


def attention_flops(rows: int, context: int, heads: int, head_size: int, window: int = 0) -> int:
    """Of the last `rows` positions of a context, each of which attends to itself and all before it, or to so many."""

    def in_front(positions: int) -> int:
        """Pairs of the first positions of a context."""
        return positions * (positions + 1) // 2

    pairs = in_front(context) - in_front(context - rows)
    if window:
        pairs -= in_front(max(0, context - window)) - in_front(max(0, context - rows - window))
    return 4 * pairs * heads * head_size


def share(work: float, seconds: float, rate: float) -> float:
    """So much work in so many seconds, as a part of what `rate` allows."""
    return work / seconds / rate


def idle_share(busy: float, seconds: float) -> float:
    """The part of so many seconds in which nothing ran; 0 where the two clocks leave less than nothing."""
    return max(0.0, 1 - busy / seconds)


def spread(shares: Iterable[float]) -> Spread | None:
    """None: there are no shares."""
    values = list(shares)
    return Spread(min(values), min(values) / max(values)) if values else None


def busy_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """The time that (start, end) cover, where they overlap counted once."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        if end > until:
            covered += end - max(start, until)
            until = end
    return covered
