"""Files that take long are handed out first."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]


def test_files_with_slow_tests_come_first_and_then_those_with_many(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        from tests.order import long_files_first

        def pytest_collection_modifyitems(items):
            long_files_first(items)
        """
    )
    pytester.makeini("[pytest]\nmarkers =\n    slow: takes long")
    one, slow = "def test_{}(): pass\n", "import pytest\n@pytest.mark.slow\ndef test_long(): pass\n"
    files = {"test_a": one.format("x"), "test_b": one.format("x") + one.format("a"), "test_c": slow, "test_d": slow}
    pytester.makepyfile(**files, test_e=slow + "@pytest.mark.slow\ndef test_other(): pass\n")
    collected = pytester.runpytest_inprocess("--collect-only", "-q").outlines
    names = [line for line in collected if "::" in line]
    assert names == [
        *("test_e.py::test_long", "test_e.py::test_other", "test_c.py::test_long", "test_d.py::test_long"),
        *("test_b.py::test_x", "test_b.py::test_a", "test_a.py::test_x"),
    ]
