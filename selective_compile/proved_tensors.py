"""Tensors that a proof was made from: it holds as long as they have the values that they had."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from selective_compile.tensor_state import states


class ProvedTensors:
    """Copies of the values, one for all tensors that are equal, and which tensors were seen to have them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._copies: list[Tensor] = []
        for tensor in tensors:
            known = (copy for copy in self._copies if same(copy, tensor))
            copy = next(known, None)
            self._copies.append(tensor.detach().clone() if copy is None else copy)
        self._seen = states(tensors)

    def hold(self, tensors: Sequence[Any]) -> bool:
        """Whether ``tensors`` have the values still; looks at them only if one was replaced or written to."""
        now = states(tensors, self._seen)
        if now is not self._seen:
            if not all(map(same, self._copies, tensors)):
                return False
            self._seen = now
        return True


def same(first: Tensor, second: Any) -> bool:
    if not isinstance(second, Tensor):
        return False
    alike = first.shape == second.shape and first.dtype == second.dtype and first.device == second.device
    return alike and torch.equal(first, second)
