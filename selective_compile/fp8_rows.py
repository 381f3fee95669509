"""Keys and values kept in 8 bits of floating point, e4m3 (4 bits of exponent, 3 behind the first one, up to 448): a
number is kept as number / scale, rounded to nearest with ties to even, at most 448 in magnitude; NaN stays NaN.

There is one scale for each key/value head, kept beside the pools, which does not change while they are used: what is
kept of a token depends on nothing but the token.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
# Of the largest number that was seen: as far beyond it one may come that was not.
ROOM = 4


def quantised(rows: Tensor, scales: Tensor) -> Tensor:
    """[..., K, D] of a floating dtype as kept, [..., K, D] float8_e4m3fn; scales [K] float32."""
    return (rows.to(torch.float32) / scales[:, None]).clamp(-LARGEST, LARGEST).to(DTYPE)


def dequantised(stored: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., K, D] float8_e4m3fn as numbers of `dtype`."""
    return stored.to(dtype) * scales[:, None].to(dtype)


def scales_for(pool: Tensor, scales: Tensor) -> Tensor:
    """Of a pool [blocks, K, slots, D] that was written with these scales, better ones [K]: powers of two, so that they
    add no rounding, with which the largest number of a head is at most `LARGEST` / `ROOM`, and more than half of that.

    Where all numbers were too small for the scale, or one too large, it is a better one, not yet the right one. A head
    with a NaN keeps its scale.
    """
    largest = largest_of(pool)
    factor = torch.exp2(torch.ceil(torch.log2(largest * (ROOM / LARGEST))))
    factor = torch.where(largest == 0, 2.0**-10, torch.where(largest == LARGEST, 2.0**10, factor))
    return torch.where(largest.isfinite(), scales * factor, scales)


def largest_of(pool: Tensor) -> Tensor:
    """The largest magnitude that a pool [blocks, K, slots, D] holds of each head, as it is kept: [K] float32."""
    return pool.to(torch.float32).abs().amax((0, 2, 3))
