"""The C++ kernels that change scores before a token is chosen, held to the code that runs on any device."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from selective_compile.kernels import penalties_cpu
from selective_compile.kernels.penalties_cpu import Banned, Penalised, forbid_tokens, penalise_tokens
from selective_compile.runtime.penalties import penalise_by_torch

pytestmark = pytest.mark.skipif(not penalties_cpu.available(), reason=str(penalties_cpu.unavailable_reason()))


def random_scores(rows: int, vocabulary: int, dice: torch.Generator) -> Tensor:
    """Rows that lie apart in a wider tensor."""
    scores = torch.randn(rows, vocabulary + 5, generator=dice)
    scores[0, :2] = torch.tensor([-torch.inf, 0.0])
    return scores[:, :vocabulary]


def random_tokens(count: int, vocabulary: int, dice: torch.Generator) -> array[int]:
    return array("q", torch.randint(0, vocabulary, (count,), generator=dice).tolist())


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 6),
    vocabulary=st.sampled_from([2, 40, 1000]),
    length=st.sampled_from([0, 1, 30, 20_000]),
)
def test_penalties_and_bans_are_those_of_the_code_for_any_device(
    seed: int, rows: int, vocabulary: int, length: int
) -> None:
    dice = torch.Generator().manual_seed(seed)
    scores = random_scores(rows, vocabulary, dice)
    penalties = [Penalised(row, random_tokens(length, vocabulary, dice), 0.5 + row) for row in range(0, rows, 2)]
    bans = [Banned(row // 2, random_tokens(length % 7, vocabulary, dice)) for row in range(rows)]
    expected = scores.clone()
    penalise_by_torch(expected, penalties, bans)
    assert penalise_tokens(scores, penalties, bans)
    assert torch.equal(scores, expected)


def test_a_penalty_is_that_of_transformers() -> None:
    scores, tokens = torch.randn(1, 50), array("q", [3, 9, 3, 3, 0])
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([tokens.tolist()]), scores.clone())
    other = scores.clone()
    penalise_by_torch(other, [Penalised(0, tokens, 1.3)], [])
    assert penalise_tokens(scores, [Penalised(0, tokens, 1.3)], [])
    assert torch.equal(scores, expected) and torch.equal(other, expected)


@pytest.mark.parametrize("token", [-1, 50])
def test_a_token_of_another_vocabulary_is_an_error_and_changes_nothing(token: int) -> None:
    scores = torch.randn(2, 50)
    before = scores.clone()
    with pytest.raises(IndexError, match="less than the vocabulary size 50"):
        penalise_tokens(scores, [Penalised(0, array("q", [1, 2]), 2.0)], [Banned(1, array("q", [token]))])
    assert torch.equal(scores, before)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocabulary=st.sampled_from([1, 31, 32, 33, 49, 1000, 40_000]),
    share=st.sampled_from([0.0, 0.01, 0.5, 0.999, 1.0]),
)
def test_what_a_grammar_forbids_cannot_come_and_the_rest_stays(seed: int, vocabulary: int, share: float) -> None:
    dice = torch.Generator().manual_seed(seed)
    scores, rows = random_scores(4, vocabulary, dice), [2, 0, 3]
    allowed = torch.rand(3, -(-vocabulary // 32) * 32, generator=dice) < share
    bits = np.packbits(allowed.numpy(), axis=1, bitorder="little").view(np.int32)
    expected = scores.clone()
    expected[rows] = expected[rows].masked_fill(~allowed[:, :vocabulary], -torch.inf)
    assert forbid_tokens(scores, rows, bits)
    assert torch.equal(scores, expected)


def test_what_there_is_no_kernel_for_stays() -> None:
    for scores in (torch.randn(2, 8).double(), torch.randn(8, 2).T):
        before = scores.clone()
        assert not penalise_tokens(scores, [Penalised(0, array("q", [1]), 2.0)], [])
        assert not forbid_tokens(scores, [0], np.zeros((1, 1), dtype=np.int32))
        assert torch.equal(scores, before)
