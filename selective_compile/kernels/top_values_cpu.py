"""The largest values of each row on CPUs: the launcher of the C++ kernel beside this file, built when first used."""

from __future__ import annotations

import functools
import struct
from typing import Any

import torch
from torch import Tensor

from selective_compile.kernels import native

_functions = native.Functions(__file__)
available, unavailable_reason, address_of = _functions.available, _functions.unavailable_reason, _functions.address
build_beside = _functions.build_beside

_pack = struct.Struct("=9q").pack
DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def top_values(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """``torch.topk(x, k)`` of x [..., n], float32 or bfloat16, 0 < k <= n: values and places [..., k].

    Raises:
        NativeBuildError: the kernel cannot be built here.
    """
    x = x.contiguous()
    values, places = (x.new_empty((*x.shape[:-1], k), dtype=dtype) for dtype in (x.dtype, torch.int64))
    _functions["selective_top_values"](_pack(*call_fields(x, k, values, places)))
    return values, places


def call_fields(x: Any, k: int, values: Any, places: Any, threads: Any = None) -> tuple[Any, ...]:
    """The arguments of the kernel, of tensors or of what stands for them (`selective_compile.call_values`)."""
    threads = torch.get_num_threads() if threads is None else threads
    addresses = (x.data_ptr(), values.data_ptr(), places.data_ptr())
    return (*addresses, x.numel() // x.shape[-1], x.shape[-1], k, DTYPES[x.dtype], threads, native.torch_parallel())


@functools.cache
def chooses_as_torch() -> bool:
    """Whether it keeps the same of equal values as this release of torch does, which says nothing of them."""
    if not available():
        return False
    draws = torch.Generator("cpu").manual_seed(0)
    for dtype in DTYPES:
        for n, k in ((8, 2), (64, 6), (160, 2), (512, 8)):
            x = torch.randint(0, n // 3, (64, n), generator=draws, device="cpu", dtype=torch.int64).to(dtype)
            if not all(map(torch.equal, top_values(x, k), torch.topk(x, k))):
                return False
    return True
