"""For how many tokens and requests steps are captured as graphs. A step takes the smallest graph that it fits into.

| steps | graphs |
|---|---|
| all requests compute one token | for 2, 4, 8, 16 requests, and every 16 from there on |
| others, mixed | for every 16 tokens up to 128, and for eight numbers from a power of two to the next |
| mixed, of fewer than about twice as many tokens as there can be requests | another each, for few requests |

So a mixed step computes at most 15 tokens, or an eighth of all, that are nobody's. Mixed steps have graphs up to where
the device computes for longer than the host takes to launch a step kernel by kernel (`worth_capturing`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from selective_compile.runtime.batch import SMALLEST, SMALLEST_INVARIANT

# Requests of steps in which all decode; between two sizes at most so many empty ones are computed.
FIRST_SIZES, STEP_OF_SIZES = (2, 4, 8), 16
# The rows that matrix units multiply at a time: what fills them up takes no time.
TILE = 16
# An eighth of a mixed step may be nobody's.
PARTS = 8
# More tokens a request than so many, and the GPU's attention takes tall tiles (`kernels.ragged_attention_tiles`): a
# step that has more in its prompts must not lose them to the empty requests of its graph.
LOW = 2
# Beside launching a step the host plans it and hands out tokens. Not measured on a GPU.
ROOM = 1.5


class Size(NamedTuple):
    """Of a graph: how many tokens, requests as attention has them, and rows of logits it computes, of which as many as
    there are too many are nobody's."""

    tokens: int
    requests: int
    rows: int


@dataclass(frozen=True, kw_only=True)
class GraphSizes:
    """In the order in which a step tries them.

    Attributes:
        decode: of steps in which every request computes one token.
        mixed: of other steps.
        invariant: each row attends as a request of its own.
    """

    decode: tuple[Size, ...]
    mixed: tuple[Size, ...]
    invariant: bool = False

    def fitting(self, tokens: int, requests: int) -> Size | None:
        """The graph of a step; None: it has none."""
        for size in self.decode if tokens == requests else self.mixed:
            if size.tokens >= tokens and size.rows >= requests:
                return size
        return None


def graph_sizes(max_requests: int, mixed: Sequence[int], *, invariant: bool = False) -> GraphSizes:
    """
    Args:
        mixed: numbers of tokens, ascending.
    """
    decode = [Size(count, count, count) for count in decode_sizes(max_requests, invariant=invariant)]
    most = decode[-1].rows
    if invariant:
        every = [Size(count, count, most) for count in mixed]
    else:
        # As many requests as can be, and as can be with tall tiles.
        pairs = [(count, requests) for count in mixed for requests in ((count - 1) // LOW, count)]
        every = [Size(count, min(requests, most), min(requests, most)) for count, requests in pairs if requests > 1]
    return GraphSizes(decode=tuple(decode), mixed=tuple(dict.fromkeys(every)), invariant=invariant)


def decode_sizes(max_requests: int, *, invariant: bool = False) -> tuple[int, ...]:
    """Numbers of requests that have a graph; the last is at least `max_requests`."""
    most = max(_least(invariant), max_requests)
    every = (*FIRST_SIZES, *range(STEP_OF_SIZES, most + STEP_OF_SIZES, STEP_OF_SIZES))
    last = next(place for place, size in enumerate(every) if size >= most)
    return tuple(size for size in every[: last + 1] if size >= _least(invariant))


def mixed_sizes(token_budget: int, *, invariant: bool = False) -> tuple[int, ...]:
    """Numbers of tokens that may have a graph; the last is the budget."""
    most = max(_least(invariant), token_budget)
    found, size = [], TILE
    while size < most:
        found.append(size)
        size += max(TILE, (1 << size.bit_length() - 1) // PARTS)
    return tuple(size for size in (*found, most) if size >= _least(invariant))


def _least(invariant: bool) -> int:
    """Tokens and requests of any step; a tensor of length 1 would be specialised to a graph of its own."""
    return SMALLEST_INVARIANT if invariant else SMALLEST


def worth_capturing(sizes: Sequence[int], seconds: Callable[[int], tuple[float, float]]) -> Sequence[int]:
    """Those of the sizes, ascending, in which the device would wait for the host.

    Args:
        seconds: of a step of so many tokens that is launched kernel by kernel, until the host has launched it, and
            until the device has done it, both from when the host begins. It is asked of a few.
    """

    def keeps_busy(tokens: int) -> bool:
        launched, done = seconds(tokens)
        return done >= ROOM * launched

    return sizes[: bisect_left(sizes, True, key=keeps_busy)]
