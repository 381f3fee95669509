"""Variables of the environment are found by the names that stand in code, or it is said that they do not."""

from __future__ import annotations

import os
from collections.abc import Callable
from os import environ
from typing import Any

import pytest

from selective_compile.environment_read import variables_read

NAME = "OF_THIS_TEST"
NAMED: list[Callable[[], Any]] = [
    lambda: os.environ.get("OF_THIS_TEST"),
    lambda: os.environ.get("OF_THIS_TEST", "0") == "1",
    lambda: os.environ["OF_THIS_TEST"],
    lambda: environ["OF_THIS_TEST"],
    lambda: os.getenv("OF_THIS_TEST", "0"),
    lambda: "OF_THIS_TEST" in os.environ,
    lambda: [os.getenv("OF_THIS_TEST") for _ in range(2)],
]
MADE: list[Callable[[], Any]] = [
    lambda: os.environ.get(NAME),
    lambda: os.environ[NAME],
    lambda: os.getenv(NAME.upper()),
    lambda: os.environ.get(f"OF_{NAME}"),
    lambda: os.environ["OF_" + NAME],
    lambda: [os.environ.get(name) for name in ("OF_THIS_TEST", "OTHER")],
    lambda: NAME in os.environ,
    lambda: dict(os.environ),
]


@pytest.mark.parametrize("number", range(len(NAMED)))
def test_a_name_in_the_code_is_found(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert variables_read([NAMED[number].__code__]) == {}
    monkeypatch.setenv("OF_THIS_TEST", "7")
    assert variables_read([NAMED[number].__code__]) == {"OF_THIS_TEST": "7"}


@pytest.mark.parametrize("number", range(len(MADE)))
def test_a_name_made_elsewhere_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match="names of variables must stand in the code"):
        variables_read([MADE[number].__code__])
