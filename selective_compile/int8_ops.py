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

import torch
from torch import Tensor

from selective_compile import reference
from selective_compile.ops import implementation_on, refuse_gradients, register, require

DTYPES = (torch.float32, torch.bfloat16)


def as_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``[N, K]`` as int8 numbers of that shape, and scales ``[N]`` float32; a row of zeros has the scale 1.

    Symmetric by row: the largest magnitude becomes 127, the others are rounded to the nearest, of two the even one.
    """
    largest = weight.detach().abs().amax(dim=1).float()
    scales = torch.where(largest > 0, largest / 127, torch.ones_like(largest))
    return (weight.detach().float() / scales[:, None]).round_().to(torch.int8), scales


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
