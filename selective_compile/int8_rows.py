"""Keys and values kept as int8: the numbers of a row, and behind them the scale that they are multiplied by.

    stored [..., row_bytes(D)] int8:  D numbers | zeros up to a multiple of 4 | the scale, float32, 4 bytes

A row is the key or the value of one token and one head. Its scale is its largest magnitude / 127, and its numbers are
row / scale, rounded to nearest with ties to even, from -127 to 127. The scale stands in the row, so that whatever
copies, shares or counts blocks needs to know nothing of it; a row that holds anything but finite numbers gets that as
its scale and zeros for numbers, so that it comes back as NaN.

`selective_compile.reference` keeps rows by these functions, and kernels by `kernels/int8_rows_cpu.h`: the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 127
SCALE_BYTES = 4


def row_bytes(size: int) -> int:
    """Bytes of a row of so many numbers; a multiple of 4, as scales want to lie."""
    return _scale_at(size) + SCALE_BYTES


def quantised(rows: Tensor) -> Tensor:
    """[..., D] of a floating dtype as stored, [..., row_bytes(D)] int8."""
    rows = rows.to(torch.float32)  # exact: what is given in float64 was rounded to a narrower dtype before
    scale = rows.abs().amax(-1, keepdim=True) / LARGEST
    numbers = torch.where((scale > 0) & scale.isfinite(), rows / scale, 0.0).round().clamp(-LARGEST, LARGEST)
    stored = torch.zeros(*rows.shape[:-1], row_bytes(rows.shape[-1]), dtype=torch.int8, device=rows.device)
    stored[..., : rows.shape[-1]] = numbers.to(torch.int8)
    # Cloned: the scale of no rows has a stride that cannot be viewed as bytes.
    stored[..., -SCALE_BYTES:] = scale.clone(memory_format=torch.contiguous_format).view(torch.int8)
    return stored


def dequantised(stored: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """[..., row_bytes(size)] int8 as numbers times their scale, [..., size] of `dtype`."""
    return stored[..., :size].to(dtype) * scales(stored).to(dtype)


def scales(stored: Tensor) -> Tensor:
    """The scales of stored rows [..., bytes]: [..., 1] float32."""
    return stored[..., -SCALE_BYTES:].contiguous().view(torch.float32)


def _scale_at(size: int) -> int:
    return -(-size // SCALE_BYTES) * SCALE_BYTES
