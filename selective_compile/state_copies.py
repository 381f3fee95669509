"""Copies of what a module keeps, which a run may change in place."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable
from functools import cached_property
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
            kept: what stays, as what lies where it lies does.
        """
        self._copies: dict[int, Any] = {id(tensor): tensor for tensor in kept}
        self._kept = list(self._copies.values())
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
        if memory is not None and self._lies_with_kept(memory, bytes_of(tensor)):
            return tensor
        new = tensor.clone()
        if memory is not None:
            first = self._first.setdefault(memory, (tensor, new))
            if first[0] is not tensor:
                for one, copied in (first, (tensor, new)):
                    self._put_together(memory, one, copied)
        return new

    def _lies_with_kept(self, memory: int, own: range) -> bool:
        return any(own.start < kept.stop and kept.start < own.stop for kept in self._bytes_kept.get(memory, ()))

    @cached_property
    def _bytes_kept(self) -> dict[int, list[range]]:
        """By memory; most models keep no tensors that would have to be looked for in it."""
        found: dict[int, list[range]] = {}
        for tensor in self._kept:
            if (memory := memory_of(tensor)) is not None:
                found.setdefault(memory, []).append(bytes_of(tensor))
        return found

    def _put_together(self, memory: int, tensor: Tensor, copied: Tensor) -> None:
        if memory not in self._memory:
            self._memory[memory] = tensor.untyped_storage().clone()
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        copied.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(self._memory[memory], *place)


def memory_of(tensor: Tensor) -> int | None:
    """What tells the memory that it lies in, if it is a plain one that lies in any, and is no more than what lies
    there."""
    plain = class_of(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type != "meta"
    if not plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return None
    storage = tensor.untyped_storage()
    return int(storage._cdata) if storage.nbytes() else None


def bytes_of(tensor: Tensor) -> range:
    """From its first to its last, in its memory."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    start = tensor.storage_offset() * tensor.itemsize
    return range(start, start + (last + 1) * tensor.itemsize if tensor.numel() else start)
