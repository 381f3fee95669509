"""Entries of dictionaries, looked up all at once: what is another object, and what has another value."""

from __future__ import annotations

from typing import Any

from selective_compile.entries import MISSING, Entries


def watched(owner: dict[str, Any]) -> Entries:
    entries = Entries()
    for name, value in owner.items():
        entries.add(owner, name, value, path="a.b")
    entries.add(owner, "absent", MISSING, path="a.b")
    return entries


def test_what_is_as_it_was_is_not_named() -> None:
    entries = watched({"one": 1, "none": None, "object": object()})
    assert list(entries.others()) == list(entries.unequal()) == []


def test_what_was_replaced_removed_or_added_is_named_with_what_is_there() -> None:
    first, second = object(), object()
    owner: dict[str, Any] = {"one": first, "none": None, "same": first}
    entries = watched(owner)
    owner["one"] = second
    del owner["none"]
    owner["absent"] = None
    assert list(entries.others()) == [
        ("a.b", "one", first, second),
        ("a.b", "none", None, MISSING),
        ("a.b", "absent", MISSING, None),
    ]
    assert entries.names == ["one", "none", "same", "absent"]


def test_containers_are_told_by_their_values() -> None:
    owner = {"list": [1, 2]}
    entries = Entries()
    entries.add(owner, "list", [1, 2])
    assert list(entries.unequal()) == [] and len(list(entries.others())) == 1
    owner["list"].append(3)
    assert list(entries.unequal()) == [("", "list", [1, 2], [1, 2, 3])]
