"""Rows kept as e4m3: what comes back of a number, and the scales that fit what was kept."""

from __future__ import annotations

import torch

from selective_compile import fp8_rows


def test_a_number_comes_back_within_a_sixteenth_or_as_the_largest() -> None:
    scales = torch.tensor([1.0, 0.03])
    rows = torch.randn(50, 2, 16, generator=torch.Generator().manual_seed(0)) * scales[:, None] * 40
    rows[3, 1, 5], rows[4, 0, 2], rows[5, 0, 0] = 20.0, -torch.inf, torch.nan
    found = fp8_rows.dequantised(fp8_rows.quantised(rows, scales), scales, torch.float32)
    exact = rows.clamp(-448 * scales[:, None], 448 * scales[:, None])
    least = 2.0**-10 * scales[:, None]
    assert torch.equal(found.isnan(), rows.isnan())
    assert (((found - exact).abs() <= exact.abs() / 16 + least) | rows.isnan()).all()
    assert found[3, 1, 5] == 448 * scales[1] and found[4, 0, 2] == -448


def test_scales_are_told_by_what_was_kept() -> None:
    """A head's largest number; one that was cut, one of zeros, and one of NaN."""
    rows = torch.zeros(5, 2, 3, 4).fill_(0.5)[:, :1].repeat(1, 4, 1, 1)
    rows[3, 0, 1, 2], rows[0, 1, 0, 0], rows[1, 3, 2, 1] = -150.0, 448.0, torch.nan
    rows[:, 2] = 0
    found = fp8_rows.scales_for(rows.to(fp8_rows.DTYPE), torch.full((4,), 0.25))
    assert found.tolist() == [0.5, 256.0, 0.25 / 1024, 0.25]
