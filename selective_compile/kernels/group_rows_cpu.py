"""Rows in the order of their groups, and in any other, on CPUs: the launcher of the C++ kernels beside this file."""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from selective_compile.kernels import native
from selective_compile.kernels.statuses import REFUSALS

_functions = native.Functions(__file__)
available, unavailable_reason, address_of = _functions.available, _functions.unavailable_reason, _functions.address
build_beside = _functions.build_beside

_pack, _pack_take = struct.Struct("=9q").pack, struct.Struct("=8q").pack


def group_rows(choice: Tensor, groups: int, cu_seqlens_q: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """`selective::group_rows`; see `selective_compile.grouped_ops`.

    Raises:
        ValueError: a group is negative.
        NativeBuildError: the kernel cannot be built here.
    """
    # Kept under names through the call: where a copy is made, nothing else holds it.
    choice, cu_seqlens_q = choice.contiguous(), None if cu_seqlens_q is None else cu_seqlens_q.contiguous()
    order, places = (choice.new_empty((choice.numel(),)) for _ in range(2))
    ends = choice.new_empty((groups,), dtype=torch.int32)
    status = _functions["selective_group_rows"](_pack(*call_fields(choice, groups, cu_seqlens_q, order, places, ends)))
    if status:
        raise ValueError(REFUSALS[status])
    return order, places, ends


def call_fields(choice: Any, groups: int, cu_seqlens_q: Any, order: Any, places: Any, ends: Any) -> tuple[Any, ...]:
    """The arguments of the kernel, of tensors or of what stands for them (`selective_compile.call_values`)."""
    bounds, requests = (0, 0) if cu_seqlens_q is None else (cu_seqlens_q.data_ptr(), cu_seqlens_q.shape[0] + -1)
    results = (each.data_ptr() for each in (order, places, ends))
    return (choice.data_ptr(), bounds, *results, *choice.shape, groups, requests)


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """`selective::take_rows`; see `selective_compile.grouped_ops`.

    Raises:
        ValueError: the index is not among the rows.
        NativeBuildError: the kernel cannot be built here.
    """
    # Kept under names through the call, as above.
    x, index = x.contiguous(), index.contiguous()
    output = x.new_empty((len(index), x.shape[1]))
    status = _functions["selective_take_rows"](_pack_take(*take_fields(x, index, output)))
    if status:
        raise ValueError(REFUSALS[status])
    return output


def take_fields(x: Any, index: Any, output: Any, threads: Any = None) -> tuple[Any, ...]:
    """The arguments of the kernel, of tensors or of what stands for them (`selective_compile.call_values`)."""
    threads = torch.get_num_threads() if threads is None else threads
    addresses = (x.data_ptr(), index.data_ptr(), output.data_ptr())
    sizes = (x.shape[0], x.shape[1] * x.dtype.itemsize, index.shape[0])
    return (*addresses, *sizes, threads, native.torch_parallel())
