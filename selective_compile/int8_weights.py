"""The int8 numbers that stand for a model's weights, made anew when these change."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from selective_compile.forks import lock_of_any_process
from selective_compile.int8_ops import as_int8, relative_error
from selective_compile.passes.flat_graph import Quantised
from selective_compile.tensor_state import Made, States, states

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MadeInt8(Made):
    """Numbers and scales in turn, and of each weight the error that rounding made."""

    errors: tuple[float, ...]


class Int8Weights:
    """Numbers ``[N, K]`` and scales ``[N]`` of some of a graph's weights, however these lie, in memory of their own.

    Engines in several threads may share them: whoever finds others than his makes them, while the rest wait.
    """

    def __init__(self, wanted: Sequence[Quantised]) -> None:
        self._wanted = tuple(wanted)
        self._lock = lock_of_any_process()  # for one maker at a time
        self._made: MadeInt8 | None = None

    @property
    def num_bytes(self) -> int:
        made = self._made
        return 0 if made is None else sum(tensor.nbytes for tensor in made.operands)

    @property
    def errors(self) -> tuple[float, ...]:
        """Of each weight, the root mean square of what rounding changed over that of its numbers."""
        made = self._made
        return () if made is None else made.errors

    def of(self, tensors: Sequence[Any], seen: States) -> tuple[Tensor, ...]:
        """Numbers and scales in turn, for each of the ``tensors`` that are wanted.

        Args:
            seen: the states of all ``tensors``; the same object as before where nothing has changed.
        """
        made = self._made  # looked at once: another thread may put others in its place
        if made is None or made.seen is not seen:
            made = None  # which would keep the old numbers while the new ones are made
            made = self._made_of(tuple(tensors[each.place] for each in self._wanted), seen)
        return made.operands

    def drop(self) -> None:
        """Make them anew at the next use, whatever the weights' states tell."""
        with self._lock:  # not while they are made, perhaps of what was there before
            self._made = None

    def _made_of(self, weights: tuple[Tensor, ...], seen: States) -> MadeInt8:
        with self._lock:
            found = states(weights, None if self._made is None else self._made.states)
            if self._made is None or self._made.states is not found:
                self._made = None  # the old numbers go before the new ones are made
                by_columns = [each.by_columns for each in self._wanted]
                self._made = quantised(weights, by_columns, found, seen)
            self._made = replace(self._made, seen=seen)
            return self._made


@torch.no_grad()
def quantised(weights: tuple[Tensor, ...], by_columns: Sequence[bool], found: States, seen: States) -> MadeInt8:
    by_rows = [weight.mT if turned else weight for weight, turned in zip(weights, by_columns, strict=True)]
    pairs = [as_int8(weight) for weight in by_rows]
    operands = tuple(tensor for pair in pairs for tensor in pair)
    errors = tuple(relative_error(weight, *pair) for weight, pair in zip(by_rows, pairs, strict=True))
    if errors:
        logger.info(
            "%d weights are int8 in %.0f MB beside %.0f MB of their own; relative error of a weight %.2f %% on "
            "average, %.2f %% at most",
            *(len(errors), sum(tensor.nbytes for tensor in operands) / 1e6),
            *(sum(weight.nbytes for weight in weights) / 1e6, 100 * sum(errors) / len(errors), 100 * max(errors)),
        )
    return MadeInt8(operands=operands, errors=errors, weights=weights, states=found, seen=seen)
