"""Calls of torch that have the host wait for a GPU: that read what it has computed, and copies that begin only when all
before them is done, since the memory of the host is not pinned, or that are waited for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

# What waits for the device on a GPU, where it is called on memory of the device.
READS = {"item", "tolist", "cpu", "numpy", "to", "nonzero", "equal", "is_nonzero", "masked_select", "unique"}
READS |= {"__int__", "__float__", "__bool__", "__index__", "__complex__", "__array__", "__dlpack__", "__contains__"}
READS |= {"__repr__", "__format__"}
MAKING = {"tensor", "as_tensor", "asarray"}
INDEXING = {"__getitem__", "__setitem__", "index_put", "index_put_"}


def reads(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], of_device: Callable[[Tensor], bool], *, working: bool
) -> bool:
    """Whether a function of torch of that name, called so, has the host know what the device has computed; as `blocks`.
    Where the device is all that work knows, `to` stays there unless a place is named."""
    if not any(isinstance(each, Tensor) and of_device(each) for each in tree_leaves((args, kwargs))):
        return False
    if name == "to" and working:
        places = [*args[1:], kwargs.get("device"), kwargs.get("other")]
        return any(isinstance(p, (torch.device, str)) or (isinstance(p, Tensor) and not of_device(p)) for p in places)
    if name == "type":  # of a tensor that is said with its place, as "torch.LongTensor"
        kind = args[1] if len(args) > 1 else kwargs.get("dtype")
        return kind is not None and not isinstance(kind, torch.dtype)
    if name in MAKING:  # of one tensor: another beside it, unless the host's was asked for
        return isinstance(kwargs.get("device"), str) or not (args and isinstance(args[0], Tensor))
    return name in READS


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

    if name in ("tensor", "as_tensor"):  # of Python's or numpy's values, where the host is not named
        device = kwargs.get("device")
        return not isinstance(args[0], Tensor) and not isinstance(device, str) and (working or device is not None)
    if not args or not isinstance(args[0], Tensor):
        return False
    first, *others = args
    if name in INDEXING and of_device(first):
        index = others[0] if isinstance(others[0], tuple) else (others[0],)
        lists = any(isinstance(each, (list, np.ndarray)) or of_host(each) for each in index)
        return lists or any(map(of_host, others[1:]))
    if name == "new_tensor" and of_device(first):
        return not isinstance(kwargs.get("device"), str) and not (others and isinstance(others[0], Tensor))
    if name == "copy_":
        return of_device(first) != of_device(others[0])
    if name in ("to", "cuda"):
        places = [*others, kwargs.get("device"), kwargs.get("other")]
        return of_host(first) and (name == "cuda" or any(isinstance(p, (torch.device, str, Tensor)) for p in places))
    return False
