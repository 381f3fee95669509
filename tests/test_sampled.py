"""Which of a test's combinations a run has that is not `--exhaustive`."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]
CONFTEST = """
    from tests.sampled import take_turns

    def pytest_addoption(parser):
        parser.addoption("--exhaustive", action="store_true")

    def pytest_collection_modifyitems(config, items):
        take_turns(config, items)
"""
SUITE = """
    import pytest

    GIVEN = [("gpu", name) for name in "abcd"] + [("tpu", name) for name in "bcd"] + [("cpu", "d")]

    @pytest.mark.sampled("target")
    @pytest.mark.parametrize(("target", "name"), GIVEN)
    def test_together(target, name):
        pass

    @pytest.mark.sampled("target")
    @pytest.mark.parametrize("size", [1, 2, 3])
    @pytest.mark.parametrize("target", ["gpu", "tpu"])
    def test_apart(target, size):
        pass

    @pytest.mark.parametrize("target", ["gpu", "tpu"])
    def test_all(target):
        pass
"""


@pytest.fixture
def ran(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\nmarkers =\n    sampled(by): one in turn")
    pytester.makepyfile(SUITE)
    return pytester


def names_of(result: pytest.RunResult) -> set[str]:
    return {line.rpartition("::")[2] for line in result.outlines if "::" in line}


def test_each_combination_has_one_value_in_turn(ran: pytest.Pytester) -> None:
    result = ran.runpytest_inprocess("--collect-only", "-q")
    assert names_of(result) == {
        *("test_together[gpu-a]", "test_together[tpu-b]", "test_together[gpu-c]", "test_together[gpu-d]"),
        *("test_apart[gpu-1]", "test_apart[tpu-2]", "test_apart[gpu-3]"),
        *("test_all[gpu]", "test_all[tpu]"),
    }
    result.stdout.fnmatch_lines("9/16 tests collected (7 deselected)*")


def test_all_if_it_is_asked_for(ran: pytest.Pytester) -> None:
    assert len(names_of(ran.runpytest_inprocess("--collect-only", "-q", "--exhaustive"))) == 16
