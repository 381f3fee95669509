"""What jobs tell: a row for each thing that was measured, left out, or failed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

State = Literal["measured", "skipped", "failed"]

# What a row says that has no figure for lack of time alone.
NO_TIME = "no time was left"
STOPPED = "stopped after"
# Behind this row of a job nothing has a measure, so that how it ends then counts for none.
ALL_TIMED = "all timed"
# What is served, that which says least of the trace first: all its requests, with an eighth of their tokens; an eighth
# of them, as they are; the trace.
SHORT, SAMPLE, TRACE = KINDS = "a short sample", "a sample", "the trace"
NOT_COMPARED = "not compared: "  # before what a comparison of tokens failed with, which says nothing of them


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        job: of the part, whose row it is.
        ours: it is this project's, and not a peer's: its failure is one of the run.
        figures: by name, with the unit in it; None: not known, and `text` says why.
        text: for people, the figures in short, or why there are none.
        detail: of an error, for the file alone: the end of its traceback.
    """

    part: str
    name: str
    job: str = ""
    state: State = "measured"
    ours: bool = True
    figures: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    detail: str = ""

    @property
    def lacked_time(self) -> bool:
        return self.state == "failed" and self.text.startswith((NO_TIME, STOPPED))

    @property
    def line(self) -> str:
        mark = "" if self.state == "measured" else f"{self.state}: "
        return f"{self.part:9} {self.name:44} {mark}{self.text}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Row | None:
        """None: it is no row, but what some library printed."""
        try:
            return cls(**json.loads(line))
        except (ValueError, TypeError):
            return None

    def without_figures(self) -> Row:
        """Of a dry run: which figures there would be, and none of them."""
        if self.state != "measured":
            return self
        names = sorted(self.figures)
        return replace(self, figures={"names": names}, text="ran")


def store(path: Path | None, found: Mapping[str, Any]) -> None:
    """Write a file that is whole whenever it is looked at."""
    if path is not None:
        beside = path.with_name(f"{path.name}.new")
        beside.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, path)
