"""What jobs tell: a row for each thing that was measured, left out, or failed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from triton.errors import TritonError

State = Literal["measured", "skipped", "failed"]

# What a cell of a part can fail with and the next one go on: wrong results, memory, compilers, what a peer refuses.
FAILURES = (RuntimeError, ValueError, TypeError, AssertionError, AttributeError, ImportError, OSError, TritonError)
# What a row says that has no figure for lack of time alone.
NO_TIME = "no time was left"
STOPPED = "stopped after"
NOT_COMPARED = "not compared: "  # before what a comparison of tokens failed with, which says nothing of them


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        job: of the part, whose row it is.
        ours: it is this project's, and not a peer's: its failure is one of the run.
        figures: by name, with the unit in it; None: not known, and `text` says why.
        text: for people, the figures in short, or why there are none.
    """

    part: str
    name: str
    job: str = ""
    state: State = "measured"
    ours: bool = True
    figures: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""

    @property
    def lacked_time(self) -> bool:
        return self.state == "failed" and self.text.startswith((NO_TIME, STOPPED))

    @property
    def line(self) -> str:
        mark = "" if self.state == "measured" else f"{self.state}: "
        return f"{self.part:9} {self.name:44} {mark}{self.text}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def without_figures(self) -> Row:
        """Of a dry run: which figures there would be, and none of them."""
        if self.state != "measured":
            return self
        names = sorted(self.figures)
        return replace(self, figures={"names": names}, text="ran")


def reason(error: BaseException) -> str:
    """The error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]


def store(path: Path | None, found: Mapping[str, Any]) -> None:
    """Write a file that is whole whenever it is looked at."""
    if path is not None:
        beside = path.with_name(f"{path.name}.new")
        beside.write_text(json.dumps(found, indent=1) + "\n")
        os.replace(beside, path)
