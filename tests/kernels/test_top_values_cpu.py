"""The largest values of each row, and where they stand: to the place those of `torch.topk`, of equal ones too."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selective_compile.kernels import top_values_cpu
from selective_compile.kernels.top_values_cpu import chooses_as_torch, top_values

pytestmark = pytest.mark.skipif(not top_values_cpu.available(), reason=str(top_values_cpu.unavailable_reason()))


@settings(max_examples=150, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=2),
    length=st.integers(1, 700),
    share=st.floats(0, 1),
    different=st.integers(1, 300),
    seed=st.integers(0, 2**16),
)
def test_as_topk(dtype: torch.dtype, shape: list[int], length: int, share: float, different: int, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randint(-different, different, (*shape, length)).to(dtype)
    for odd in (torch.nan, torch.inf, -torch.inf):
        x[torch.rand(x.shape) < 0.01] = odd
    k = max(1, int(share * length))
    for found, expected in zip(top_values(x, k), torch.topk(x, k), strict=True):
        assert found.shape == expected.shape and torch.equal(found.nan_to_num(), expected.nan_to_num())


def test_many_rows_in_other_strides() -> None:
    x = torch.randn(60, 900).t()
    for found, expected in zip(top_values(x, 8), torch.topk(x, 8), strict=True):
        assert torch.equal(found, expected)


def test_it_is_asked_of_torch_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release of torch that keeps others of equal values is not followed."""
    assert chooses_as_torch()
    topk = torch.topk
    monkeypatch.setattr(torch, "topk", lambda x, k: topk(x.flip(-1), k))
    chooses_as_torch.cache_clear()
    assert not chooses_as_torch()
    chooses_as_torch.cache_clear()
