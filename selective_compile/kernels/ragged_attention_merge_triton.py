"""The merge of what the splits of a request's keys came to in Triton, for CUDA and ROCm.

Legend
    tile, split, divided, place  of `split_plan_triton`: a program merges the splits of one divided tile, for one head.
               Tiles whose keys fit into one split have their result already
    used       splits that the tile's keys reach into
    sums       of each place, head and row of the tile: weights times values, not divided by the total
    maxima     of each place, head and row: the largest score in base 2, which the weights are relative to, or -inf
    totals     of each place, head and row: the sum of the weights
    BLOCK_Q    rows of a tile
    BLOCK_S    splits that are merged at once
    PDL        whether it begins before the kernel in front of it has ended: `dependent_launch`

Only what was written is read: splits behind the last one that a tile uses hold anything. The order in which splits
are merged depends on nothing but their number. The speed has not been measured on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from selective_compile.kernels.dependent_launch import begins_early, launch_options
from selective_compile.kernels.interpreter import on_device
from selective_compile.kernels.split_plan_triton import first_key, last_key


def merged_at_once(block_dv: int) -> int:
    """BLOCK_S for values of that padded size: of large ones twice as many spill a register for sm_80."""
    return 32 if block_dv <= 128 else 8


@triton.jit(
    do_not_specialize=["num_divided"],
    do_not_specialize_on_alignment=["cu_seqlens_q", "context_lens"],
)
def _merge_kernel(
    output,  # [T, H, Dv] contiguous
    sums,  # [places, H, BLOCK_Q, Dv] float32
    maxima,  # [places, H, BLOCK_Q] float32
    totals,  # [places, H, BLOCK_Q] float32
    divided,  # [4, num_divided] int32 of `SplitPlan`
    cu_seqlens_q,  # [N + 1]
    context_lens,  # [N]
    num_divided,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    PREFIX: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tile = divided + tl.program_id(0)
    request = tl.load(tile)
    if request < 0:
        return
    first_row = tl.load(tile + num_divided)
    split_keys = tl.load(tile + 2 * num_divided)
    place = tl.load(tile + 3 * num_divided)
    row_end = tl.load(cu_seqlens_q + request + 1)
    last_row = tl.minimum(first_row + BLOCK_Q, row_end)
    context = tl.load(context_lens + request)
    before = context - row_end  # a row's position is so much more than its number
    begin = first_key(before + first_row, WINDOW, CHUNK) // BLOCK_N * BLOCK_N
    used = (last_key(before + last_row, context, PREFIX) - begin + split_keys - 1) // split_keys
    if used <= 1:
        return
    dv = tl.arange(0, BLOCK_DV)
    BETWEEN: tl.constexpr = HEADS * BLOCK_Q  # rows of one place
    for row in range(first_row, last_row):
        first = place.to(tl.int64) * BETWEEN + head * BLOCK_Q + row - first_row
        maximum = tl.full([1], float("-inf"), tl.float32)
        total = tl.full([1], 0.0, tl.float32)
        accumulator = tl.full([BLOCK_DV], 0.0, tl.float32)
        for start in range(0, used, BLOCK_S):
            split = start + tl.arange(0, BLOCK_S)
            part = first + split * BETWEEN
            m = tl.load(maxima + part, split < used, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.reduce(m, 0, tl.standard._elementwise_max))
            # A row that no split so far has a key for has the maximum -inf, and -inf - -inf is NaN.
            finite_maximum = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            correction = tl.exp2(maximum - finite_maximum)
            weight = tl.exp2(m - finite_maximum)
            t = tl.load(totals + part, split < used, 0.0)
            total = total * correction + tl.reduce(t * weight, 0, tl.standard._sum_combine)
            mask = (split < used)[:, None] & (dv < VALUE_SIZE)[None, :]
            a = tl.load(sums + part[:, None] * VALUE_SIZE + dv[None, :], mask, 0.0)
            accumulator = accumulator * correction + tl.reduce(a * weight[:, None], 0, tl.standard._sum_combine)
            maximum = new_maximum
        result = accumulator / tl.where(total == 0.0, 1.0, total)
        to = output + (tl.cast(row, tl.int64) * HEADS + head) * VALUE_SIZE + dv
        tl.store(to, result.to(output.dtype.element_ty), dv < VALUE_SIZE)


def new_parts(query: Tensor, value_size: int, *, places: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for sums [places, H, rows, Dv], maxima and totals [places, H, rows], all float32. rows: of a tile."""
    sizes = (places, query.shape[1], rows)
    sums = query.new_empty(*sizes, value_size, dtype=torch.float32)
    return sums, query.new_empty(sizes, dtype=torch.float32), query.new_empty(sizes, dtype=torch.float32)


def merge(
    output: Tensor,
    parts: tuple[Tensor, Tensor, Tensor],
    divided: Tensor,
    lengths: tuple[Tensor, Tensor],
    rows_and_keys: tuple[int, int],
    *,
    window: int,
    chunk: int,
    prefix: int = 0,
) -> None:
    """Write the rows [T, H, Dv] of the tiles that more than one split was used for.

    divided: of `SplitPlan`; lengths: cu_seqlens_q and context_lens; rows_and_keys: of a tile, BLOCK_Q and BLOCK_N.
    """
    (_, heads, value_size), num_divided = output.shape, divided.shape[1]
    block_dv, early = triton.next_power_of_2(value_size), begins_early(output.device)
    if num_divided == 0:
        return
    # fmt: off
    on_device(_merge_kernel, output)[(num_divided, heads)](
        output, *parts, divided, *lengths, num_divided, window, chunk, prefix, heads, value_size, *rows_and_keys,
        merged_at_once(block_dv), block_dv, early, num_warps=4, enable_fp_fusion=True, **launch_options(early),
    )
    # fmt: on
