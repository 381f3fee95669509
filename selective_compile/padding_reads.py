"""What a model makes of whole rows at its end, run on rows that were put back, unless it reads their padding.

There the model computes something, and we do not.  So what reads padding is found by giving it other numbers there,
large ones of either sign: where any result is another, the call is the model's own.  Each is computed three times,
then, but for a batch without padding; behind the last layer that costs little.  What it computes of floating rows is
floating (`passes.summaries`), so that no comparison hides a number that it has read.
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
# In 16 bits sums of many of them are still finite; either has its own size, so that squares differ, too.
LARGE = (1000.0, -3000.0)
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
        outputs = [left(place, torch.zero_) for place in range(num_left)]
        rows = [outputs[place] for place in self._summary.rows]
        made = self._made(arguments, rows)
        for fill in fills(rows) if is_padded else ():
            if not alike(made, self._made(arguments, [left(place, fill) for place in self._summary.rows])):
                self._note_read()
                return None
        self._read = 0
        every = (*outputs, *made)
        return tuple(every[place] for place in self._summary.results)

    def _made(self, arguments: Sequence[Any], rows: Sequence[Tensor]) -> tuple[Any, ...]:
        return self._summary.module(*(arguments[index] for index in self._summary.inputs), *rows)

    def _note_read(self) -> None:
        self._read += 1
        if self.given_up:
            logger.warning("what the model makes of whole rows reads padding, as labels there: calls run as they came")


def fills(rows: Sequence[Tensor]) -> list[Fill]:
    """Random, by numbers of their own: the caller's next ones are what they would have been."""
    generator = torch.Generator(rows[0].device).manual_seed(0)
    return [partial(with_large, large=large, generator=generator) for large in LARGE]


def with_large(empty: Tensor, large: float, generator: torch.Generator) -> Tensor:
    return empty.uniform_(1, 2, generator=generator).mul_(large)


def alike(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """To the bit, and where one is not a number, neither is the other."""
    pairs = zip(first, second, strict=True)
    return all(bool(((a == b) | ((a != a) & (b != b))).all()) if isinstance(a, Tensor) else a == b for a, b in pairs)
