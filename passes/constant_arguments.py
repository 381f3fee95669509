"""Arguments of a function that are no tensors: numbers, names, and tuples and lists of them, as JSON has lists.

A list cannot be hashed, and may be another one later.  Of a call that was seen it is kept as a `ListArgument`; whoever
calls the function again gives it a list, and a new one each time: a function may treat lists and tuples differently, or
write into what it is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

CONSTANTS = (int, float, str, bool, type(None), torch.dtype)


@dataclass(frozen=True)
class ListArgument:
    """A list, by what was in it."""

    items: tuple[Any, ...]


def kept(value: Any) -> Any:
    """``value`` with a `ListArgument` for every list in it, and as it is where there is none."""
    if type(value) is list:  # of a class of its own, nobody could make another
        return ListArgument(tuple(map(kept, value)))
    return tuple(map(kept, value)) if type(value) is tuple else value


def as_given(value: Any) -> Any:
    """What was `kept`, as the function is to be given it."""
    if isinstance(value, ListArgument):
        return list(map(as_given, value.items))
    return tuple(map(as_given, value)) if type(value) is tuple else value


def is_constant(value: Any) -> bool:
    """Whether what was `kept` says all that there is to say of an argument."""
    if isinstance(value, ListArgument):
        return all(map(is_constant, value.items))
    return all(map(is_constant, value)) if isinstance(value, tuple) else isinstance(value, CONSTANTS)


def number_pair(value: Any) -> tuple[float, float] | None:
    """Two numbers, in a tuple or in a list; None if it is something else."""
    items = value.items if isinstance(value, ListArgument) else value
    if not isinstance(items, tuple) or len(items) != 2 or not all(isinstance(x, (int, float)) for x in items):
        return None
    return items
