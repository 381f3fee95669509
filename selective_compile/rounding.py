"""How far results may lie apart by rounding alone, where the same is computed in two ways on one device.

PyTorch may be asked for products of float32 matrices with fewer bits (`torch.set_float32_matmul_precision`, or the
`fp32_precision` of a backend). Then a row by itself is rounded otherwise than among others, as in a dtype of 16 bits,
and no less may be made of that.
"""

from __future__ import annotations

import torch

# Of the spread of logits.  What is computed otherwise departs by about the spread itself.
TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.05}
COARSE = 0.3
# TensorFloat-32 has as many significant bits as float16.
PRECISIONS = {"tf32": torch.float16, "bf16": torch.bfloat16}


def rounded_as(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype whose rounding products of matrices of `dtype` have there."""
    if dtype is not torch.float32:
        return dtype
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return PRECISIONS.get(backend.matmul.fp32_precision, dtype)


def tolerance(dtype: torch.dtype, device: torch.device) -> float:
    """Of the spread of logits of that dtype."""
    return TOLERANCES.get(rounded_as(dtype, device), COARSE)
