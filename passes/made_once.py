"""Within a trace: what code computes twice in the same way of the same tensors is one value.

Traced::  x[chosen == 3] = compute(y[chosen == 3])
As::      mask = chosen == 3; x[mask] = compute(y[mask])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CONSTANTS = (bool, int, float, str, type(None), type(...), torch.dtype)
Version = tuple[tuple[int, int], ...]  # of each tensor, how often it was written to


class UntoldError(Exception):
    """Of an argument it cannot be said whether it is the same as another."""


@dataclass(frozen=True)
class Made:
    """A result, its version when it was made, and what it was made of, whose identities are names while it is held."""

    result: Any
    version: Version
    of: Any


class MadeOnce:
    """Results by what they are made of; nothing may be written to one that was given out twice."""

    def __init__(self) -> None:
        self._made: dict[Any, Made] = {}
        self._given_twice: list[Made] = []

    def of(self, name: str, args: Any, kwargs: dict[str, Any], make: Callable[[], Any]) -> Any:
        """What ``make`` gives, or has given for the same ``name`` and the same arguments."""
        try:
            key = name, told(args), told(tuple(sorted(kwargs.items())))
        except UntoldError:
            return make()
        made = self._made.get(key)
        if made is not None and made.version == version_of(made.result):
            if not views(made.result, (args, kwargs)):
                self._given_twice.append(made)
            return made.result
        result = make()
        self._made[key] = Made(result, version_of(result), (args, kwargs))
        return result

    def are_as_made(self) -> bool:
        """Whether nothing was written to what was given out twice, which would be two tensors in the code itself."""
        return all(made.version == version_of(made.result) for made in self._given_twice)


def told(value: Any) -> Any:
    """The same for the same value, tensors by identity.  Raises `UntoldError`."""
    if isinstance(value, Tensor):
        return Tensor, id(value), value._version
    if isinstance(value, CONSTANTS):
        return type(value), value
    if isinstance(value, (tuple, list)):
        return type(value), *map(told, value)
    if isinstance(value, slice):
        return slice, told((value.start, value.stop, value.step))
    raise UntoldError


def version_of(result: Any) -> Version:
    return tuple((id(tensor), tensor._version) for tensor in tensors_in(result))


def views(result: Any, given: Any) -> bool:
    """Whether ``result`` is memory of what is ``given``, as which code would have it, too."""
    memory = {tensor.untyped_storage()._cdata for tensor in tensors_in(given)}
    return all(tensor.untyped_storage()._cdata in memory for tensor in tensors_in(result))


def tensors_in(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (tuple, list, dict)):
        for part in result.values() if isinstance(result, dict) else result:
            yield from tensors_in(part)
