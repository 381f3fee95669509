"""Variables of the environment that code reads, by the names that stand in it: Dynamo guards none of them."""

from __future__ import annotations

import dis
import functools
import os
from collections.abc import Iterable
from types import CodeType
from typing import Any

READERS = ("environ", "getenv")
CALLS = ("PUSH_NULL", "LOAD_METHOD", "LOAD_ATTR", "CACHE")  # between what is read and its name
MADE = ("FORMAT_VALUE", "FORMAT_SIMPLE", "BUILD_STRING", "BINARY_OP")  # of several parts


def variables_read(codes: Iterable[CodeType]) -> dict[str, str]:
    """Those that are set.

    Raises:
        ValueError: code reads one whose name is made elsewhere.
    """
    found: dict[str, str] = {}
    for code in codes:
        if code.co_filename != os.__file__ and not code.co_filename.startswith("<frozen "):
            found |= {name: os.environ[name] for name in names_in(code) if name in os.environ}
    return found


@functools.lru_cache(2**13)
def names_in(code: CodeType) -> frozenset[str]:
    steps = list(dis.get_instructions(code))
    found: set[str] = set()
    for number, step in enumerate(steps):
        if step.argval in READERS and step.opname.startswith(("LOAD_", "IMPORT_FROM")):
            found.add(named(code, steps, number))
    return frozenset(found.union(*(names_in(part) for part in code.co_consts if isinstance(part, CodeType))))


def named(code: CodeType, steps: list[Any], number: int) -> str:
    """The constant that stands behind what is read, as an argument or key, or else in front of it, as in a test."""
    behind = [step for step in steps[number + 1 : number + 8] if step.opname not in CALLS]
    if is_text(behind[:1]) and not any(step.opname in MADE for step in behind[1:4]):
        return str(behind[0].argval)
    if behind and behind[0].opname == "CONTAINS_OP":
        front = [step for step in steps[max(0, number - 3) : number] if not step.opname.startswith("LOAD_GLOBAL")]
        if is_text(front[-1:]):
            return str(front[-1].argval)
    raise ValueError(
        f"the names of variables must stand in the code that reads them, got another in {code.co_qualname}"
    )


def is_text(steps: list[Any]) -> bool:
    return any(step.opname == "LOAD_CONST" and isinstance(step.argval, str) for step in steps)
