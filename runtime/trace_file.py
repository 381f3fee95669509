"""A run as a trace for chrome://tracing and https://ui.perfetto.dev: a row for the steps, and one for each request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

from selective_compile.runtime.engine import Engine
from selective_compile.runtime.request_state import RequestId
from selective_compile.runtime.stats import StepRecord

PROCESS = 1
STEPS_ROW = 0


class TraceFile:
    """Writes as the steps are observed: `with TraceFile(path) as trace: trace.follow(engine)`, until it is closed.

    A file that was cut off, its end missing, can be opened as well.
    """

    def __init__(self, path: Path | str) -> None:
        """Raises OSError where nothing can be written there."""
        self._file = Path(path).open("w", encoding="utf-8")
        self._file.write("[\n")
        self._rows: dict[RequestId, int] = {}
        self._first = True
        self._followed: list[Engine] = []
        self._name_row(STEPS_ROW, "steps")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def follow(self, engine: Engine) -> None:
        """Observe the engine from now on until the end."""
        self._followed.append(engine)
        engine.add_observer(self.observe)

    def close(self) -> None:
        """The end; an observer that is called nevertheless writes nothing more."""
        while self._followed:
            self._followed.pop().remove_observer(self.observe)
        if self._file.closed:
            return
        self._file.write("\n]\n")
        self._file.close()

    def observe(self, record: StepRecord) -> None:
        """Write what the step did."""
        if self._file.closed:
            return
        tokens = sum(share.tokens for share in record.shares)
        about = {"tokens": tokens, "requests": len(record.shares), "preempted": list(map(str, record.preempted))}
        self._span(record, STEPS_ROW, f"step {record.step}", {**about, "predicted seconds": record.predicted_seconds})
        for share in record.shares:
            name = f"prefill {share.tokens}" if share.is_prefill else "decode"
            self._span(record, self._row(share.request_id), name, {"tokens": share.tokens, "step": record.step})
        for request_id in record.preempted:
            moment = {"name": "preempted", "ph": "i", "s": "t", "ts": record.started * 1e6}
            self._write({**moment, "pid": PROCESS, "tid": self._row(request_id)})
        for end in record.ended:
            self._rows.pop(end.request_id, None)  # a later request of that id gets a row of its own

    def _span(self, record: StepRecord, row: int, name: str, about: dict[str, Any]) -> None:
        times = {"ts": record.started * 1e6, "dur": record.seconds * 1e6}
        self._write({"name": name, "ph": "X", **times, "pid": PROCESS, "tid": row, "args": about})

    def _row(self, request_id: RequestId) -> int:
        if request_id not in self._rows:
            self._last_row += 1
            self._rows[request_id] = self._last_row
            self._name_row(self._last_row, str(request_id))
        return self._rows[request_id]

    def _name_row(self, row: int, name: str) -> None:
        self._last_row = row
        about = {"name": "thread_name", "ph": "M", "pid": PROCESS, "tid": row}
        self._write({**about, "args": {"name": name}})

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(("" if self._first else ",\n") + json.dumps(event))
        self._first = False
