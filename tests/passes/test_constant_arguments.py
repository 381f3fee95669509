"""Lists among what a function is called with: compared and hashed as they were, given again as new lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from selective_compile.passes.constant_arguments import as_given, is_constant, kept, number_pair


@pytest.mark.parametrize("value", [1, "a", None, torch.float32, (1, 2), [1, 2], [], [(1, [2.0]), "b"], ([1], (2,))])
def test_constants_are_hashed_and_given_as_they_were(value: Any) -> None:
    found = kept(value)
    assert is_constant(found) and hash(found) == hash(kept(value))
    assert as_given(found) == value and type(as_given(found)) is type(value)


def test_a_list_is_no_tuple_and_given_anew_each_time() -> None:
    value: list[Any] = [0.0, [1.0]]
    found = kept(value)
    assert found != kept((0.0, [1.0])) != kept((0.0, (1.0,)))
    first, second = as_given(found), as_given(found)
    value[1].append(2.0)
    first[1].append(3.0)
    assert second == as_given(found) == [0.0, [1.0]]


class Counted(list[int]):
    """Of which nobody else can make another."""


@pytest.mark.parametrize("value", [torch.ones(2), [torch.ones(2)], (1, [torch.ones(2)]), {"a": 1}, Counted(), [{1}]])
def test_others_are_no_constants(value: Any) -> None:
    assert not is_constant(kept(value))


def test_pairs_of_numbers() -> None:
    assert number_pair(kept([0.0, 2])) == number_pair((0.0, 2)) == (0.0, 2)
    assert not any(map(number_pair, map(kept, ([1.0], (1, 2, 3), ["a", 1], 2.0, None, [[1, 2], 3]))))
