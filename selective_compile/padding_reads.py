"""What a model makes of whole rows at its end, run on rows that were put back, unless it reads their padding.

There the model computes something, and we do not.  So what reads padding is found by giving it several numbers there,
such as rows have and large ones of either sign: where any result is another, the call is the model's own.  Each is
computed three times, then, but for a batch without padding; behind the last layer that costs little.  What it computes
of floating rows is floating (`passes.summaries`), so that no comparison hides a number that it has read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from selective_compile.passes.summaries import Summary

logger = logging.getLogger(__name__)
# From and to.  Of large ones a maximum is theirs, but what falls off on both sides is 0, as what is divided by their
# squares in float16; of the first it is not, nor is a row without a direction, as one of zeros would be.  Either of the
# large ones has its own size, so that squares differ, too.
NUMBERS = ((-2.0, 2.0), (1000.0, 2000.0), (-6000.0, -3000.0))
# So many are drawn, over and over in a larger tensor: drawing is work of one core.  A prime, so that rows differ.
DRAWN = 65537
IN_A_ROW = 3
Fill = Callable[[Tensor], Tensor]


class SummaryProgram:
    """Called with the arguments of a padded call and its rows; gives the call's results.

    Attributes:
        given_up: it has read padding in so many calls in a row that it is not tried any more.
    """

    def __init__(self, summary: Summary) -> None:
        self._summary = summary
        self._read = 0

    @property
    def given_up(self) -> bool:
        return self._read >= IN_A_ROW

    def __call__(
        self, arguments: Sequence[Any], left: Callable[[int, Fill], Any], num_left: int, *, is_padded: bool
    ) -> tuple[Any, ...] | None:
        """None: it reads padding.

        Args:
            left: an output of the rewritten graph, by its place of ``num_left``, with what the second argument writes
                where there is no token.
            is_padded: there is padding.
        """
        if is_padded:
            made = self._made_of_any(arguments, left)
            if made is None:
                return None
            given = {place: left(place, torch.zero_) for place in self._summary.results if place < num_left}
        else:
            given = {place: left(place, torch.zero_) for place in range(num_left)}
            made = self._made(arguments, [given[place] for place in self._summary.rows])
        given.update(enumerate(made, num_left))
        return tuple(given[place] for place in self._summary.results)

    def _made_of_any(self, arguments: Sequence[Any], left: Callable[[int, Fill], Any]) -> tuple[Any, ...] | None:
        rows = ([left(place, fill) for place in self._summary.rows] for fill in fills())
        made = self._made(arguments, next(rows))
        if not all(alike(made, self._made(arguments, others)) for others in rows):
            self._note_read()
            return None
        self._read = 0
        return made

    def _made(self, arguments: Sequence[Any], rows: Sequence[Tensor]) -> tuple[Any, ...]:
        return self._summary.module(*(arguments[index] for index in self._summary.inputs), *rows)

    def _note_read(self) -> None:
        self._read += 1
        if self.given_up:
            logger.warning("what the model makes of whole rows reads padding, as labels there: calls run as they came")


def fills() -> list[Fill]:
    """One for each of `NUMBERS`, random by a generator of their own: the caller's next ones are what they would be."""
    generator = torch.Generator("cpu").manual_seed(0)
    return [partial(with_numbers, bounds=bounds, generator=generator) for bounds in NUMBERS]


def with_numbers(empty: Tensor, bounds: tuple[float, float], generator: torch.Generator) -> Tensor:
    """``empty``, which is contiguous, filled."""
    drawn = torch.empty(DRAWN, dtype=torch.float32, device="cpu").uniform_(*bounds, generator=generator).to(empty)
    flat = empty.view(-1)
    rest = flat.numel() % DRAWN
    flat[: flat.numel() - rest].view(-1, DRAWN).copy_(drawn)
    flat[flat.numel() - rest :].copy_(drawn[:rest])
    return empty


def alike(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """To the bit, and where one is not a number, neither is the other."""
    pairs = zip(first, second, strict=True)
    return all(bool(((a == b) | ((a != a) & (b != b))).all()) if isinstance(a, Tensor) else a == b for a, b in pairs)
