"""What tells that a tensor is another, or has other values, without a look at those."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

States = tuple[list[int], list[int], list[int]]

_version = attrgetter("_version")


def states(tensors: Sequence[Any]) -> States:
    """Identity, address and in-place version of each, equal states are of the same tensors with the same values.

    Not after a change that PyTorch does not count, as one in place through ``.data``.  Tensors made in inference mode
    count no versions, and what is no tensor has neither.
    """
    identities = list(map(id, tensors))
    try:  # in loops of C: a model has hundreds, and is asked before each step
        return identities, list(map(Tensor.data_ptr, tensors)), list(map(_version, tensors))
    except (RuntimeError, TypeError, AttributeError):
        return identities, list(map(_address_of, tensors)), list(map(_version_of, tensors))


def strides(tensor: Tensor) -> tuple[int, ...]:
    """Its strides; none of a tensor that has none, as a sparse one."""
    return tensor.stride() if tensor.layout is torch.strided else ()


def _address_of(tensor: Any) -> int:
    try:
        return tensor.data_ptr() if isinstance(tensor, Tensor) else 0
    except RuntimeError:  # a subclass that only wraps others
        return 0


def _version_of(tensor: Any) -> int:
    return tensor._version if isinstance(tensor, Tensor) and not tensor.is_inference() else 0
