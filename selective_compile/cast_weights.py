"""Weights in a type of fewer bits, cast once and made anew when the model's own change."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from selective_compile.joined_weights import wait_for
from selective_compile.passes.flat_graph import Cast
from selective_compile.tensor_state import Made, States, states
from selective_compile.whole_device import ALONE

logger = logging.getLogger(__name__)


class CastWeights:
    """Some of a graph's weights in other types, in memory of their own.

    Of weights in inference mode none are kept: nothing tells that these have changed.
    """

    def __init__(self, wanted: Sequence[Cast], *, in_place: bool) -> None:
        """``in_place``: others are written where the ones before them lay, which captured steps read; or else steps on
        their way in other engines go on with those."""
        self._wanted, self._in_place = tuple(wanted), in_place
        self._made: Made | None = None
        self._dropped = False

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """As `gather` has left them; none before the first."""
        made = self._made
        return () if made is None else made.operands

    def of(self, tensors: Sequence[Any], seen: States) -> tuple[Tensor, ...]:
        """Each of the ``tensors`` that are wanted, cast; for this step alone where they are others than at the last
        `gather`.

        Args:
            seen: the states of all ``tensors``; the same object as before where nothing has changed.
        """
        made = self._made  # looked at once: another thread may put others in its place
        if made is not None and made.seen is seen:
            return made.operands
        return tuple(tensors[each.place].detach().to(each.dtype) for each in self._wanted)

    def drop(self) -> None:
        """Make them anew in the next `gather`, whatever the weights' states tell."""
        self._dropped = True

    def gather(self, tensors: Sequence[Any], seen: States) -> None:
        """Cast those of the ``tensors`` that are wanted, if they have changed; for when no step is on its way.

        Args:
            seen: as for `of`.
        """
        weights = tuple(tensors[each.place] for each in self._wanted)
        if not weights or any(map(Tensor.is_inference, weights)):
            self._made = None
            return
        with ALONE:  # engines in several threads may share them
            found = states(weights, None if self._made is None else self._made.states)
            if self._made is None or self._dropped or self._made.states is not found:
                old = self.operands if self._in_place else ()
                self._made, self._dropped = None, False  # the old go before the new ones are made, and none half made
                self._made = Made(operands=self._cast(weights, old), weights=weights, states=found, seen=seen)
            self._made = replace(self._made, seen=seen)

    @torch.inference_mode(False)  # or they would be tensors of that mode
    @torch.no_grad()
    def _cast(self, weights: Sequence[Tensor], old: Sequence[Tensor]) -> tuple[Tensor, ...]:
        device = weights[0].device
        wait_for(device)
        if old:
            operands = tuple(operand.copy_(weight) for operand, weight in zip(old, weights, strict=True))
        else:
            operands = tuple(weight.to(each.dtype) for weight, each in zip(weights, self._wanted, strict=True))
            told = sum(tensor.nbytes for tensor in operands) / 1e6, sum(weight.nbytes for weight in weights) / 1e6
            logger.info("%d weights are cast once, in %.0f MB beside %.0f MB of their own", len(weights), *told)
        wait_for(device)  # whatever stream reads them next
        return operands
