"""The merge of what the splits of a request's keys came to in Triton, for CUDA and ROCm.

Legend
    split      a run of split_length keys, a multiple of BLOCK_N, counted from the iteration of the first key that
               any row of the request sees; the request's keys end in split `used - 1`
    sums       of each place, head and split: weights times values, not divided by the total
    maxima     of each place, head and split: the largest score in base 2, which the weights are relative to, or -inf
    totals     of each place, head and split: the sum of the weights
    place      of a row of a request of at most BLOCK_Q rows: min(first row, request * BLOCK_Q), and on from there.
               No two rows have one place, and there are at most min(T, N * BLOCK_Q)
    BLOCK_Q    rows of a tile of the attention kernel; requests of more rows, and those whose keys fit into one
               split, have their result already
    BLOCK_S    splits that are merged at once

Only what was written is read: splits behind the last one that a request uses hold anything. The order in which splits
are merged depends on nothing but their number. The speed has not been measured on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from selective_compile.kernels.interpreter import on_device

# Twice as many spill a register for sm_80. Not measured on a GPU.
BLOCK_S = 8


@triton.jit
def first_key(first_position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first key that any row of a tile sees, by the position of its first row."""
    begin = first_position * 0
    if WINDOW > 0:
        begin = tl.maximum(begin, first_position - WINDOW + 1)
    if CHUNK > 0:
        begin = tl.maximum(begin, first_position // CHUNK * CHUNK)
    return begin


@triton.jit(
    do_not_specialize=["num_splits", "split_length"],
    do_not_specialize_on_alignment=["cu_seqlens_q", "context_lens"],
)
def _merge_kernel(
    output,  # [T, H, Dv] contiguous
    sums,  # [places, H, num_splits, Dv] float32
    maxima,  # [places, H, num_splits] float32
    totals,  # [places, H, num_splits] float32
    cu_seqlens_q,  # [N + 1]
    context_lens,  # [N]
    num_splits,
    split_length,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    request = tl.program_id(0)
    head = tl.program_id(1)
    row_begin = tl.load(cu_seqlens_q + request)
    row_end = tl.load(cu_seqlens_q + request + 1)
    context = tl.load(context_lens + request)
    begin = first_key(context - row_end + row_begin, WINDOW, CHUNK) // BLOCK_N * BLOCK_N
    used = (context - begin + split_length - 1) // split_length
    if (row_end - row_begin > BLOCK_Q) | (used <= 1):
        return
    dv = tl.arange(0, BLOCK_DV)
    for n in range(0, row_end - row_begin):
        row = row_begin + n
        place = tl.minimum(row_begin, request * BLOCK_Q) + n
        first = (place.to(tl.int64) * HEADS + head) * num_splits
        maximum = tl.full([1], float("-inf"), tl.float32)
        total = tl.full([1], 0.0, tl.float32)
        accumulator = tl.full([BLOCK_DV], 0.0, tl.float32)
        for start in range(0, used, BLOCK_S):
            split = start + tl.arange(0, BLOCK_S)
            m = tl.load(maxima + first + split, split < used, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.reduce(m, 0, tl.standard._elementwise_max))
            # A row that no split so far has a key for has the maximum -inf, and -inf - -inf is NaN.
            finite_maximum = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            correction = tl.exp2(maximum - finite_maximum)
            weight = tl.exp2(m - finite_maximum)
            part = tl.load(totals + first + split, split < used, 0.0)
            total = total * correction + tl.reduce(part * weight, 0, tl.standard._sum_combine)
            mask = (split < used)[:, None] & (dv < VALUE_SIZE)[None, :]
            a = tl.load(sums + (first + split)[:, None] * VALUE_SIZE + dv[None, :], mask, 0.0)
            accumulator = accumulator * correction + tl.reduce(a * weight[:, None], 0, tl.standard._sum_combine)
            maximum = new_maximum
        result = accumulator / tl.where(total == 0.0, 1.0, total)
        to = output + (row.to(tl.int64) * HEADS + head) * VALUE_SIZE + dv
        tl.store(to, result.to(output.dtype.element_ty), dv < VALUE_SIZE)


def new_parts(query: Tensor, value_size: int, *, places: int, splits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for sums [places, H, splits, Dv], maxima and totals [places, H, splits], all float32."""
    sizes = (places, query.shape[1], splits)
    sums = query.new_empty(*sizes, value_size, dtype=torch.float32)
    return sums, query.new_empty(sizes, dtype=torch.float32), query.new_empty(sizes, dtype=torch.float32)


def merge(
    output: Tensor,
    parts: tuple[Tensor, Tensor, Tensor],
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    split_length: int,
    rows_and_keys: tuple[int, int],
    *,
    window: int,
    chunk: int,
) -> None:
    """Write the rows [T, H, Dv] of the requests that more than one split was used for.

    rows_and_keys: of a tile, BLOCK_Q and BLOCK_N.
    """
    _, heads, value_size = output.shape
    num_requests, num_splits = context_lens.shape[0], parts[1].shape[2]
    block_dv = triton.next_power_of_2(value_size)
    # fmt: off
    on_device(_merge_kernel, output)[(num_requests, heads)](
        output, *parts, cu_seqlens_q, context_lens, num_splits, split_length, window, chunk, heads, value_size,
        *rows_and_keys, BLOCK_S, block_dv, num_warps=4, enable_fp_fusion=True,
    )
    # fmt: on
