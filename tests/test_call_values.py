"""Sizes that are known when a step runs, and memory of such sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selective_compile.call_values import Memory, NotFollowed, Pointer, Size, Storage, contiguous_strides

T, N = Size.symbol(1), Size.symbol(2)


@given(st.integers(-9, 9), st.integers(-9, 9), st.integers(-9, 9), st.lists(st.integers(0, 99), min_size=3, max_size=3))
def test_sums_and_multiples_are_those_of_their_values(a: int, b: int, c: int, symbols: list[int]) -> None:
    _, t, n = symbols
    found = (T * a + b) + N * c + 2 * T
    value = found if isinstance(found, int) else found.at(symbols)
    assert value == t * a + b + n * c + 2 * t


def test_what_becomes_a_number_is_one() -> None:
    assert T * 0 == 0 and T + T * -1 == 0 and (T * 6 + 4) // 2 == T * 3 + 2
    assert T * 2 + N == N + T * 2 and T != N


@pytest.mark.parametrize(
    "act",
    [lambda: T * N, lambda: (T * 3) // 2, lambda: T == 1, lambda: bool(T)],
    ids=["product", "rest", "comparison", "branch"],
)
def test_what_is_not_linear_is_refused(act: object) -> None:
    with pytest.raises(NotFollowed, match="size"):
        act()  # type: ignore[operator]


def test_one_covers_another_if_it_does_for_all_symbols() -> None:
    big, small = T * 4 + 8, T * 3 + 8
    less = T * -1 + 100
    assert isinstance(big, Size) and isinstance(small, Size) and isinstance(less, Size)
    assert not less.covers(Size(50, ())) and Size(100, ()).covers(less)
    assert big.covers(small) and not small.covers(big) and not big.covers(N)


def test_memory_lies_where_a_tensor_of_its_shape_would() -> None:
    memory = Memory.empty((T, 4, 8), (32, 8, 1), torch.float32)
    assert memory.storage.num_bytes == T * 128 and memory.is_contiguous() and memory.numel() == T * 32
    part = memory.view((T, 2, 8), (32, 8, 1), 16)
    assert part.data_ptr() == Pointer(memory.storage, 64) and not part.is_contiguous()
    with pytest.raises(NotFollowed, match="not contiguous"):
        part.contiguous()
    assert part.view((8,), (1,), T).data_ptr() == Pointer(memory.storage, T * 4 + 64)
    turned = Memory.empty((4, T), (1, 4), torch.bfloat16)
    assert turned.storage.num_bytes == T * 8 and not turned.is_contiguous()


def test_memory_of_an_argument_has_no_size() -> None:
    given = Memory(Storage(argument=3), torch.int64, (1, T), (T, 1))
    assert given.storage.num_bytes is None and given.is_contiguous()
    assert given.new_empty((T, 2)).stride() == contiguous_strides((T, 2)) == (2, 1)
