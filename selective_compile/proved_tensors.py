"""Tensors that a proof was made from: it holds as long as they have the values that they had."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class ProvedTensors:
    """Copies of the values, one for all tensors that are equal, and which tensors were seen to have them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._copies: list[Tensor] = []
        for tensor in tensors:
            known = (copy for copy in self._copies if same(copy, tensor))
            copy = next(known, None)
            self._copies.append(tensor.detach().clone() if copy is None else copy)
        self._seen = [state(tensor) for tensor in tensors]

    def hold(self, tensors: Sequence[Tensor | None]) -> bool:
        """Whether ``tensors`` have the values still; looks at them only if one was replaced or written to."""
        for place, (tensor, copy) in enumerate(zip(tensors, self._copies, strict=True)):
            if tensor is None:
                return False
            if state(tensor) != self._seen[place]:
                if not same(copy, tensor):
                    return False
                self._seen[place] = state(tensor)
        return True


def state(tensor: Tensor) -> tuple[int, int, int]:
    """Identity and version; tensors made in inference mode count no versions."""
    return id(tensor), tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def same(first: Tensor, second: Tensor) -> bool:
    alike = first.shape == second.shape and first.dtype == second.dtype and first.device == second.device
    return alike and torch.equal(first, second)
