"""Linear layers on CPUs: the launcher of the C++ kernel beside this file, built when first used.

The kernel reads the weight where it lies, [N, K] as `torch.nn.Linear` has it, and keeps nothing between
calls: a packed copy would take as much memory again, and would go stale unnoticed when a weight is changed
through `.data`.

Legend
    packed   the kernel's one argument: addresses and sizes as 8-byte fields, in the order of `Call` in
             linear_cpu.cpp
"""

from __future__ import annotations

import functools
import struct

import torch
import torch.nn.functional as F
from torch import Tensor

from selective_compile.kernels import native
from selective_compile.kernels.linear_call import check_linear

_functions = native.Functions(__file__)
available, unavailable_reason = _functions.available, _functions.unavailable_reason

_pack = struct.Struct("=10q").pack
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
# From so many rows on, a processor with bf16 matrix units (AMX) is left to oneDNN, which uses them: on paper
# they multiply eight times as fast as the vector instructions here (not measured). With fewer rows, reading
# the weight takes the time. benchmarks/cpu_linear.py compares the two on processors without.
_MATRIX_UNIT_ROWS = 64


@functools.cache
def _has_matrix_unit() -> bool:
    return "amx_bf16" in native.processor().split()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`selective::linear`: x [..., K], weight [N, K], bias [N] or None, of one dtype. Returns [..., N] of it.

    Sums are float32. What the kernel does not take (another dtype, a weight that is not row-major) goes
    through `torch.nn.functional.linear`, and so does what that is faster at. A row's result does not depend
    on the other rows, except that few rows (at most eight) and more of them are summed in different orders.

    Raises:
        ValueError: the sizes or dtypes of x, weight and bias do not fit together.
        NativeBuildError: the kernel cannot be built here.
    """
    check_linear(x, weight, bias)
    dtype, (columns, depth) = x.dtype, weight.shape
    if dtype not in _DTYPES or not weight.is_contiguous() or depth == 0:
        return F.linear(x, weight, bias)
    output = x.new_empty((*x.shape[:-1], columns))
    rows = x.numel() // depth
    if not output.numel():
        return output
    if dtype is torch.bfloat16 and rows >= _MATRIX_UNIT_ROWS and _has_matrix_unit():
        return F.linear(x, weight, bias)
    # Kept under a name through the call: where a copy is made, nothing else holds it.
    x = x.contiguous()
    bias = bias if bias is None else bias.contiguous()
    _functions["selective_linear"](
        _pack(
            *(x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), output.data_ptr()),
            *(rows, columns, depth, _DTYPES[dtype], torch.get_num_threads(), native.torch_parallel()),
        )
    )
    return output
