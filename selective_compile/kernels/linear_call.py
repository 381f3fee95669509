"""What a call of `selective::linear` must be for every kernel: they read by address, and nobody else would notice."""

from __future__ import annotations

import torch
from torch import Tensor

# What the Triton kernel multiplies; known without Triton.
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """x [..., K], weight [N, K], bias [N] or None, of one dtype.

    Raises:
        ValueError: the sizes or dtypes do not fit together.
    """
    dtype, (columns, depth) = x.dtype, weight.shape
    if x.shape[-1] != depth or weight.dtype is not dtype:
        wanted = f"[N, {x.shape[-1]}] of {dtype}"
        raise ValueError(f"weight must be {wanted}, got {list(weight.shape)} of {weight.dtype}")
    if bias is not None and (bias.shape != (columns,) or bias.dtype is not dtype):
        raise ValueError(f"bias must be [{columns}] of {dtype}, got {list(bias.shape)} of {bias.dtype}")
