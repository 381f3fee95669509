"""Entries of dictionaries that are looked up before each step: all at once, in loops of C, as a model has thousands."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from operator import eq, is_
from typing import Any, Final

MISSING: Final = object()  # for a name that a dictionary must not have


class Entries:
    """Of a dictionary each: what ``name`` is to be there, and the ``path`` of whatever has the dictionary."""

    def __init__(self) -> None:
        self._owners: list[dict[str, Any]] = []
        self.names: list[str] = []
        self._paths: list[str] = []
        self._known: list[Any] = []

    def add(self, owner: dict[str, Any], name: str, known: Any, path: str = "") -> None:
        self._owners.append(owner)
        self.names.append(name)
        self._known.append(known)
        self._paths.append(path)

    def found(self) -> list[Any]:
        """Each entry as it is now; `MISSING` if there is none."""
        return list(map(dict.get, self._owners, self.names, repeat(MISSING)))

    def others(self) -> Iterator[tuple[str, str, Any, Any]]:
        """Path, name, what is known and what is there of each entry that is another object."""
        found = self.found()
        if not all(map(is_, found, self._known)):
            for path, name, known, now in zip(self._paths, self.names, self._known, found, strict=True):
                if now is not known:
                    yield path, name, known, now

    def known(self) -> Iterator[tuple[str, str, Any]]:
        """Path, name and what is known of each entry."""
        yield from zip(self._paths, self.names, self._known, strict=True)

    def unequal(self) -> Iterator[tuple[str, str, Any, Any]]:
        """As `others`, by equality: of what may be changed in place, ``known`` is a copy."""
        found = self.found()
        if not all(map(eq, found, self._known)):
            for path, name, known, now in zip(self._paths, self.names, self._known, found, strict=True):
                if not now == known:
                    yield path, name, known, now
