"""What launches of one step have in common is found by the first of them: between the layers no length changes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextvars import ContextVar, Token
from typing import Any, TypeVar

Found = TypeVar("Found")

_found: ContextVar[dict[Hashable, Any] | None] = ContextVar("selective_one_step", default=None)


class one_step:
    """Ops called inside, in this thread, are of one step: what tells of its lengths stays as it is.

    Steps of a captured graph that are played again find it anew: what the first launch does is part of the graph.
    """

    def __enter__(self) -> None:
        self._token: Token[dict[Hashable, Any] | None] = _found.set({})

    def __exit__(self, *_: object) -> None:
        _found.reset(self._token)


def once(key: Hashable, find: Callable[[], Found]) -> Found:
    """What was found for that key in this step, or is now; outside of `one_step` it is found each time."""
    found = _found.get()
    if found is None:
        return find()
    if key not in found:
        found[key] = find()
    known: Found = found[key]
    return known
