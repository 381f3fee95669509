"""For how many tokens a condition holds."""

from __future__ import annotations

import pytest
import sympy
from torch.utils._sympy.functions import FloorDiv, Mod

from selective_compile.passes.lengths import (
    ALL_LENGTHS,
    CAPTURE_TOKENS,
    bounds_requests,
    ends_of,
    longest,
)

S = sympy.Symbol("s", integer=True, positive=True)
T = sympy.Symbol("t", integer=True, positive=True)

FOR_ALL = (sympy.Eq(S, T, evaluate=False), S >= 2, sympy.Ne(S, 1), 3 * S > 5, sympy.Ne(S * 64, 0))
UP_TO = {
    S <= 512: 512,
    S < 5000: 4999,
    2 * S + 1 <= 2049: 1024,
    sympy.Ne(S, 777): 776,
    sympy.Eq(S, 64 - sympy.Max(0, 64 - S)): 64,
    sympy.Eq(sympy.Mod(S, 2), 0): 2,
    sympy.Ne(3 * S + 7, 3007): 999,
    S >= 3: 1,
    S <= 1_000_003: 1_000_003,
    sympy.Ne(Mod(S, FloorDiv(300, S)), 300): 300,  # has no value from 301 on: a remainder by 0
}


@pytest.mark.parametrize("condition", FOR_ALL, ids=str)
def test_what_no_length_breaks(condition: sympy.Basic) -> None:
    assert longest(condition, 2) == ALL_LENGTHS


@pytest.mark.parametrize("condition", UP_TO, ids=str)
def test_what_a_length_breaks(condition: sympy.Basic) -> None:
    assert longest(condition, 2) == UP_TO[condition]


def test_conditions_that_end_are_told_the_first_one_first() -> None:
    assert ends_of([S <= 512, S < 300, *FOR_ALL, S <= 299]) == (299, 512)
    assert ends_of(FOR_ALL) == ()


@pytest.mark.parametrize("last", [2, CAPTURE_TOKENS - 1, CAPTURE_TOKENS, CAPTURE_TOKENS + 1])
def test_what_ends_before_the_captured_length_bounds_nothing(last: int) -> None:
    assert bounds_requests(S <= last) == (last > CAPTURE_TOKENS)
