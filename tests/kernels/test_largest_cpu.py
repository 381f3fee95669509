"""The C++ kernel that finds each row's largest score, held to `torch.argmax`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selective_compile.kernels import largest_cpu
from selective_compile.kernels.largest_cpu import largest

pytestmark = pytest.mark.skipif(not largest_cpu.available(), reason=str(largest_cpu.unavailable_reason()))


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 5),
    vocabulary=st.sampled_from([1, 2, 15, 16, 17, 1023, 1024, 1025, 2500, 33_000]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    kind=st.sampled_from(["smooth", "few values", "mostly impossible", "impossible", "not numbers"]),
)
def test_as_argmax(seed: int, rows: int, vocabulary: int, dtype: torch.dtype, kind: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    wide = (torch.randn(rows, vocabulary + 3, generator=generator) * 3).to(dtype)
    scores = wide[:, :vocabulary]  # rows lie apart
    drawn = torch.rand(scores.shape, generator=generator)
    if kind == "few values":
        scores.round_()
    elif kind == "mostly impossible":
        scores[drawn < 0.99] = -torch.inf
    elif kind == "impossible":
        scores.fill_(-torch.inf)
    elif kind == "not numbers":
        scores[drawn < 0.001] = torch.nan
        scores[drawn > 0.999] = torch.inf
    assert largest(scores) == scores.argmax(dim=-1).tolist()


def test_what_there_is_no_kernel_for() -> None:
    scores = torch.randn(3, 40)
    for other in (scores.double(), scores.T, scores.half(), scores[:0]):
        assert largest(other) == other.argmax(dim=-1).tolist()
