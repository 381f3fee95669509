"""Copies of what a module keeps, which a run may change in place."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from selective_compile.tensor_state import class_of


class Copies:
    """Of tensors and containers, down to objects in them, which stay.  What is the same is the same again, and tensors
    that lie in the same memory do so again."""

    def __init__(self, kept: Iterable[Tensor]) -> None:
        """
        Args:
            kept: what stays, as what lies in its memory does.
        """
        self._copies: dict[int, Any] = {id(tensor): tensor for tensor in kept}
        self._memory_kept = {memory_of(tensor) for tensor in self._copies.values()} - {None}
        self._first: dict[int, tuple[Tensor, Tensor]] = {}  # in some memory, and its copy
        self._memory: dict[int, torch.UntypedStorage] = {}  # a copy of it, where others lie in it, too

    def of(self, value: Any) -> Any:
        if id(value) in self._copies:
            return self._copies[id(value)]
        new: Any = value
        if isinstance(value, Tensor):
            new = self._of_tensor(value)
        elif isinstance(value, tuple):
            items = [self.of(item) for item in value]
            if any(one is not other for one, other in zip(items, value, strict=True)):
                new = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        elif isinstance(value, dict):
            new = self._copies[id(value)] = copy.copy(value)
            for key, item in value.items():
                new[key] = self.of(item)
        elif isinstance(value, (list, deque)):
            new = self._copies[id(value)] = copy.copy(value)
            new.clear()
            new.extend(self.of(item) for item in value)
        elif isinstance(value, set):
            new = copy.copy(value)
        self._copies[id(value)] = new
        return new

    def _of_tensor(self, tensor: Tensor) -> Tensor:
        memory = memory_of(tensor)
        if memory in self._memory_kept:
            return tensor
        new = tensor.clone()
        if memory is not None:
            first = self._first.setdefault(memory, (tensor, new))
            if first[0] is not tensor:
                for one, copied in (first, (tensor, new)):
                    self._put_together(memory, one, copied)
        return new

    def _put_together(self, memory: int, tensor: Tensor, copied: Tensor) -> None:
        if memory not in self._memory:
            self._memory[memory] = tensor.untyped_storage().clone()
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        copied.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(self._memory[memory], *place)


def memory_of(tensor: Tensor) -> int | None:
    """What tells the memory that it lies in, if it is a plain one that lies in any."""
    if class_of(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    storage = tensor.untyped_storage()
    return int(storage._cdata) if storage.nbytes() else None
