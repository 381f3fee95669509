"""Calls of torch that have the host wait for a GPU though they read nothing from it: copies that begin only when all
before them is done, since the memory of the host is not pinned, or that are waited for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

INDEXING = {"__getitem__", "__setitem__", "index_put", "index_put_"}


def blocks(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], of_device: Callable[[Tensor], bool], *, working: bool
) -> bool:
    """Whether a function of torch of that name does, called so.

    Args:
        of_device: whether a tensor is in memory of the device; all others are in that of the host.
        working: the device calls it, where all that is made is the device's.
    """

    def of_host(value: Any) -> bool:
        return isinstance(value, Tensor) and value.dim() > 0 and not of_device(value)  # a number is not copied

    if name in ("tensor", "as_tensor"):  # of Python's or numpy's values
        return not isinstance(args[0], Tensor) and (working or kwargs.get("device") is not None)
    if not args or not isinstance(args[0], Tensor):
        return False
    first, *others = args
    if name in INDEXING and of_device(first):
        index = others[0] if isinstance(others[0], tuple) else (others[0],)
        lists = any(isinstance(each, (list, np.ndarray)) or of_host(each) for each in index)
        return lists or any(map(of_host, others[1:]))
    if name == "copy_":
        return of_device(first) != of_device(others[0])
    if name in ("to", "cuda"):
        places = [*others, kwargs.get("device"), kwargs.get("other")]
        return of_host(first) and (name == "cuda" or any(isinstance(p, (torch.device, str, Tensor)) for p in places))
    return False
