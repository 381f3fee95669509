"""What could not be proved, and where in the user's code it comes from."""

from __future__ import annotations

import copyreg
import os.path
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

OWN_FOLDER = f'"{os.path.dirname(os.path.dirname(__file__))}{os.path.sep}'  # as a stack names files


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Something that could not be proved, with the place in the user's code it comes from.

    ``ahead``: the first position that was found to see a later one there; None if none was.
    """

    node: str
    operator: str
    reason: str
    source_line: str
    module: str
    ahead: int | None = None

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return f"{self.operator} ({self.node}){where}: {self.reason}\n      {self.source_line}"


SHOWN = 8  # refusals of one text: a graph with a cache has some for every layer, and a log is read in a terminal


def listed(refusals: Sequence[Refusal]) -> list[str]:
    """The first ones as text, and how many there are beside them."""
    more = len(refusals) - SHOWN
    return [*map(str, refusals[:SHOWN]), *([f"and {more} more, which `refusals` has"] if more > 0 else [])]


class RefusedError(ValueError):
    """The model holds something that could not be proved; ``refusals`` names each node and its source line.

    ``note``: why it cannot run in another way either.
    """

    def __init__(self, refusals: Sequence[Refusal], note: str = "") -> None:
        self.refusals = tuple(refusals)
        text = "\n  ".join([*listed(self.refusals), note]).rstrip()
        super().__init__(f"{len(self.refusals)} operation(s) could not be proved safe to batch selectively:\n  {text}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Past `__init__`, which takes more than the message: a worker's refusal reaches the process that waits."""
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


def source_line(node: fx.Node) -> str:
    """``file:line code`` of the innermost user frame that made the node, or a note that it is unknown."""
    trace = node.meta.get("stack_trace") or ""
    frames = [line.strip() for line in trace.splitlines() if line.strip()]
    starts = [i for i, line in enumerate(frames) if line.startswith("File ") and OWN_FOLDER not in line]
    if not starts:
        return "source line unknown"
    place = frames[starts[-1]].split('"')
    number = place[2].split(",")[1].replace("line", "").strip()
    code = frames[starts[-1] + 1] if starts[-1] + 1 < len(frames) else ""
    return f"{place[1]}:{number}  {code}"


def module_path(node: fx.Node) -> str:
    """Dotted path of the module that made the node, from the model's root."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    return shortened_path(str(next(reversed(stack.values()))[0]))


def shortened_path(path: str) -> str:
    """The path of a module from Dynamo's name for it: without what stands for the model, and for a dictionary."""
    # So named where a class has its own `__getattr__`, as wrappers of models have.
    path = re.sub(r"\.__dict__\['_modules'\]\['([^']*)'\]", r".\1", path)
    for root in ("L['self']", "L['model']"):
        path = path.replace(root + ".", "").replace(root, "")
    return path
