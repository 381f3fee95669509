"""The C++ kernel that finds candidates, held to the path through torch's `topk`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper

from selective_compile.kernels import candidates_cpu

pytestmark = pytest.mark.skipif(not candidates_cpu.available(), reason=str(candidates_cpu.unavailable_reason()))


def oracle(scores: Tensor, kept: int, temperature: float) -> Tensor:
    """The row as transformers' own warpers leave it, [V]."""
    ids = torch.zeros(1, 1, dtype=torch.int64)
    return TopKLogitsWarper(kept)(ids, TemperatureLogitsWarper(temperature)(ids, scores[None].clone()))[0]


def spread(values: Tensor, ids: Tensor, vocabulary: int) -> Tensor:
    """Candidates as a row of the whole vocabulary, [V]."""
    assert torch.equal(ids, ids.unique()), "in order of token id, each once"
    return torch.full((vocabulary,), -torch.inf).scatter(0, ids, values)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 5),
    vocabulary=st.sampled_from([2, 17, 511, 512, 513, 1024, 2500, 33_000]),
    kind=st.sampled_from(["smooth", "few values", "mostly impossible"]),
)
def test_as_transformers_warpers(seed: int, rows: int, vocabulary: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(rows, vocabulary + 3, generator=generator)
    scores = wide[:, :vocabulary] * 3  # a copy
    if kind == "few values":
        scores = scores.round()
    if kind == "mostly impossible":
        scores[torch.rand(scores.shape, generator=generator) < 0.99] = -torch.inf
    before = scores.clone()
    kept = torch.randint(1, min(vocabulary, 80) + 1, (rows,), generator=generator).tolist()
    temperatures = (torch.rand(rows, generator=generator) * 2 + 0.1).tolist()
    found = candidates_cpu.top_candidates(scores, kept, temperatures)
    assert torch.equal(scores, before)
    if found is None:
        scaled = scores / torch.tensor(temperatures)[:, None]
        limits = torch.stack([row.topk(k).values[-1] for row, k in zip(scaled, kept, strict=True)])
        assert ((scaled >= limits[:, None]).sum(dim=-1) > torch.tensor(kept)).any(), "no ties: nothing to give up for"
        return
    for row in range(rows):
        expected = oracle(scores[row], kept[row], temperatures[row])
        assert torch.equal(spread(found[0][row], found[1][row], vocabulary), expected)


def test_rows_may_lie_apart() -> None:
    wide = torch.randn(4, 2000)
    one, other = (
        candidates_cpu.top_candidates(rows, [9] * 4, [0.7] * 4) for rows in (wide[:, :1500], wide[:, :1500].clone())
    )
    assert one is not None and other is not None
    assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("place", [0, 700, 1499])
def test_what_is_no_number_is_given_up(place: int) -> None:
    scores = torch.randn(2, 1500)
    scores[1, place] = torch.nan
    assert candidates_cpu.top_candidates(scores, [5, 5], [1.0, 1.0]) is None


def test_what_there_is_no_kernel_for_is_given_up() -> None:
    scores = torch.randn(2, 1500)
    assert candidates_cpu.top_candidates(scores.double(), [5, 5], [1.0, 1.0]) is None
    assert candidates_cpu.top_candidates(scores.T, [1] * 1500, [1.0] * 1500) is None
