"""Linear layers in Triton, for CUDA and ROCm, where a row must not depend on how many rows there are.

A library chooses its tiles, and whether it splits a sum, by the number of rows, so that a row has other last bits in
another batch. Here both depend on the weight alone.

Legend
    tile     work of one program: BLOCK_M rows by BLOCK_N columns of the result; what is missing of its rows is 0
    BLOCK_K  terms of the sums that one iteration adds, from first to last and in float32; no sum is split
    M        rows, all dimensions of x but the last; they are no part of what is compiled
    DEPTH    K of the operator, and COLUMNS its N

Every weight's shape and dtype has one compiled kernel, in which a row of a tile goes through the same instructions
whichever row it is and whatever the others hold.

The tile sizes are bounded by registers and shared memory: `tests/kernels` compiles them for sm_80, sm_90, sm_100 and
gfx942 and fails on a spill. Their speed has not been measured on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from selective_compile.kernels.dot_triton import unfenced_in_a_loop, widened_dot
from selective_compile.kernels.interpreter import on_device
from selective_compile.kernels.linear_call import TRITON_DTYPES, check_linear

# What Triton looks for in an address, to read 16 bytes at once.
_ALIGNMENT = 16


@triton.jit
def sum_products(
    x_row,  # [BLOCK_M, 1] addresses of rows
    weight_row,  # [1, BLOCK_N]
    weight_column_stride,
    row_mask,
    column_mask,
    depth,  # terms of a sum
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """The sums of a tile, float32; 0 for rows and columns that are masked."""
    accumulator = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    for start in tl.range(0, depth, BLOCK_K, num_stages=1 if unfenced_in_a_loop() else None):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(x_row + k[None, :], row_mask[:, None] & (k < depth)[None, :], 0.0)
        b = tl.load(weight_row + k[:, None] * weight_column_stride, (k < depth)[:, None] & column_mask[None, :], 0.0)
        accumulator = widened_dot(a, b, accumulator, WIDEN)
    return accumulator


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    output,  # [M, COLUMNS] contiguous
    x,  # [M, DEPTH] contiguous
    weight,  # [COLUMNS, DEPTH]
    bias,  # [COLUMNS] or None: the code that reads it is not compiled
    num_rows,
    weight_row_stride,
    weight_column_stride,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask, column_mask = row < num_rows, column < COLUMNS
    x_row = x + row.to(tl.int64)[:, None] * DEPTH
    weight_row = weight + column.to(tl.int64)[None, :] * weight_row_stride
    # fmt: off
    accumulator = sum_products(
        x_row, weight_row, weight_column_stride, row_mask, column_mask, DEPTH, BLOCK_M, BLOCK_N, BLOCK_K, WIDEN
    )
    # fmt: on
    if bias is not None:
        accumulator += tl.load(bias + column, column_mask, 0.0).to(tl.float32)[None, :]
    place = output + row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    tl.store(place, accumulator.to(output.dtype.element_ty), row_mask[:, None] & column_mask[None, :])


class Tile(NamedTuple):
    """Sizes of one compiled variant of the kernel."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def tile_of(*, columns: int, depth: int, bytes_per_element: int) -> Tile:
    """The one tile for a weight [columns, depth]; the number of rows has no say in it."""
    # A float32 product runs on the vector units and holds its operands in registers, hence its smaller tile.
    most = 32 if bytes_per_element == 4 else 64
    # tl.dot needs 16 in every direction.
    block_n, block_k = (max(16, min(most, triton.next_power_of_2(size))) for size in (columns, depth))
    return Tile(block_m=most, block_n=block_n, block_k=block_k, num_warps=4, num_stages=3)


def aligned(x: Tensor) -> Tensor:
    """Contiguous, and where reads of 16 bytes begin: rows from some row on would be a compiled kernel of its own."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % _ALIGNMENT else x


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`selective::linear`: x [..., K], weight [N, K], bias [N] or None, of one dtype. Returns [..., N] of it.

    Sums are float32; float32 itself is not rounded to TF32. A row's result does not depend on the other rows, nor on
    how many there are.

    Raises:
        ValueError: the sizes or dtypes of x, weight and bias do not fit together, or their dtype has no kernel.
    """
    check_linear(x, weight, bias)
    if x.dtype not in TRITON_DTYPES:
        raise ValueError(f"x must be of {', '.join(map(str, TRITON_DTYPES))}, got {x.dtype}")
    columns, depth = weight.shape
    if not (x.numel() and weight.numel()):
        return F.linear(x, weight, bias)  # there is nothing to sum
    x = aligned(x)
    bias = bias if bias is None else bias.contiguous()
    output = x.new_empty((*x.shape[:-1], columns))
    rows = x.numel() // depth
    tile = tile_of(columns=columns, depth=depth, bytes_per_element=x.element_size())
    # The interpreter would multiply the bit patterns of bfloat16.
    widen = not x.is_cuda
    grid = (triton.cdiv(rows, tile.block_m), triton.cdiv(columns, tile.block_n))
    # fmt: off
    on_device(_linear_kernel, x)[grid](
        output, x, weight, bias, rows, *weight.stride(), columns, depth,
        tile.block_m, tile.block_n, tile.block_k, widen,
        num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=True,
    )
    # fmt: on
    return output
