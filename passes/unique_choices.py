"""Within `group_loops`: a loop over the groups that ``unique`` finds among what tokens chose, as one over all groups
that asks of each whether some token chose it.

Traced::  for group in torch.unique(chosen): ...                        # chosen = scores.topk(2).indices, of E groups
As::      for group in range(E):
              if not (chosen == group).any(): continue
              ...

It finds them in this order, and a group without tokens is none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from selective_compile.passes.group_sizes import UNBINDS

UNIQUES = (torch.unique, Tensor.unique)
# What it may be asked for beside the groups, or in their place; whether they are sorted changes no group.
NOT_ASKED = {"return_inverse": False, "return_counts": False, "dim": None}
FLAT = ("view", "reshape", "flatten", "ravel")
KEEPING = ("cpu", "to", "long", "int", "detach", "clone", "contiguous")
WIDE = (torch.int64, torch.int32)  # which hold the number of any group
EQUALS = ("eq", "__eq__", "ne", "__ne__", "not_equal")


@dataclass(frozen=True)
class Found:
    """``groups`` are those among ``groups_of`` many that are in ``chosen``, as both were at these versions."""

    groups: Tensor
    chosen: Tensor
    versions: tuple[int, int]
    groups_of: int

    @classmethod
    def of(cls, groups: Tensor, chosen: Tensor, groups_of: int) -> Found:
        return cls(groups, chosen, (groups._version, chosen._version), groups_of)

    def holds(self) -> bool:
        return (self.groups._version, self.chosen._version) == self.versions


class UniqueChoices:
    """Of one trace.

    Args:
        groups_of: among how many groups the numbers of a tensor are; None: that is not known.
        is_told_empty: what the code is told where it asks whether no entry of a tensor is a number.
    """

    def __init__(self, groups_of: Callable[[Tensor], int | None], is_told_empty: Callable[[Tensor, int], bool]) -> None:
        self._groups_of, self._is_told_empty = groups_of, is_told_empty
        self._flat: dict[int, tuple[Tensor, Tensor, int]] = {}  # by identity, with what it is a row of, and its version
        self._found: dict[int, Found] = {}
        self._numbers: dict[int, tuple[Tensor, int, int]] = {}  # by identity, with its group and its version

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What ``func`` gives, if it is about what ``unique`` found; else None."""
        given = args[0] if args else None
        if not isinstance(given, Tensor):
            return None
        if func in UNIQUES and len(args) == 1 and all(kwargs.get(name, no) is no for name, no in NOT_ASKED.items()):
            return self._unique(given)
        found = self._found.get(id(given))
        if found is None or not found.holds():
            return None
        if func in UNBINDS:  # as iterating and `tolist` do
            return [self._number(group, given) for group in self._groups(found)]
        return numpy.array(self._groups(found)) if func is Tensor.numpy else None

    def with_numbers(self, func: Any, args: Any) -> Any:
        """The arguments, of a comparison with a group's number with that itself."""
        if getattr(func, "__name__", "") not in EQUALS or len(args) != 2 or id(args[1]) not in self._numbers:
            return args
        number, group, version = self._numbers[id(args[1])]
        return (args[0], group) if number._version == version else args

    def note(self, func: Any, args: Any, result: Any) -> None:
        """Remember what is the same as what was found, and of what numbers are one row."""
        name, given = getattr(func, "__name__", ""), args[0] if args else None
        if not isinstance(given, Tensor) or not isinstance(result, Tensor):
            return
        found = self._found.get(id(given))
        if name in KEEPING and found is not None and found.holds() and result.dtype in WIDE:
            self._found[id(result)] = Found.of(result, found.chosen, found.groups_of)
        elif name in FLAT and result.dim() == 1 and given.dim() > 1:
            self._flat[id(result)] = result, given, given._version

    def _unique(self, given: Tensor) -> Tensor | None:
        groups_of = self._groups_of(given)
        # Masks of groups are made of what is not flat, mostly.
        _, chosen, version = self._flat.get(id(given), (given, given, given._version))
        if groups_of is None or given.dtype not in WIDE or chosen._version != version:
            return None
        groups = torch.unique(given)
        self._found[id(groups)] = Found.of(groups, chosen, groups_of)
        return groups

    def _groups(self, found: Found) -> list[int]:
        return [group for group in range(found.groups_of) if not self._is_told_empty(found.chosen, group)]

    def _number(self, group: int, like: Tensor) -> Tensor:
        number = torch.tensor(group, dtype=like.dtype, device=like.device)
        self._numbers[id(number)] = number, group, number._version
        return number
