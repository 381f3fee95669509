"""The int8 numbers that stand for a model's weights, made anew when these change."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from selective_compile.int8_ops import as_int8
from selective_compile.tensor_state import States, states

logger = logging.getLogger(__name__)


class Int8Weights:
    """Numbers ``[N, K]`` and scales ``[N]`` of some of a graph's weights, as many bytes beside the weights themselves.

    ``errors``: of each weight, the root mean square of what rounding changed over that of its numbers.
    """

    def __init__(self, places: Sequence[int]) -> None:
        self._places = tuple(places)
        self._version: States | None = None
        self._made: list[Tensor] = []
        self.errors: tuple[float, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._made)

    def of(self, tensors: Sequence[Any]) -> list[Tensor]:
        """Numbers and scales in turn, for each of the ``tensors`` that are in ``places``."""
        weights = [tensors[place] for place in self._places]
        version = states(weights)
        if version != self._version:
            self._made, self._version = [], version  # the old ones go before the new ones are made
            self._quantise(weights)
        return self._made

    @torch.no_grad()
    def _quantise(self, weights: Sequence[Tensor]) -> None:
        errors = []
        for weight in weights:
            numbers, scales = as_int8(weight)
            self._made += [numbers, scales]
            wide = weight.detach().float()
            errors.append(float((numbers * scales[:, None] - wide).norm() / wide.norm().clamp(min=1e-30)))
        self.errors = tuple(errors)
        if errors:
            logger.info(
                "%d weights are int8 in %.0f MB beside %.0f MB of their own; relative error of a weight %.2f %% on "
                "average, %.2f %% at most",
                *(len(errors), self.num_bytes / 1e6, sum(weight.nbytes for weight in weights) / 1e6),
                *(100 * sum(errors) / len(errors), 100 * max(errors)),
            )
