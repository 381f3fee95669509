"""What a call of `selective::linear` must be for every kernel: they read by address, and nobody else would notice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# What the Triton kernel multiplies; known without Triton.
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def lie_by_columns(weights: Sequence[Any]) -> bool | None:
    """Whether what is [..., N, K] lies as [..., K, N] does, all of it, and not as it is; None if it lies otherwise."""
    if all(weight.is_contiguous() for weight in weights):
        return False
    return True if all(weight.transpose(-2, -1).is_contiguous() for weight in weights) else None


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """x [..., K], weight [N, K], bias [N] or None, of one dtype.

    Raises:
        ValueError: the sizes or dtypes do not fit together.
    """
    _check_weight(x, weight, x.dtype)
    _check_bias(x, weight, bias)


def check_int8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
    """x [..., K], weight [N, K] int8, scales [N] float32, bias [N] of x's dtype or None.

    Raises:
        ValueError: the sizes or dtypes do not fit together.
    """
    _check_weight(x, weight, torch.int8)
    _check_bias(x, weight, bias)
    if scales.shape != weight.shape[:1] or scales.dtype is not torch.float32:
        raise ValueError(f"scales must be [{len(weight)}] of float32, got {list(scales.shape)} of {scales.dtype}")


def check_grouped(x: Tensor, weight: Tensor, ends: Tensor, scales: Tensor | None) -> None:
    """x [S, K], weight [E, N, K] of its dtype, or int8 and scales [E, N]; ends [E], of which no values are looked at.

    Raises:
        ValueError: the sizes or dtypes do not fit together.
    """
    if x.dim() != 2 or x.dtype not in TRITON_DTYPES:
        raise ValueError(f"x must be [S, K] of one of {TRITON_DTYPES}, got {list(x.shape)} of {x.dtype}")
    dtype = x.dtype if scales is None else torch.int8
    if weight.dim() != 3 or x.shape[1] != weight.shape[2] or weight.dtype is not dtype:
        wanted = f"[E, N, {x.shape[1]}] of {dtype}"
        raise ValueError(f"weight must be {wanted}, got {list(weight.shape)} of {weight.dtype}")
    if ends.shape != weight.shape[:1] or ends.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ends must be [{len(weight)}] of integers, got {list(ends.shape)} of {ends.dtype}")
    if scales is not None and (scales.shape != weight.shape[:2] or scales.dtype is not torch.float32):
        wanted = f"{list(weight.shape[:2])} of float32"
        raise ValueError(f"scales must be {wanted}, got {list(scales.shape)} of {scales.dtype}")


def _check_weight(x: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    if x.shape[-1] != weight.shape[1] or weight.dtype is not dtype:
        wanted = f"[N, {x.shape[-1]}] of {dtype}"
        raise ValueError(f"weight must be {wanted}, got {list(weight.shape)} of {weight.dtype}")


def _check_bias(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype is not x.dtype):
        raise ValueError(f"bias must be [{len(weight)}] of {x.dtype}, got {list(bias.shape)} of {bias.dtype}")
