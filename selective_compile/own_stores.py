"""Attributes that a module sets in each call before it reads them: what a call leaves there, the next does not see.

self.aux_loss = loads @ probabilities.mean(0)   # of a mixture of experts, for who trains it
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from selective_compile.module_state import FLAGS, Place

# A module's path within another, and the name of an attribute.
Store = tuple[str, str]
ATTRIBUTE = "attribute"


class ReadsEarlierError(RuntimeError):
    """A call reads what the call before may have left."""


@contextmanager
def set_before_read(module: nn.Module, stores: Collection[Store]) -> Iterator[set[Store]]:
    """Within, a part of ``module`` that reads one of ``stores`` raises `ReadsEarlierError` unless it was set; yields a
    set that has those that were.

    ``module`` is a copy of nobody else's: meanwhile its parts are of classes derived from theirs.
    """
    found: set[Store] = set()
    kinds: dict[nn.Module, type] = {}
    for path, part in module.named_modules():
        names = frozenset(name for where, name in stores if where == path)
        if names:
            kinds[part] = type(part)
            part.__class__ = watched(type(part), path, names, found)
    try:
        yield found
    finally:
        for part, kind in kinds.items():
            part.__class__ = kind


def watched(kind: Any, path: str, names: frozenset[str], found: set[Store]) -> Any:
    """A class derived from ``kind`` that notes in ``found`` which of these attributes are set."""

    class Watched(kind):
        def __getattribute__(self, name: str) -> Any:
            if name in names and (path, name) not in found:
                raise ReadsEarlierError(f"{name} of what an earlier call has left is read")
            return super().__getattribute__(name)

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name in names:
                found.add((path, name))

    Watched.__name__, Watched.__qualname__ = kind.__name__, kind.__qualname__
    return Watched


def stores_of(module: nn.Module, before: dict[Place, Any], after: dict[Place, Any]) -> frozenset[Store] | None:
    """The attributes of ``module`` that a call has set to tensors or numbers, by what `contents_of` gave; None where it
    has changed anything else."""
    paths = {part: path for path, part in module.named_modules()}
    found = set()
    for place in before.keys() | after.keys():
        if place in before and place in after and before[place] == after[place]:
            continue
        part, table, name = place
        value = vars(part).get(name, part)
        if table != ATTRIBUTE or not isinstance(value, (Tensor, *FLAGS, type(None))):
            return None
        found.add((paths[part], name))
    return frozenset(found)
