"""Functions that Dynamo takes for constant, of which only those that ask for torch's version are told."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from transformers.utils import import_utils

from selective_compile.told_objects import Words, asks_for_torch_alone, is_marked_constant

ASKING: Any = import_utils.is_torch_less_or_equal.__wrapped__


def test_what_compares_torchs_version_is_told() -> None:
    if not is_marked_constant(ASKING):
        pytest.skip("this release of transformers marks none")
    assert asks_for_torch_alone(ASKING)
    assert "is_torch_less_or_equal" in Words().of_value(ASKING)


def answering(answer: bool) -> Any:
    @functools.wraps(ASKING)
    def found(*arguments: Any) -> bool:
        return answer

    return found


@pytest.mark.parametrize("how", ["in a closure", "another version", "asks for more"])
def test_others_are_not(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function = ASKING
    if how == "in a closure":
        function = answering(True)
    elif how == "another version":
        monkeypatch.setattr(import_utils, "get_torch_version", lambda: "1.0")
    else:
        function = import_utils.is_torch_accelerator_available.__wrapped__
    monkeypatch.setattr(function, "_dynamo_marked_constant", True, raising=False)
    with pytest.raises(ValueError, match="conditions must be told alike in every process, got one of a function"):
        Words().of_value(function)
