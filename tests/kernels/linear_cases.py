"""Operands for the tests of the linear kernels, and how near to float64 a result must be."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Of a result: half a unit in the last place, and of float32 a whole one.
LAST_PLACE = {torch.float32: 2**-23, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def inputs(rows: int | tuple[int, ...], columns: int, depth: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x [rows, depth], weight [columns, depth], bias [columns]."""
    shape = (rows,) if isinstance(rows, int) else rows
    torch.manual_seed(columns * depth)
    return tuple(torch.randn(*s).to(dtype) for s in ((*shape, depth), (columns, depth), (columns,)))


def by_columns(weight: Tensor) -> Tensor:
    """The same numbers [..., N, K] where [..., K, N] is contiguous, as transformers' Conv1D has them."""
    return weight.mT.contiguous().mT


def assert_near_float64(
    result: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, roundings: int = 1
) -> None:
    """Within float32 rounding of the sum's terms, and that of the result to its dtype."""
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    terms = F.linear(x.double().abs(), weight.double().abs()) + 1
    assert result.dtype is x.dtype and result.shape == exact.shape and result.is_contiguous()
    last_place = roundings * LAST_PLACE[result.dtype] * exact.abs()
    worst = ((result.double() - exact).abs() - last_place - 1e-6 * terms).max()
    assert worst <= 0, f"off by {worst}"
