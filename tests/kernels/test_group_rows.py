"""Rows in the order of their groups, and in any other: kernels against the definition, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from selective_compile import reference
from selective_compile.grouped_ops import group_rows, take_rows
from selective_compile.implementations import forced_implementation
from selective_compile.kernels import group_rows_cpu
from tests.kernels.test_linear_triton import compiling, triton_cache  # noqa: F401

triton = pytest.importorskip("triton")
launcher = pytest.importorskip("selective_compile.kernels.group_rows_triton")
ahead = pytest.importorskip("tests.kernels.ahead_of_time")
native = pytest.mark.skipif(not group_rows_cpu.available(), reason=str(group_rows_cpu.unavailable_reason()))
RUNS = [pytest.param(group_rows_cpu.group_rows, marks=native, id="cpu"), pytest.param(launcher.group_rows, id="triton")]


def choices(tokens: int, each: int, groups: int) -> Tensor:
    """One of so many is of no group."""
    return torch.randint(0, groups + 1, (tokens, each))


def assert_same(found: tuple[Tensor, ...], choice: Tensor, groups: int, cu_seqlens_q: Tensor | None) -> None:
    for one, other in zip(found, reference.group_rows(choice, groups, cu_seqlens_q), strict=True):
        assert one.dtype == other.dtype and torch.equal(one.cpu(), other)


@pytest.mark.parametrize("run", RUNS)
@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 70),
    each=st.integers(1, 9),
    groups=st.integers(1, 40),
    used=st.none() | st.integers(0, 70),
    seed=st.integers(0, 2**16),
)
def test_as_the_definition(run: Any, tokens: int, each: int, groups: int, used: int | None, seed: int) -> None:
    torch.manual_seed(seed)
    choice = choices(tokens, each, groups)
    bounds = None if used is None else torch.tensor([0, min(used, tokens), min(used, tokens)], dtype=torch.int32)
    assert_same(run(choice, groups, bounds), choice, groups, bounds)


@pytest.mark.parametrize("bounded", [False, True])
def test_more_rows_than_are_counted(bounded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "MOST", 64)
    for tokens in (9, 100):
        bounds = torch.tensor([0, tokens // 2], dtype=torch.int32) if bounded else None
        choice = choices(tokens, 7, 12)
        assert_same(launcher.group_rows(choice, 12, bounds), choice, 12, bounds)


@pytest.mark.parametrize("run", [*RUNS, pytest.param(reference.group_rows, id="reference")])
def test_nobodys_tokens_choose_as_the_last_of_somebodys(run: Any) -> None:
    choice = torch.tensor([[0, 3], [2, 1], [4, 4], [5, 0]])
    order, places, ends = run(choice, 6, torch.tensor([0, 1, 2], dtype=torch.int32))
    assert ends.tolist() == [1, 4, 7, 8, 8, 8] and order.tolist() == [0, 3, 5, 7, 2, 4, 6, 1]
    assert places[order].tolist() == list(range(8))


@pytest.mark.parametrize("run", [*RUNS, pytest.param(reference.group_rows, id="reference")])
def test_no_rows(run: Any) -> None:
    order, places, ends = run(torch.zeros((0, 4), dtype=torch.int64), 3, torch.tensor([0], dtype=torch.int32))
    assert order.shape == places.shape == (0,) and ends.tolist() == [0, 0, 0]


@pytest.mark.parametrize("implementation", ["cpu", "triton", "reference"])
def test_the_operators(implementation: Any) -> None:
    choice = choices(20, 3, 5).t().contiguous().t()
    with forced_implementation(implementation), torch.no_grad():
        order, places, ends = group_rows(choice, 5)
        assert_same((order, places, ends), choice, 5, None)
        bounds = torch.tensor([0, 9, 4, 1, 11], dtype=torch.int32)[::2]
        assert_same(group_rows(choice, 5, bounds), choice, 5, bounds)
        for x in (torch.randn(60, 7), torch.randn(7, 60).bfloat16().t(), torch.randn(60, 0)):
            assert torch.equal(take_rows(x, order[::2]), x[order[::2]])


def test_what_is_refused() -> None:
    choice = torch.tensor([[0, 1]])
    with pytest.raises(ValueError, match=r"choice must be \[T, k\] of int64"):
        group_rows(choice[0], 2)
    with pytest.raises(ValueError, match="groups must be at least 1, got 0"):
        group_rows(choice, 0)
    with pytest.raises(ValueError, match=r"cu_seqlens_q must be \[N \+ 1\] of int32"):
        group_rows(choice, 2, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"cu_seqlens_q must be \[N \+ 1\] of int32, got \[0\]"):
        group_rows(choice, 2, torch.empty(0, dtype=torch.int32))
    with pytest.raises(ValueError, match="groups must not be negative"):
        group_rows(choice - 1, 2)
    with pytest.raises(ValueError, match="x and index must be"):
        take_rows(torch.ones(2, 2), torch.tensor([0], dtype=torch.int32))


@compiling
@pytest.mark.usefixtures("triton_cache")
@pytest.mark.parametrize("target", ahead.TARGETS, ids=str)
def test_it_ships(target: Any, tmp_path: Any) -> None:
    constants = {"EACH": 8, "HAS_BOUNDS": True}
    constants |= {"BLOCK_ASKED": launcher.BLOCK_ASKED, "BLOCK_ROWS": launcher.BLOCK_ROWS}
    types = {"order": "*i64", "places": "*i64", "ends": "*i32", "choice": "*i64", "cu_seqlens_q": "*i32"}
    compiled = ahead.compile_ahead(launcher._group_rows_kernel, target, types, constants, num_warps=launcher.NUM_WARPS)
    ahead.assert_ships(compiled, tmp_path)


@pytest.mark.gpu
def test_rows_on_a_gpu() -> None:
    for tokens in (1, 2, 33, 500, 5000):
        choice, bounds = choices(tokens, 8, 60), torch.tensor([0, (tokens + 1) // 2], dtype=torch.int32)
        assert_same(launcher.group_rows(choice.cuda(), 60, bounds.cuda()), choice, 60, bounds)
