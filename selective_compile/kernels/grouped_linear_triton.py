"""Linear layers on rows in groups in Triton, for CUDA and ROCm: where no library has a kernel for dtype and device and
the host would read where groups end, and where a row must not depend on how many rows its group has.

Legend
    tile      work of one program: BLOCK_M rows of one group by BLOCK_N columns of the result
    GROUPS    E of the operator, DEPTH its K, and COLUMNS its N
    offsets   [GROUPS + 1]: where each group's rows begin, and where the last one's end; the rows behind are 0

The launch has as many programs as there can be tiles, and each finds the group that it is of as attention finds its
request. A tile is summed as one of `linear_triton`, whose sizes it has.

The tile sizes are bounded by registers and shared memory: `tests/kernels` compiles them for sm_80, sm_90, sm_100 and
gfx942 and fails on a spill. Their speed has not been measured on a GPU.
"""

from __future__ import annotations

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from selective_compile.kernels.interpreter import on_device
from selective_compile.kernels.linear_call import check_grouped
from selective_compile.kernels.linear_triton import aligned, sum_products, tile_of
from selective_compile.kernels.request_rows_triton import tile_rows


@triton.jit(do_not_specialize=["num_rows"])
def _grouped_linear_kernel(
    output,  # [S, COLUMNS] contiguous
    x,  # [S, DEPTH] contiguous
    weight,  # [GROUPS, COLUMNS, DEPTH]
    offsets,  # int32; what is not in order or not among the rows reaches no other memory
    num_rows,
    weight_group_stride,
    weight_row_stride,
    weight_column_stride,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
):
    group, begin, end, first = tile_rows(offsets, GROUPS, num_rows, tl.program_id(0), BLOCK_M)
    row = first + tl.arange(0, BLOCK_M)
    row_mask = (row >= tl.maximum(begin, 0)) & (row < tl.minimum(end, num_rows))
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = column < COLUMNS
    x_row = x + row.to(tl.int64)[:, None] * DEPTH
    weight_row = weight + tl.minimum(group, GROUPS - 1).to(tl.int64) * weight_group_stride
    weight_row += column.to(tl.int64)[None, :] * weight_row_stride
    depth = tl.where((group < GROUPS) & (first < end), DEPTH, 0)  # nothing to read for rows of no group, and for none
    # fmt: off
    accumulator = sum_products(
        x_row, weight_row, weight_column_stride, row_mask, column_mask, depth, BLOCK_M, BLOCK_N, BLOCK_K, WIDEN
    )
    # fmt: on
    place = output + row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    tl.store(place, accumulator.to(output.dtype.element_ty), row_mask[:, None] & column_mask[None, :])


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, scales: Tensor | None = None) -> Tensor:
    """`selective::grouped_linear`, batch-invariant or not; see `selective_compile.grouped_ops`.

    A row's result does not depend on the other rows, nor on how many there are. The host does not read the ends: where
    they are not in order, or not among the rows, the result is that of no operator, and no other memory is touched.

    Raises:
        ValueError: the sizes or dtypes do not fit together, or the weight is int8.
    """
    check_grouped(x, weight, ends, scales)
    if scales is not None:
        raise ValueError("weight must not be int8 for Triton's kernel, got scales")
    groups, columns, depth = weight.shape
    if not (x.numel() and weight.numel()):
        return x.new_zeros((len(x), columns))
    x, offsets = aligned(x), F.pad(ends.int(), (1, 0))
    output = x.new_empty((len(x), columns))
    tile = tile_of(columns=columns, depth=depth, bytes_per_element=x.element_size())
    widen = not x.is_cuda
    grid = (len(x) // tile.block_m + groups + 1, triton.cdiv(columns, tile.block_n))
    # fmt: off
    on_device(_grouped_linear_kernel, x)[grid](
        output, x, weight, offsets, len(x), *weight.stride(), groups, columns, depth,
        tile.block_m, tile.block_n, tile.block_k, widen,
        num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=True,
    )
    # fmt: on
    return output
