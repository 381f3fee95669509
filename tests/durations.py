"""How long tests take, as recorded: which of them a short run has, and which files are handed out first."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("durations.json")
SHARE = 3.0  # recorded seconds that each test function has in a short run
ONE_CASE = 5.0  # what takes no longer runs all the same
LEAST = 3.0  # of all combinations of a function together; what takes less is not written down

Durations = Mapping[str, float]  # mean seconds of a combination, by the function's node id


def recorded(file: Path = FILE) -> dict[str, float]:
    return dict(json.loads(file.read_text(encoding="utf-8")))


def function_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def left_to_a_long_run(items: Sequence[pytest.Item], durations: Durations) -> set[pytest.Item]:
    """Of each function the combinations that its `SHARE` has no room for; those that run are spread evenly.

    One runs all the same where it takes no longer than `ONE_CASE` says; of a function that is not known, all do.
    """
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        functions[function_of(item.nodeid)].append(item)
    left: set[pytest.Item] = set()
    for function, combinations in functions.items():
        mean, count = durations.get(function, 0.0), len(combinations)
        room = int(SHARE // mean) if mean else count
        if not room and mean <= ONE_CASE:
            room = 1
        if room < count:
            left |= set(combinations) - {combinations[i * count // room] for i in range(room)}
    return left


def long_files_first(items: list[pytest.Item], durations: Durations) -> None:
    """So that no process is left with one when the others are through; the tests of a file stay in their order.

    For `--dist loadfile --no-loadscope-reorder`, which hands files to processes in this order.
    """
    seconds: dict[Path, float] = defaultdict(float)
    for item in items:
        seconds[item.path] += durations.get(function_of(item.nodeid), 0.0)
    tests = Counter(item.path for item in items)
    places = {path: place for place, path in enumerate(tests)}
    items.sort(key=lambda item: (-seconds[item.path], -tests[item.path], places[item.path]))


class DurationRecorder:
    """Writes down how long the functions of a run took, at its end; others stay as they are."""

    def __init__(self, file: Path = FILE) -> None:
        self._file = file
        self._seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[function_of(report.nodeid)][report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        known = recorded(self._file) if self._file.exists() else {}
        for function, combinations in self._seconds.items():
            total = sum(combinations.values())
            known.pop(function, None)
            if total >= LEAST:
                known[function] = round(total / len(combinations), 2)
        self._file.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n", encoding="utf-8")
