"""What is submitted is checked first; every refusal says what must be and what was given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from selective_compile.runtime.prompt import check_length, check_request_id, check_terms, token_ids


@pytest.mark.parametrize(
    "prompt",
    [[3, 0, 9], (3, 0, 9), torch.tensor([3, 0, 9]), np.array([3, 0, 9], dtype=np.int32), iter([3, 0, 9])],
)
def test_one_dimension_of_integers_of_any_kind(prompt: Any) -> None:
    assert token_ids(prompt, 10).tolist() == [3, 0, 9]


@pytest.mark.parametrize("prompt", [[], (), torch.tensor([], dtype=torch.int64)])
def test_empty(prompt: Any) -> None:
    with pytest.raises(ValueError, match="must hold at least one token id, got none"):
        token_ids(prompt, 10)


@pytest.mark.parametrize(("prompt", "given"), [([1, 10], 10), ([-1], -1), ([2**70], 2**70)])
def test_out_of_range(prompt: Any, given: int) -> None:
    with pytest.raises(ValueError, match=f"at least 0 and less than the vocabulary size 10, got {given}"):
        token_ids(prompt, 10)


@pytest.mark.parametrize(
    "prompt",
    [
        [1.0],
        [True],
        ["a"],
        [None],
        [[1, 2]],
        torch.tensor([[1, 2]]),
        torch.tensor([1.0]),
        [torch.ones((), device="meta")],
    ],
)
def test_something_else_than_integers(prompt: Any) -> None:
    with pytest.raises(ValueError, match="must be integers in one dimension, got"):
        token_ids(prompt, 10)


@pytest.mark.parametrize("prompt", ["12", b"12", None, 5, torch.tensor(5)])
def test_no_sequence(prompt: Any) -> None:
    with pytest.raises(ValueError, match="must be a sequence of token ids, got"):
        token_ids(prompt, 10)


def test_a_tensor_that_holds_nothing() -> None:
    with pytest.raises(ValueError, match="^prompt_ids must hold token ids, got a tensor on the device meta"):
        token_ids(torch.tensor([1, 2], device="meta"), 10)


def test_request_ids() -> None:
    assert check_request_id("a") == "a" and check_request_id(2**63) == 2**63
    assert type(check_request_id(np.int64(5))) is int and check_request_id(torch.tensor(5)) == 5
    for wrong in (True, np.bool_(True), 1.5, None, b"a", ("a",), np.array([5, 6]), torch.tensor(5, device="meta")):
        with pytest.raises(ValueError, match="request_id must be a string or an integer, got"):
            check_request_id(wrong)


@pytest.mark.parametrize(
    ("prompt_length", "max_new_tokens", "max_positions", "pool_tokens"),
    [(8, 1, 8, 100), (1, 8, 8, 100), (8, 1, None, 8), (5, 4, None, 8)],
)
def test_the_last_new_token_takes_no_place(
    prompt_length: int, max_new_tokens: int, max_positions: int | None, pool_tokens: int
) -> None:
    lengths = {"max_positions": max_positions, "pool_tokens": pool_tokens}
    check_length(prompt_length, max_new_tokens, **lengths)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"max_new_tokens must be at most {max_new_tokens} .*got {max_new_tokens + 1}"):
        check_length(prompt_length, max_new_tokens + 1, **lengths)  # type: ignore[arg-type]


def test_which_limit_it_is() -> None:
    with pytest.raises(ValueError, match="prompt_ids must be at most 8 tokens for the model's positions, got 9"):
        check_length(9, 1, max_positions=8, pool_tokens=100)
    with pytest.raises(ValueError, match="prompt_ids must be at most 16 tokens for the block pool, got 17"):
        check_length(17, 1, max_positions=None, pool_tokens=16)


@pytest.mark.parametrize(
    ("max_positions", "pool_tokens", "least"),
    [(8, 100, "8 .*model's positions"), (100, 8, "8 .*block pool"), (8, 8, "8 .*model's positions")],
)
def test_of_two_limits_the_smaller_one_is_named(max_positions: int, pool_tokens: int, least: str) -> None:
    with pytest.raises(ValueError, match=f"prompt_ids must be at most {least}, got 200"):
        check_length(200, 1, max_positions=max_positions, pool_tokens=pool_tokens)
    with pytest.raises(ValueError, match=f"max_new_tokens must be at most 4 for the {least.split('.*')[1]} of 8,"):
        check_length(5, 200, max_positions=max_positions, pool_tokens=pool_tokens)


def test_terms_take_integers_of_any_kind() -> None:
    given = {"arrival": 1.0, "priority": np.int32(3), "deadline": np.int64(2), "user": np.int64(7), "cache_salt": None}
    terms = check_terms(**given)  # type: ignore[arg-type]
    assert (terms.priority, terms.deadline, terms.user) == (3, 3.0, 7)
    assert type(terms.priority) is type(terms.user) is int and type(terms.deadline) is float
