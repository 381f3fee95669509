"""For how many tokens a condition holds that the model tested, or that its operators need."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch.utils._sympy.printers import PythonPrinter

DENSE = 4096  # every length up to here is tried
LARGEST = 2**24
ALL_LENGTHS = LARGEST
STEPS = 8
SHORTEST = 2  # fewer tokens in a step are filled up to so many
CAPTURE_TOKENS = 12  # any length that no model treats specially: not 0 or 1, and shorter than every window in use


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What is ``holds`` for requests of up to ``longest`` tokens, and not of one more; ``once``: of no longer ones."""

    holds: bool
    longest: int
    once: bool


def answer(at: Callable[[int], bool], lengths: Sequence[int]) -> Answer:
    """Tried: ``at`` each of these ``lengths``, which ascend, and in between where it first turns."""
    values = [at(length) for length in lengths]
    holds = values[0]
    if all(value == holds for value in values):
        return Answer(holds=holds, longest=ALL_LENGTHS, once=False)
    change = values.index(not holds)
    last, beyond = lengths[change - 1], lengths[change]
    while beyond - last > 1:
        middle = (last + beyond) // 2
        last, beyond = (middle, beyond) if at(middle) == holds else (last, middle)
    return Answer(holds=holds, longest=last, once=holds not in values[change:])


def bounds_requests(condition: sympy.Basic) -> bool:
    """Whether the condition holds up to some length, that of the captured graph included: it only bounds requests.

    One that fails sooner holds for some of the lengths that a request goes through as it grows, and not for others.
    """
    return longest(condition, SHORTEST) > CAPTURE_TOKENS


def ends_of(conditions: Iterable[sympy.Basic]) -> tuple[int, ...]:
    """The lengths up to which conditions that bound requests hold, the least one first, but for those that hold for
    all."""
    found = sorted({longest(condition, SHORTEST) for condition in conditions} - {ALL_LENGTHS})
    assert all(end > CAPTURE_TOKENS for end in found)
    return tuple(found)


def longest(condition: sympy.Basic, shortest: int) -> int:
    """The length up to which ``condition``, of nothing but the number of tokens, holds from ``shortest`` on.

    `ALL_LENGTHS` if it holds for all, less than ``shortest`` if not even there.  What algebra cannot show is tried at
    every length up to `DENSE`, and beyond around each constant and power of two.
    """
    (symbol, *others) = sorted(condition.free_symbols, key=str) or (None,)
    if symbol is None:
        return ALL_LENGTHS if condition == sympy.true else 0
    condition = condition.subs(dict.fromkeys(others, symbol))
    beyond = sympy.Symbol("beyond", integer=True, positive=True) + shortest - 1
    # sympy's algebra does not know torch's own functions: floor division, remainders.
    if not condition.has(sympy.Function) and is_true(condition.subs(symbol, beyond)):
        return ALL_LENGTHS
    holds, last = test_of(condition, symbol), shortest - 1
    for length in tried(condition, shortest):
        if not holds(length):
            return last
        last = length
    return ALL_LENGTHS


def is_true(condition: sympy.Basic) -> bool:
    """Whether algebra shows it."""
    try:
        return sympy.simplify(condition) is sympy.true
    except RecursionError:  # what a loop over chunks has asked can be nested deeper than algebra goes
        return False


def test_of(condition: sympy.Basic, symbol: sympy.Symbol) -> Callable[[int], bool]:
    """The condition as a function of the length: as Python's own code, a thousand times as fast as substituting."""
    source = PythonPrinter().doprint(condition.xreplace({symbol: sympy.Symbol("length")}))
    code = compile(source, "condition on the number of tokens", "eval")
    known = {"math": math, "torch": torch}

    def holds(length: int) -> bool:
        try:
            return bool(eval(code, known, {"length": length}))
        except ZeroDivisionError:
            return False  # a condition that has no value there does not hold

    return holds


def tried(condition: sympy.Basic, shortest: int) -> list[int]:
    return lengths_around({abs(int(number)) for number in condition.atoms(sympy.Integer)}, shortest)


def lengths_around(constants: Iterable[int], shortest: int, *, dense: int = DENSE, largest: int = LARGEST) -> list[int]:
    """Every length up to ``dense``; up to ``largest`` those around ``constants`` and powers of two, and some from each
    of these powers to the next: a condition need not hold for all lengths behind the one from which it does."""
    near = {c + d for c in constants for d in (-2, -1, 0, 1, 2)}
    powers = [2**k for k in range(dense.bit_length() - 1, largest.bit_length())]
    between = {power + power * step // STEPS for power in powers for step in range(1, STEPS)}
    around = {power + d for power in powers for d in (-1, 0, 1)}
    return sorted(n for n in {*range(shortest, dense), *near, *around, *between} if shortest <= n <= largest)
