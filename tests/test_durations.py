"""Which tests a short run has, which files come first, and what is written down of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.durations import DurationRecorder, recorded

pytest_plugins = ["pytester"]
CONFTEST = """
    from tests.durations import ONE_CASE, SHARE, left_to_a_long_run, long_files_first

    SECONDS = {
        "test_b.py::test_some": 0.4 * SHARE,
        "test_b.py::test_one": 0.9 * ONE_CASE,
        "test_b.py::test_none": 1.1 * ONE_CASE,
        "test_c.py::test_x": 1.1 * ONE_CASE,
        "test_c.py::test_z": 0.9 * ONE_CASE,
    }

    def pytest_addoption(parser):
        parser.addoption("--short", action="store_true")

    def pytest_collection_modifyitems(config, items):
        if config.getoption("--short"):
            left = left_to_a_long_run(items, SECONDS)
            items[:] = [item for item in items if item not in left]
        long_files_first(items, SECONDS)
"""
SUITE = """
    import pytest

    every = pytest.mark.parametrize("n", range(5))

    @every
    def test_some(n): pass

    @every
    def test_one(n): pass

    @every
    def test_none(n): pass

    @every
    def test_of_no_record(n): pass
"""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_a="def test_y(): pass", test_b=SUITE, test_c="def test_x(): pass\ndef test_z(): pass")
    return pytester


def names_of(result: pytest.RunResult) -> list[str]:
    return [line for line in result.outlines if "::" in line]


def test_a_short_run_has_as_many_of_each_as_there_is_room_for(suite: pytest.Pytester) -> None:
    names = names_of(suite.runpytest_inprocess("--collect-only", "-q", "--short"))
    assert names == [
        *("test_b.py::test_some[0]", "test_b.py::test_some[2]", "test_b.py::test_one[0]"),
        *(f"test_b.py::test_of_no_record[{n}]" for n in range(5)),
        *("test_c.py::test_z", "test_a.py::test_y"),
    ]


def test_others_have_all_and_what_takes_long_comes_first(suite: pytest.Pytester) -> None:
    names = names_of(suite.runpytest_inprocess("--collect-only", "-q"))
    assert [name.partition("[")[0] for name in names] == [
        *["test_b.py::test_some"] * 5,
        *["test_b.py::test_one"] * 5,
        *["test_b.py::test_none"] * 5,
        *["test_b.py::test_of_no_record"] * 5,
        *("test_c.py::test_x", "test_c.py::test_z", "test_a.py::test_y"),
    ]


def test_what_is_written_down(tmp_path: Path) -> None:
    file = tmp_path / "durations.json"
    file.write_text(json.dumps({"test_a.py::test_not_run": 7.0, "test_a.py::test_fast_now": 7.0}))
    recorder = DurationRecorder(file)
    for name, when, seconds in (
        ("test_slow[a]", "setup", 1.0),
        ("test_slow[a]", "call", 5.0),
        ("test_slow[b]", "call", 2.0),
        ("test_fast_now", "call", 0.1),
    ):
        given = {"keywords": {}, "outcome": "passed", "longrepr": None, "when": when, "duration": seconds}
        recorder.pytest_runtest_logreport(
            pytest.TestReport(nodeid=f"test_a.py::{name}", location=("", 0, ""), **given)  # type: ignore[arg-type]
        )
    recorder.pytest_sessionfinish()
    assert recorded(file) == {"test_a.py::test_not_run": 7.0, "test_a.py::test_slow": 4.0}


def test_all_that_is_written_down_is_there() -> None:
    root = Path(__file__).parents[1]
    for name in recorded():
        path, *_, function = name.split("::")
        text = (root / path).read_text(encoding="utf-8")
        assert f"def {function}(" in text or "RuleBasedStateMachine" in text, name
