"""What functions take where they are called, as benchmarks of starts ask."""

from __future__ import annotations

import sys
import time
from types import ModuleType

import pytest

from benchmarks.phases import watched


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("a_module_of_functions")

    def slow(seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def fails() -> None:
        raise KeyError("why")

    made.slow, made.fails = slow, fails  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def test_calls_of_a_phase_are_added_and_functions_are_themselves_again(module: ModuleType) -> None:
    before = module.slow
    with watched({"a_module_of_functions.slow": "sleeping", "a_module_of_functions.fails": "failing"}) as found:
        assert module.slow(0.02) == 0.02 and module.slow(0.03) == 0.03
        with pytest.raises(KeyError, match="why"):
            module.fails()
    cpu, clock = found["sleeping"]
    assert 0.05 <= clock and cpu < clock and "failing" not in found
    assert module.slow is before
    with pytest.raises(KeyError), watched({"a_module_of_functions.fails": "failing"}):
        module.fails()
    assert module.fails.__name__ == "fails"


def test_functions_of_a_start_are_there() -> None:
    first_token = pytest.importorskip("benchmarks.gpu_parts.first_token")
    with watched(first_token.FUNCTIONS) as found:
        assert not found
