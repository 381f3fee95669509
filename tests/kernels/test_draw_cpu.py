"""The C++ kernel that draws tokens, held to transformers' own warpers: each token at its part of the sum."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from selective_compile.kernels import draw_cpu
from selective_compile.kernels.draw_cpu import draw_tokens, packed_warping
from selective_compile.runtime.philox import uniform

pytestmark = pytest.mark.skipif(not draw_cpu.available(), reason=str(draw_cpu.unavailable_reason()))


def warped(row: Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """[V], as transformers' own warpers leave the row."""
    ids, scores = torch.zeros(1, 1, dtype=torch.int64), row[None].clone()
    scores = TopKLogitsWarper(top_k)(ids, TemperatureLogitsWarper(temperature)(ids, scores))
    scores = TopPLogitsWarper(top_p)(ids, scores) if top_p < 1 else scores
    return (MinPLogitsWarper(min_p)(ids, scores) if min_p else scores)[0]


def drawn(row: Tensor, fractions: Tensor, **wanted: float) -> list[int]:
    scores = row.expand(len(fractions), -1)
    found = draw_tokens(scores, [packed_warping(**wanted)] * len(fractions), fractions.numpy())  # type: ignore[arg-type]
    assert found is not None
    return found


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocabulary=st.sampled_from([1, 2, 17, 511, 512, 1024, 1037, 2500, 33_000]),
    kind=st.sampled_from(["smooth", "few values", "mostly impossible", "steep"]),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 1.75, 30.0]),
    top_k=st.sampled_from([1, 2, 7, 50, 600, 10**6]),
    top_p=st.sampled_from([0.0, 0.2, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
)
def test_every_token_that_warpers_leave_is_drawn_at_its_part_of_the_sum(
    seed: int, vocabulary: int, kind: str, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    dice = torch.Generator().manual_seed(seed)
    row = torch.randn(vocabulary, generator=dice) * (12 if kind == "steep" else 3)
    if kind == "few values":  # with a top_p, which of equal scores stay is left to an unstable sort there
        row, top_p = row.round(), 1.0
    if kind == "mostly impossible":
        row[torch.rand(vocabulary, generator=dice) < 0.99] = -torch.inf
        row[-1] = 0.0
    wanted = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    weights = warped(row, **wanted).double().softmax(-1)  # type: ignore[arg-type]
    ends = weights.cumsum(-1)
    # By the middle of each part; what is as thin as a rounding of the sum has none.
    places = (weights > 1e-9).nonzero()[:, 0]
    places = places[torch.randperm(len(places), generator=dice)[:500]]
    before = row.clone()
    assert drawn(row, (ends - weights / 2)[places], **wanted) == places.tolist()
    assert torch.equal(row, before)


def test_rows_may_lie_apart_and_have_each_its_own_warping() -> None:
    wide = torch.randn(5, 2000)
    wanted = [packed_warping(temperature=0.5 + row, top_k=1 + 20 * row, top_p=0.8, min_p=0.01) for row in range(5)]
    fractions = np.linspace(0.1, 0.9, 5)
    together = draw_tokens(wide[:, :1500], wanted, fractions)
    alone = [
        draw_tokens(wide[row : row + 1, :1500].clone(), wanted[row : row + 1], fractions[row:]) for row in range(5)
    ]
    assert [together] == [[token for found in alone if found for token in found]]


@pytest.mark.parametrize("place", [0, 700, 1499])
def test_a_row_with_what_is_no_number_has_no_token_and_the_others_have_theirs(place: int) -> None:
    scores = torch.randn(3, 1500)
    scores[1, place] = torch.nan
    scores[2, place] = torch.inf
    wanted = [packed_warping(temperature=1.0, top_k=1, top_p=1.0, min_p=0.0)] * 3
    assert draw_tokens(scores, wanted, np.full(3, 0.5)) == [int(scores[0].argmax()), -1, -1]


def test_a_row_without_a_possible_token_has_none() -> None:
    scores = torch.full((1, 40), -torch.inf)
    assert draw_tokens(scores, [packed_warping(temperature=1.0, top_k=5, top_p=0.5, min_p=0.1)], np.zeros(1)) == [-1]


def test_what_there_is_no_kernel_for_is_given_up() -> None:
    scores, wanted = torch.randn(2, 2), [packed_warping(temperature=1.0, top_k=5, top_p=1.0, min_p=0.0)] * 2
    assert draw_tokens(scores.double(), wanted, np.zeros(2)) is None
    assert draw_tokens(scores.T, wanted, np.zeros(2)) is None


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**40)), max_size=9))
def test_fractions_are_those_of_the_numpy_code(keys: list[tuple[int, int]]) -> None:
    seeds, indices = [seed for seed, _ in keys], [index for _, index in keys]
    found = draw_cpu.uniform(seeds, indices)
    assert found is not None and found.tolist() == uniform(seeds, indices).tolist()
