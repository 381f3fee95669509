"""Copies of what a module keeps, which a run may change in place."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from selective_compile.tensor_memory import bytes_of, memory_of

ALIGNED = 16  # bytes, that numbers of any dtype may begin at


class Copies:
    """Of tensors and containers, down to objects in them, which stay.  What is the same is the same again, and tensors
    that lie over one another in memory do so again."""

    def __init__(self, values: Iterable[Any], kept: Iterable[Tensor]) -> None:
        """
        Args:
            values: what `of` is asked for, all of it.
            kept: what stays, as what lies over it does, and over that.
        """
        self._copies: dict[int, Any] = {id(tensor): tensor for tensor in kept}
        stay: list[Tensor] = list(self._copies.values())
        for tensors in lying_together([one for one in tensors_in(values) if id(one) not in self._copies], stay):
            self._copies.update(zip(map(id, tensors), copied(tensors), strict=True))

    def of(self, value: Any) -> Any:
        if id(value) in self._copies:
            return self._copies[id(value)]
        new: Any = value
        if isinstance(value, tuple):
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


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Each once, as far as `Copies` goes."""
    found: dict[int, Tensor] = {}
    seen: dict[int, Any] = {}
    left = list(values)
    while left:
        value = left.pop()
        if isinstance(value, Tensor):
            found[id(value)] = value
        elif isinstance(value, (tuple, dict, list, deque)) and id(value) not in seen:
            seen[id(value)] = value
            left.extend(value.values() if isinstance(value, dict) else value)
    return list(found.values())


def lying_together(tensors: Sequence[Tensor], kept: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Those of ``tensors`` that lie over one another, or over others that do; without those of which one is ``kept``,
    which stay."""
    by_memory: dict[int, list[tuple[Tensor, bool]]] = {}
    for tensor in tensors:
        if (memory := memory_of(tensor)) is None:
            yield [tensor]
        else:
            by_memory.setdefault(memory, []).append((tensor, False))
    for tensor in kept if by_memory else ():
        if (others := by_memory.get(memory_of(tensor) or 0)) is not None:
            others.append((tensor, True))
    for within in by_memory.values():
        for group in overlapping(within):
            ours = [tensor for tensor, stays in group if not stays]
            if len(ours) == len(group):
                yield ours


def overlapping(tensors: Sequence[tuple[Tensor, bool]]) -> list[list[tuple[Tensor, bool]]]:
    """Of one memory; one of no numbers lies over none."""
    groups: list[list[tuple[Tensor, bool]]] = []
    end = -1
    for one in sorted(tensors, key=lambda one: bytes_of(one[0]).start):
        own = bytes_of(one[0])
        if own.start >= end:
            groups.append([])
        groups[-1].append(one)
        end = max(end, own.stop)
    return groups


def copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Of tensors that lie over one another, in one memory."""
    if len(tensors) == 1:
        return [tensors[0].clone()]
    every = [bytes_of(tensor) for tensor in tensors]
    start = min(own.start for own in every) // ALIGNED * ALIGNED
    size = max(own.stop for own in every) - start
    memory = torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
    memory = memory.set_(tensors[0].untyped_storage(), start, (size,), (1,)).clone()
    return [placed(tensor, memory.untyped_storage(), start) for tensor in tensors]


def placed(tensor: Tensor, memory: torch.UntypedStorage, start: int) -> Tensor:
    """As it is, in another memory, of which so many bytes in front are not there."""
    place = tensor.storage_offset() - start // tensor.itemsize, tensor.size(), tensor.stride()
    found = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(memory, *place)
    found = torch._neg_view(found) if tensor.is_neg() else found
    return found.conj() if tensor.is_conj() else found
