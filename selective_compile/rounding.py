"""How far results may lie apart by rounding alone, where the same is computed in two ways on one device.

PyTorch may be asked for products of float32 matrices with fewer bits (`torch.set_float32_matmul_precision`, or the
`fp32_precision` of a backend). Then a row by itself is rounded otherwise than among others, as in a dtype of 16 bits,
and no less may be made of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

# Of the spread of logits.  What is computed otherwise departs by about the spread itself.
TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.05}
COARSE = 0.3
# TensorFloat-32 has as many significant bits as float16.
PRECISIONS = {"tf32": torch.float16, "bf16": torch.bfloat16}
_products: ContextVar[frozenset[torch.dtype]] = ContextVar("products", default=frozenset())


def rounded_as(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype whose rounding products of matrices of `dtype` have there."""
    if dtype is not torch.float32:
        return dtype
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return PRECISIONS.get(backend.matmul.fp32_precision, dtype)


def tolerance(dtype: torch.dtype, device: torch.device) -> float:
    """Of the spread of logits of that dtype."""
    return TOLERANCES.get(rounded_as(dtype, device), COARSE)


def computed_in(model: nn.Module, result: Tensor) -> torch.dtype:
    """The dtype with the fewest bits that ``result`` has been through: a model may give what it computes in 16 bits as
    float32.  Tables and matrices count: of a vector, as the weight of a norm, a product has the bits of its other side.
    So do products that are known to be of others (`products_in`).
    """
    weights = {weight.dtype for weight in model.parameters() if weight.dim() > 1}
    return coarsest([result.dtype, *weights, *_products.get()])


@contextmanager
def products_in(dtypes: Iterable[torch.dtype]) -> Iterator[None]:
    """Within, a model's products are known to be of these, as under autocast they are not of its weights'."""
    before = _products.set(frozenset(dtypes))
    try:
        yield
    finally:
        _products.reset(before)


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """That with the fewest bits of those that round."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps if dtype.is_floating_point else 0.0)
