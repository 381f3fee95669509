"""Rows kept as int8: what they are, and how far from the numbers they stand for."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selective_compile.int8_rows import dequantised, quantised, row_bytes, scales


def test_rows_are_a_multiple_of_four_bytes_with_room_for_the_scale() -> None:
    assert [row_bytes(size) for size in (1, 4, 5, 64, 80, 127, 128)] == [8, 8, 12, 68, 84, 132, 132]


def test_numbers_round_to_nearest_with_ties_to_even() -> None:
    rows = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.4, -126.6, 0.0]])
    stored = quantised(rows)
    assert stored.shape == (1, 16) and stored.dtype == torch.int8
    assert stored[0, :10].tolist() == [127, 0, 2, 2, 0, -2, -2, 126, -127, 0]
    assert stored[0, 10:12].tolist() == [0, 0]
    assert scales(stored).item() == 1.0
    assert torch.equal(dequantised(stored, 10, torch.float32), stored[:, :10].float())


def test_no_rows_are_none() -> None:
    for rows in (torch.zeros(0, 2, 5), torch.zeros(3, 0, 4)):
        assert dequantised(quantised(rows), rows.shape[-1], torch.float64).shape == rows.shape


def test_a_row_of_zeros_stays_that() -> None:
    stored = quantised(torch.zeros(2, 3, 7))
    assert not stored.any()
    assert torch.equal(dequantised(stored, 7, torch.float32), torch.zeros(2, 3, 7))


@pytest.mark.parametrize("wrong", (math.nan, math.inf, -math.inf))
def test_what_is_not_finite_makes_its_row_nan_and_no_other(wrong: float) -> None:
    rows = torch.ones(3, 5)
    rows[1, 2] = wrong
    found = dequantised(quantised(rows), 5, torch.float32)
    assert found[1].isnan().all() and torch.equal(found[::2], torch.ones(2, 5))


def test_the_smallest_numbers_do_not_overflow() -> None:
    rows = torch.tensor([[190 * 2.0**-149, -190 * 2.0**-149], [2.0**-149, 0.0], [3e38, -3.4e38]])
    found = dequantised(quantised(rows), 2, torch.float32)
    assert found[0].tolist() == [127 * 2.0**-149, -127 * 2.0**-149]  # the scale has no digits there
    assert found[1].tolist() == [0.0, 0.0]
    torch.testing.assert_close(found[2], rows[2], rtol=0, atol=3.4e38 / 127 * 0.51)


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.floats(-1e6, 1e6, width=32, allow_subnormal=False), min_size=1, max_size=40),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float64)),
)
def test_an_error_is_half_a_step_at_most(rows: list[float], dtype: torch.dtype) -> None:
    given_rows = torch.tensor(rows).to(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32).to(dtype)
    stored = quantised(given_rows)
    errors = (dequantised(stored, len(rows), torch.float64) - given_rows.double()).abs()
    step = given_rows.double().abs().max() / 127
    assert errors.max() <= step * 0.5001 + 2.0**-142
    assert torch.equal(stored, quantised(given_rows.double()))
