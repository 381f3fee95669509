"""Within `group_loops`: tokens that a mask chooses, in one spelling, and what code asks of how many there are.

Traced::  x[chosen == 3]; y[chosen == 3] = rows; if not (chosen == 3).any(): ...; if len(rows) == 0: ...
As::      found = where(chosen == 3); x[found]; y[found] = rows; if found[0].shape[0] == 0: ...

So a rule or a proof is written for what `where` finds alone, and for sizes.

Traced::  mask = scores.topk(2).indices == 3; x[mask.any(-1)]; weights[mask]
As::      found = where(mask); x[found[0]]; weights[found]

A token chooses an expert once at most, as `topk` gives no index of a row twice: the tokens that choose it at all are
those of its choices, in the same order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from selective_compile.passes.distinct_choices import DistinctChoices
from selective_compile.passes.made_once import MadeOnce

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    spelt: getattr(operator, name) for name in ("eq", "ne", "gt", "ge", "lt", "le") for spelt in (name, f"__{name}__")
}
COMPARISONS |= {"greater": operator.gt, "less": operator.lt, "not_equal": operator.ne}
# What masks are made by, and of: which expert a token chose, and not what it is multiplied by.
OF_NUMBERS = ("any", "view", "reshape", "flatten", "ravel", "squeeze", "unsqueeze", "__getitem__")
COUNTS = ("any", "sum", "count_nonzero")
FINDS = (torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere)


@dataclass(frozen=True)
class HowMany:
    """A number of a trace: what ``asks`` gives of how many tokens ``mask`` chose, when it was written to so often."""

    number: Tensor
    mask: Tensor
    version: int
    asks: Callable[[Any], Any]


class FoundRows:
    """The calls of one trace.

    Args:
        length_of: the whole number that code is told for a size, where Python takes nothing else.
    """

    def __init__(self, length_of: Callable[[Any], int]) -> None:
        self.once = MadeOnce()
        self._distinct = DistinctChoices()
        self._length_of = length_of
        self._numbers: dict[int, HowMany] = {}

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What ``func`` gives, in the one spelling."""
        given = args[0] if args else None
        if isinstance(given, Tensor):
            if (func is torch.where and len(args) == 1) or (func in FINDS and kwargs.get("as_tuple")):
                return self.places(given)
            if func in FINDS and given.dim() == 1 and not is_known(given.shape[0]):
                return self.places(given)[0].unsqueeze(-1)
            if func is Tensor.__getitem__ and any(map(is_mask, listed(args[1]))):
                return given[self.spelt(args[1])]
            if func is Tensor.__setitem__ and any(map(is_mask, listed(args[1]))) and is_found(args[2]):
                given[self.spelt(args[1])] = args[2]
                return None
            if func is Tensor.__len__ and given.dim() and free_unbacked_symbols(given.shape[0]):
                return self._length_of(given.shape[0])
            if id(given) in self._numbers and (answer := self.read(func, self._numbers[id(given)])) is not None:
                return answer
        name = getattr(func, "__name__", "")
        of_numbers = isinstance(given, Tensor) and not given.is_floating_point()
        if name in COMPARISONS or (name in OF_NUMBERS and of_numbers):
            result = self.once.of(name, args, kwargs, lambda: func(*args, **kwargs))
        else:
            result = func(*args, **kwargs)
        self.note(name, args, kwargs, result)
        return result

    def places(self, mask: Tensor) -> tuple[Tensor, ...]:
        """For each dimension of ``mask``, where it is not 0."""
        if (choices := self._distinct.mask_behind(mask)) is not None:
            return self.places(choices)[:1]
        return tuple(self.once.of("where", (mask,), {}, lambda: torch.where(mask)))

    def spelt(self, index: Any) -> tuple[Any, ...]:
        return tuple(part for one in listed(index) for part in (self.places(one) if is_mask(one) else (one,)))

    def read(self, func: Any, found: HowMany) -> Any:
        """What the host is told that reads the number; None if ``func`` does not."""
        reads = func in (Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__int__, Tensor.__index__)
        if not reads or found.mask._version != found.version:
            return None
        answer = found.asks(self.places(found.mask)[0].shape[0])
        if func is Tensor.__bool__ or isinstance(answer, torch.SymBool):
            return bool(answer)
        return answer if func in (Tensor.item, Tensor.tolist) else self._length_of(answer)

    def note(self, name: str, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Remember a number that says how many tokens a mask chooses, and which masks choose each token once."""
        self._distinct.note(name, args, kwargs, result)
        if not isinstance(result, Tensor) or result.dim() or kwargs or not args:
            return
        before = self._numbers.get(id(args[0]))
        if name in COUNTS and len(args) == 1 and is_mask(args[0]) and args[0].dim():
            asks = not_zero if name == "any" else operator.pos
            self._numbers[id(result)] = HowMany(result, args[0], args[0]._version, asks)
        elif before is not None and name in COMPARISONS and isinstance(args[1], (int, float)):
            compare, number = COMPARISONS[name], args[1]
            asked = before.asks
            self._numbers[id(result)] = replace(before, number=result, asks=lambda size: compare(asked(size), number))


def not_zero(size: Any) -> Any:
    return size != 0


def is_known(size: Any) -> bool:
    return isinstance(size, int)


def listed(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def is_mask(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.bool and value.dim() > 0


def is_found(values: Any) -> bool:
    """Whether it holds a row for each token that was found; what is the same for all is written where the mask is."""
    return isinstance(values, Tensor) and values.dim() > 0 and bool(free_unbacked_symbols(values.shape[0]))
