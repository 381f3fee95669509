"""Products of heads with a matrix each on CPUs: the launcher of the C++ kernel beside this file, built when first used.

The weight is read where it lies, in one pass for up to 24 rows, as linear layers are. A batched product of a library
copies each matrix into an order of its own first, which for few rows takes longer than to multiply it.

Legend
    packed   the kernel's one argument: addresses, sizes and strides as 8-byte fields, in the order of `Call` in
             head_products_cpu.cpp
"""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from selective_compile.kernels import native

_functions = native.Functions(__file__)
available, unavailable_reason, address_of = _functions.available, _functions.unavailable_reason, _functions.address

_pack = struct.Struct("=15q").pack
DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def head_products(x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    """`selective::head_products` (shapes: `selective_compile.latent_ops`). Returns [T, H, size], or [T, H, r].

    Raises:
        ValueError: dtypes or layouts are not supported.
        NativeBuildError: the kernel cannot be built here.
    """
    if not (x.dtype in DTYPES and weight.dtype is x.dtype):
        raise ValueError(f"x and weight must be of one of {', '.join(map(str, DTYPES))}, got {x.dtype}, {weight.dtype}")
    if not (x.shape[1] == weight.shape[0] and x.shape[2] == weight.shape[1 if transposed else 2]):
        raise ValueError(f"weight must have a matrix for each head of x, got {list(weight.shape)} for {list(x.shape)}")
    if not (x.stride(2) == weight.stride(2) == 1):
        raise ValueError("the last dimension of x and weight must be contiguous")
    output = x.new_empty((*x.shape[:2], weight.shape[2 if transposed else 1]))
    if output.numel():
        _functions["selective_head_products"](_pack(*call_fields(output, x, weight, transposed)))
    return output


def call_fields(output: Any, x: Any, weight: Any, transposed: bool, threads: Any = None) -> tuple[Any, ...]:
    """The arguments of the kernel, of tensors or of what stands for them (`selective_compile.call_values`)."""
    rows, heads, _ = x.shape
    _, size, depth = weight.shape
    return (
        *(x.data_ptr(), weight.data_ptr(), output.data_ptr()),
        native.torch_parallel(),
        *(DTYPES[x.dtype], torch.get_num_threads() if threads is None else threads, int(transposed)),
        *(rows, heads, size, depth),
        *(x.stride(0), x.stride(1), weight.stride(0), weight.stride(1)),
    )
