"""What a run has found so far: printed line by line, and in a file that grows with it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts.failures import reason
from benchmarks.gpu_parts.floors import Ceilings
from benchmarks.gpu_parts.measures import Measure, measures, of_less, without_found
from benchmarks.gpu_parts.provenance import checkout, devices, host
from benchmarks.gpu_parts.rows import Row, store
from selective_compile.bench.machine import versions


class Found:
    """The rows so far, and what they say together.

    Attributes:
        is_complete: all jobs were run.
    """

    def __init__(self, path: Path | None, *, dry_run: bool, quick: bool) -> None:
        self._path = path
        self._dry_run = dry_run
        self._about: dict[str, Any] = {"dry_run": dry_run, "quick": quick, "versions": versions()}
        self._about["checkout"] = checkout()
        if not dry_run:
            self._about["machine"] = host()
        self._devices: dict[str, Any] = {}
        self._logs: dict[str, dict[str, str]] = {}
        self._rows: list[Row] = []
        self._shown: list[Row] = []
        self.is_complete = False
        self._keep()

    def tell(self, row: Row) -> None:
        self._rows.append(row)
        self._shown.append(row.without_figures() if self._dry_run else row)
        print(self._shown[-1].line, flush=True)
        self._keep()

    def keep_log(self, part: str, name: str, log: str) -> None:
        """The end of what a job's process printed; behind that of the process that it was begun in."""
        of_part = self._logs.setdefault(part, {})
        of_part[name] = of_part.get(name, "") + log
        self._keep()

    def look_at_devices(self, when: str) -> None:
        """At their clocks, power and temperature; but once where nobody tells them, or takes too long."""
        if not self._dry_run and [] not in self._devices.values():
            self._devices[when] = devices()
            self._keep()

    def complete(self) -> None:
        self.is_complete = True
        self._keep()

    @property
    def failures(self) -> list[Row]:
        """Of this project, not of its peers."""
        return [row for row in self._rows if row.state == "failed" and row.ours]

    @property
    def ceilings(self) -> Ceilings | None:
        """None: they are not known, or this is a dry run."""
        known = {name: value for row in self._shown if row.part == "ceilings" for name, value in row.figures.items()}
        if not set(Ceilings._fields) <= set(known):
            return None
        return Ceilings(*(known[name] for name in Ceilings._fields))

    @property
    def measures(self) -> tuple[Measure, ...]:
        found = measures(self._rows)
        less = without_found if self._dry_run else of_less if self._about["quick"] else None
        return found if less is None else tuple(map(less, found))

    def names_told(self, part: str, job: str) -> tuple[str, ...]:
        return tuple(row.name for row in self._rows if (row.part, row.job) == (part, job))

    def _keep(self) -> None:
        known = {
            "complete": self.is_complete,
            "failed": [f"{row.part}: {row.name}" for row in self.failures],
            "measures": [{**asdict(measure), "reached": measure.reached} for measure in self.measures],
            "rows": [asdict(row) for row in self._shown],
            "devices": self._devices,
            "logs": self._logs,
        }
        try:
            store(self._path, {**self._about, **known})
        except OSError as error:  # a full disk, say, which costs the file and not the run
            print(f"the file is not written: {reason(error)}", flush=True)
