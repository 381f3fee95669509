"""A run as a trace for chrome://tracing and https://ui.perfetto.dev: a row for the steps, and one for each request."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Lock
from typing import Any, Self

from selective_compile.runtime.engine import Engine
from selective_compile.runtime.request_state import RequestId
from selective_compile.runtime.stats import StepObserver, StepRecord

STEPS_ROW = 0


class TraceFile:
    """Writes as the steps are observed: `with TraceFile(path) as trace: trace.follow(engine)`, until it is closed.

    Several engines may be followed, from several threads; each is a process of the trace. A file that was cut off, its
    end missing, can be opened as well.
    """

    def __init__(self, path: Path | str) -> None:
        """Raises OSError where nothing can be written there."""
        self._file = Path(path).open("w", encoding="utf-8")
        self._file.write("[\n")
        self._first = True
        self._lock = Lock()
        self._rows = EngineRows(1)
        self._followed: list[tuple[Engine, StepObserver]] = []
        self._write(self._rows.begin())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def follow(self, engine: Engine) -> None:
        """Observe the engine from now on until the end."""
        if not self._followed:
            observer: StepObserver = self.observe
        else:
            first, _ = self._followed[0]
            rows = EngineRows(1 + len(self._followed), later=engine.began - first.began)
            self._write(rows.begin())

            def observer(record: StepRecord) -> None:
                self._write(rows.of(record))

        self._followed.append((engine, observer))
        engine.add_observer(observer)

    def close(self) -> None:
        """The end; an observer that is called nevertheless writes nothing more."""
        for engine, observer in self._followed:
            engine.remove_observer(observer)
        self._followed.clear()
        with self._lock:
            if not self._file.closed:
                self._file.write("\n]\n")
                self._file.close()

    def observe(self, record: StepRecord) -> None:
        """Write what a step did, of the first engine that is followed or of one that is not."""
        self._write(self._rows.of(record))

    def _write(self, events: list[dict[str, Any]]) -> None:
        with self._lock:
            for event in events if not self._file.closed else ():
                self._file.write(("" if self._first else ",\n") + json.dumps(event))
                self._first = False


class EngineRows:
    """The events of one engine's steps; each request has a row."""

    def __init__(self, process: int, *, later: float = 0.0) -> None:
        """`later`: seconds from the beginning of the trace to that of the engine's clock."""
        self._process = process
        self._later = later
        self._rows: dict[RequestId, int] = {}
        self._last_row = STEPS_ROW
        self._events: list[dict[str, Any]] = []

    def begin(self) -> list[dict[str, Any]]:
        """What comes first."""
        self._name("process_name", STEPS_ROW, f"engine {self._process - 1}")
        self._name("thread_name", STEPS_ROW, "steps")
        return self._taken()

    def of(self, record: StepRecord) -> list[dict[str, Any]]:
        """What the step did."""
        tokens = sum(share.tokens for share in record.shares)
        about = {"tokens": tokens, "requests": len(record.shares), "preempted": list(map(str, record.preempted))}
        self._span(record, STEPS_ROW, f"step {record.step}", {**about, "predicted seconds": record.predicted_seconds})
        for share in record.shares:
            name = f"prefill {share.tokens}" if share.is_prefill else "decode"
            self._span(record, self._row(share.request_id), name, {"tokens": share.tokens, "step": record.step})
        for request_id in record.preempted:
            row = self._row(request_id)
            self._add({"name": "preempted", "ph": "i", "s": "t", "ts": self._moment(record), "tid": row})
        for end in record.ended:
            self._rows.pop(end.request_id, None)  # a later request of that id gets a row of its own
        return self._taken()

    def _span(self, record: StepRecord, row: int, name: str, about: dict[str, Any]) -> None:
        times = {"ts": self._moment(record), "dur": record.seconds * 1e6}
        self._add({"name": name, "ph": "X", **times, "tid": row, "args": about})

    def _moment(self, record: StepRecord) -> float:
        return (self._later + record.started) * 1e6

    def _row(self, request_id: RequestId) -> int:
        if request_id not in self._rows:
            self._last_row += 1
            self._rows[request_id] = self._last_row
            self._name("thread_name", self._last_row, str(request_id))
        return self._rows[request_id]

    def _name(self, what: str, row: int, name: str) -> None:
        self._add({"name": what, "ph": "M", "tid": row, "args": {"name": name}})

    def _add(self, event: dict[str, Any]) -> None:
        self._events.append(event | {"pid": self._process})

    def _taken(self) -> list[dict[str, Any]]:
        events, self._events = self._events, []
        return events
