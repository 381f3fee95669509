"""The operator of linear layers whose weights are int8: schema, fake, and its implementations.

    selective::linears_int8   what `selective::linears` gives for the weights that int8 numbers and scales stand for

    x         [..., K] float32 or bfloat16, on a CPU
    weights   [N_i, K] int8, contiguous
    scales    [N_i] float32: row n of a weight is scales[n] * weights[n]
    biases    [N_i] or None, x's dtype
    result    a list of [..., N_i], x's dtype

Rows of x are not rounded: an int8 number is exact in bfloat16, products are summed in float32, and then scaled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from selective_compile import reference
from selective_compile.attention_checks import require
from selective_compile.implementations import implementation_on
from selective_compile.ops import refuse_gradients, register

DTYPES = (torch.float32, torch.bfloat16)
BLOCK = 2**18  # 1 MB as float32


def as_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``[..., K]`` as int8 numbers of that shape, contiguous, and scales ``[...]`` float32; of zeros the scale is 1.

    Symmetric by row: the largest magnitude becomes 127, the others are rounded to the nearest, of two the even one.
    A row in which a number is not finite has a scale that is not, so that its products are not either.
    """
    weight = weight.detach()
    numbers = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(weight.shape[:-1], dtype=torch.float32, device=weight.device)
    for rows, scales_of, numbers_of in _row_blocks(weight, scales, numbers):
        scale = rows.abs().amax(dim=-1).float() / 127
        scale[scale == 0] = 1  # also where 127 times the least float32 is more than the largest number
        scales_of.copy_(scale)
        # The least of float32 are so coarse that rounding one can make it a third less.
        numbers_of.copy_((rows.float() / scale[..., None]).round_().clamp_(-127, 127))
    return numbers, scales


def relative_error(weight: Tensor, numbers: Tensor, scales: Tensor) -> float:
    """The root mean square of what rounding to ``as_int8(weight)`` changed, over that of the weight."""
    changed = total = 0.0
    for rows, scales_of, numbers_of in _row_blocks(weight.detach(), scales, numbers):
        wide = rows.float()
        total = math.hypot(total, _norm(wide))
        changed = math.hypot(changed, _norm(numbers_of * scales_of[..., None] - wide))
    return changed / total if total else 0.0


def _norm(wide: Tensor) -> float:
    return float(torch.linalg.vector_norm(wide, dtype=torch.float64))


def _row_blocks(weight: Tensor, scales: Tensor, numbers: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of `BLOCK` numbers each: float32 copies of a whole weight would take four times what the result takes."""
    if weight.dim() > 2 and not weight.is_contiguous():  # where rows cannot be counted through without a copy
        for each in zip(weight, scales, numbers, strict=True):
            yield from _row_blocks(*each)
        return
    step = max(1, BLOCK // weight.shape[-1])
    blocks = (each.split(step) for each in (weight.flatten(0, -2), scales.flatten(), numbers.flatten(0, -2)))
    yield from zip(*blocks, strict=True)


def _run(x: Tensor, weights: list[Tensor], scales: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    refuse_gradients(x, *biases)
    if implementation_on(x.device.type) == "cpu":
        from selective_compile.kernels import linear_cpu

        if linear_cpu.available():
            return linear_cpu.linears_int8(x, weights, scales, biases)
    return [reference.linear_int8(x, *operands) for operands in zip(weights, scales, biases, strict=True)]


def _fake(x: Tensor, weights: list[Tensor], scales: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    for weight, scale in zip(weights, scales, strict=True):
        require(weight.dtype is torch.int8, f"weights must be torch.int8, got {weight.dtype}")
        require(scale.dtype is torch.float32, f"scales must be torch.float32, got {scale.dtype}")
        torch._check(x.shape[-1] == weight.shape[1])
        torch._check(scale.shape[0] == weight.shape[0])
    return [x.new_empty((*x.shape[:-1], weight.shape[0])) for weight in weights]


linears_int8 = register(
    "linears_int8(Tensor x, Tensor[] weights, Tensor[] scales, Tensor?[] biases) -> Tensor[]", _run, _fake
)
