"""`regroup`, the transfer rule of every view, against what a view does to the numbers of the elements."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from selective_compile.passes.axes import Axis, Dim, Mixes, Sizes, merge_plain, regroup
from selective_compile.passes.rules_reduce import named

B, S = Axis.BATCH, Axis.TOKEN
SYMBOLS = sympy.Symbol("b", integer=True, positive=True), sympy.Symbol("s", integer=True, positive=True)
SIZES = Sizes(batch=SYMBOLS[0], token=SYMBOLS[1])
# Primes that no plain factor below contains: a size says which factors it is made of.
CONCRETE = {B: 5, S: 7}
PLAIN = (2, 3, 4, 6)


def size_of(dim: Dim, values: dict[Axis, object]) -> object:
    return prod([values[f] if isinstance(f, Axis) else f for f in dim])  # type: ignore[arg-type]


def grouped(factors: list[Axis | int], cuts: set[int]) -> tuple[Dim, ...]:
    bounds = [0, *sorted(cuts), len(factors)]
    return tuple(tuple(factors[a:b]) for a, b in zip(bounds, bounds[1:], strict=False))


@st.composite
def views(draw: st.DrawFn) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
    """One sequence of factors, grouped into dimensions in two ways."""
    factors: list[Axis | int] = draw(st.permutations([B, S, *draw(st.lists(st.sampled_from(PLAIN), max_size=3))]))
    cuts = st.sets(st.integers(0, len(factors)), max_size=4)
    return grouped(factors, draw(cuts)), grouped(factors, draw(cuts))


@given(views())
def test_a_view_that_regroups_factors_is_followed(view: tuple[tuple[Dim, ...], tuple[Dim, ...]]) -> None:
    before, after = (tuple(merge_plain(dim) for dim in dims) for dims in view)
    shape = tuple(sympy.sympify(size_of(dim, dict(zip((B, S), SYMBOLS, strict=True)))) for dim in after)
    assert regroup(before, SIZES, tuple(int(s) if s.is_Integer else s for s in shape)) == after


@given(views(), st.permutations(range(5)))
@settings(max_examples=200)
def test_what_it_accepts_is_what_the_elements_do(
    view: tuple[tuple[Dim, ...], tuple[Dim, ...]], order: list[int]
) -> None:
    """Any shape of the right size: refused, or the batch and token index of each element are where it says."""
    before, target = view
    after = tuple(target[i] for i in order if i < len(target))
    symbolic = tuple(sympy.sympify(size_of(dim, dict(zip((B, S), SYMBOLS, strict=True)))) for dim in after)
    try:
        found = regroup(before, SIZES, tuple(int(s) if s.is_Integer else s for s in symbolic))
    except Mixes:
        return
    assert found == tuple(merge_plain(dim) for dim in found)
    for axis in (B, S):
        moved = numbering(before, axis).reshape([int(size_of(dim, CONCRETE)) for dim in found])  # type: ignore[call-overload]
        assert torch.equal(moved, numbering(found, axis))


def numbering(dims: tuple[Dim, ...], axis: Axis) -> torch.Tensor:
    """Each element's index along ``axis``, in a tensor with dimensions ``dims``."""
    factors = [f for dim in dims for f in dim]
    sizes = [CONCRETE[f] if isinstance(f, Axis) else f for f in factors]
    at = factors.index(axis)
    index = torch.arange(sizes[at]).reshape([-1 if i == at else 1 for i in range(len(factors))])
    return index.expand(sizes).reshape([int(size_of(dim, CONCRETE)) for dim in dims])  # type: ignore[call-overload]


def test_cut_token_dimension_is_refused() -> None:
    with pytest.raises(Mixes, match="cuts across"):
        regroup(((B,), (S,), (8,)), SIZES, (SYMBOLS[0], 8, SYMBOLS[1]))
    with pytest.raises(Mixes, match="cuts across"):
        regroup(((B,), (S,), (8,)), SIZES, (SYMBOLS[1], SYMBOLS[0], 8))
    with pytest.raises(Mixes):
        regroup(((6,), (S,)), SIZES, (4, SYMBOLS[1]))


def test_new_dimension_is_named_by_its_size() -> None:
    assert SIZES.dim(1) == ()
    assert SIZES.dim(12) == (12,)
    assert SIZES.dim(SYMBOLS[0] * SYMBOLS[1]) == (B, S)
    with pytest.raises(Mixes):
        SIZES.dim(SYMBOLS[1] + 1)
    with pytest.raises(Mixes):
        SIZES.dim(SYMBOLS[1] ** 2)


def test_a_size_that_is_a_symbol_has_no_name_among_factors() -> None:
    size: Any = ShapeEnv().create_unbacked_symint()
    assert named((size, Axis.TOKEN)) == "tokens"
    assert named((Axis.BATCH, 4, Axis.TOKEN)) == "requests and tokens"
