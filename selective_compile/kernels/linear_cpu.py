"""Linear layers on CPUs: the launcher of the C++ kernel beside this file, built when first used.

The kernel reads the weight where it lies, [N, K] as `torch.nn.Linear` has it or by columns, [K, N], as GPT-2 has it,
and keeps nothing between calls: a packed copy would take as much memory again, and would go stale unnoticed when a
weight is changed through `.data`.

Legend
    packed   a kernel's one argument: addresses and sizes as 8-byte fields, in the order of `Call` and `Part`, or of
             `GroupedCall`, in linear_call.h
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from selective_compile.kernels import native
from selective_compile.kernels.linear_call import check_grouped, check_int8, check_linear, lie_by_columns

_functions = native.Functions(__file__)
available, unavailable_reason, address_of = _functions.available, _functions.unavailable_reason, _functions.address
build_beside = _functions.build_beside

DTYPES = {torch.float32: 0, torch.bfloat16: 1}


@functools.cache
def _packer(fields: int) -> struct.Struct:
    return struct.Struct(f"={fields}q")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`selective::linear`: x [..., K], weight [N, K], bias [N] or None, of one dtype. Returns [..., N] of it.

    Sums are float32. What the kernel does not take (another dtype, a weight that lies neither by rows nor by columns)
    goes through `torch.nn.functional.linear`. A row's result does not depend on the other rows, except that few rows
    (at most eighteen) and more of them are summed in different orders.

    Raises:
        ValueError: the sizes or dtypes of x, weight and bias do not fit together.
        NativeBuildError: the kernel cannot be built here.
    """
    return linears(x, (weight,), (bias,))[0]


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """`selective::linears`: what `linear` gives for each of the weights [N_i, K] and biases, to the bit, in one call.

    Raises:
        ValueError: the sizes or dtypes of x, weights and biases do not fit together.
        NativeBuildError: the kernel cannot be built here.
    """
    for weight, bias in zip(weights, biases, strict=True):
        check_linear(x, weight, bias)
    if x.dtype in DTYPES and x.shape[-1]:
        if lie_by_columns(weights) is not None:
            return _launch(x, weights, [None] * len(weights), biases)
        if len(weights) > 1:
            return [linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    return [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def linears_int8(
    x: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> list[Tensor]:
    """`selective::linears_int8`; see `selective_compile.int8_ops`.

    Raises:
        ValueError: the sizes, dtypes or layouts of x, weights, scales and biases do not fit together.
        NativeBuildError: the kernel cannot be built here.
    """
    for weight, scale, bias in zip(weights, scales, biases, strict=True):
        check_int8(x, weight, scale, bias)
        if not (weight.is_contiguous() and scale.is_contiguous()):
            raise ValueError(f"weights and scales must be contiguous, got strides {weight.stride()}, {scale.stride()}")
    if x.dtype not in DTYPES or not x.shape[-1]:
        raise ValueError(f"x must be [..., K] of float32 or bfloat16, K at least 1, got {list(x.shape)} of {x.dtype}")
    return _launch(x, weights, scales, biases)


def grouped_linear(
    x: Tensor, weight: Tensor, ends: Tensor, scales: Tensor | None = None, *, batch_invariant: bool = False
) -> Tensor:
    """`selective::grouped_linear`; see `selective_compile.grouped_ops`.

    Of the weight only what belongs to groups with rows is read. A row's result does not depend on the rows of other
    groups; on those of its own as in `linear`, and with ``batch_invariant`` not at all.

    Raises:
        ValueError: the sizes or dtypes do not fit together; the weight or the scales are not contiguous; the ends are
            not in order, or not among the rows.
        NativeBuildError: the kernel cannot be built here.
    """
    check_grouped(x, weight, ends, scales)
    if x.dtype not in DTYPES:
        raise ValueError(f"x must be float32 or bfloat16, got {x.dtype}")
    if not (weight.is_contiguous() or (scales is None and lie_by_columns([weight]))):
        raise ValueError(f"weight must be contiguous, or transposed where it is not int8, got {weight.stride()}")
    if scales is not None and not scales.is_contiguous():
        raise ValueError(f"scales must be contiguous, got the strides {scales.stride()}")
    # Kept under names through the call: where a copy is made, nothing else holds it.
    x, places = x.contiguous(), ends.contiguous()
    y = x.new_empty((len(x), weight.shape[1]))
    fields = grouped_fields(x, weight, scales, places, y, batch_invariant, torch.get_num_threads())
    if _functions["selective_grouped_linear"](_packer(len(fields)).pack(*fields)):
        raise ValueError(f"ends must be in order and at most {len(x)}, got {ends.tolist()}")
    return y


def grouped_fields(
    x: Any, weight: Any, scales: Any, ends: Any, y: Any, batch_invariant: bool, threads: Any
) -> tuple[Any, ...]:
    """The arguments of the kernel, of tensors or of what stands for them (`selective_compile.call_values`)."""
    addresses = (x.data_ptr(), weight.data_ptr(), _address(scales), ends.data_ptr(), y.data_ptr())
    kinds = (DTYPES[x.dtype], int(native.MATRIX_UNIT), int(batch_invariant), int(ends.dtype is torch.int32))
    by_columns = int(not weight.is_contiguous())
    return (*addresses, x.shape[0], *weight.shape, *kinds, by_columns, threads, native.torch_parallel())


def _launch(
    x: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor | None], biases: Sequence[Tensor | None]
) -> list[Tensor]:
    depth = x.shape[-1]
    # Kept under a name through the call: where a copy is made, nothing else holds it.
    x, biases = x.contiguous(), [bias if bias is None else bias.contiguous() for bias in biases]
    outputs = [x.new_empty((*x.shape[:-1], weight.shape[0])) for weight in weights]
    if x.numel() // depth and any(weight.shape[0] for weight in weights):
        fields = call_fields(x, weights, scales, biases, outputs, torch.get_num_threads())
        _functions["selective_linear"](_packer(len(fields)).pack(*fields))
    return outputs


def call_fields(
    x: Any,
    weights: Sequence[Any],
    scales: Sequence[Any],
    biases: Sequence[Any],
    outputs: Sequence[Any],
    threads: Any,
) -> tuple[Any, ...]:
    """The arguments of the kernel, of tensors or of what stands for them (`selective_compile.call_values`)."""
    parts = [
        (weight.data_ptr(), _address(bias), output.data_ptr(), weight.shape[0], _address(scale))
        for weight, bias, output, scale in zip(weights, biases, outputs, scales, strict=True)
        if weight.shape[0]
    ]
    depth = x.shape[-1]
    sizes = (x.numel() // depth, depth, DTYPES[x.dtype], int(native.MATRIX_UNIT), int(bool(lie_by_columns(weights))))
    return (x.data_ptr(), *sizes, threads, native.torch_parallel(), len(parts), *itertools.chain(*parts))


def _address(tensor: Any) -> Any:
    return 0 if tensor is None else tensor.data_ptr()
