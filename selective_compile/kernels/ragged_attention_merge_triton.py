"""The merge of what the splits of a request's keys came to in Triton, for CUDA and ROCm.

Legend
    tile, split, divided, place  of `split_plan_triton`. Tiles whose keys fit into one split have their result already
    program    merges the splits of up to ROWS rows of a divided tile, for one head; behind a tile's last row it ends
    used       splits that the tile's keys reach into
    sums       of each place, head and row of the tile: weights times values, not divided by the total
    maxima     of each place, head and row: the largest score in base 2, which the weights are relative to, or -inf
    totals     of each place, head and row: the sum of the weights
    BLOCK_Q    rows of a tile
    BLOCK_R    rows of a program that are merged at once: one where most tiles have one or two rows, else all of them
    BLOCK_S    splits of each that are merged at once
    PDL        whether it begins before the kernel in front of it has ended: `dependent_launch`

Only what was written is read: splits behind the last one that a tile uses hold anything. The order in which splits
are merged depends on nothing but their number and BLOCK_S. The grid depends on T and N alone, as that of attention.

Of several rows at once a warp has one each, and with values of 65 to 128 numbers its threads sum all splits of theirs
by themselves, so that no warp waits for another; of one row the splits are shared among all warps. The speed has not
been measured on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from selective_compile.kernels.dependent_launch import begins_early, launch_options
from selective_compile.kernels.interpreter import on_device
from selective_compile.kernels.registers import Backend, backend
from selective_compile.kernels.split_plan_triton import first_key, last_key

# Rows of a program: one for each of its four warps where several are merged at once. The 32 of a tall tile, one after
# another in one program, were 32 times a load, a sum over all warps and a store, a microsecond or more each, behind
# every chunk of a prompt. Programs behind a tile's last row have a few loads to make before they end, a few hundred
# nanoseconds of one of eight places or more of a processor. There are up to 16,896 of them for 132 processors, 16 for
# each place, where many requests have one row and a few have many. A row for each program would be four times as many,
# and as many in decoding, where tiles of groups of four heads have four rows and mostly use one: with four rows no
# program is in vain there. By arithmetic; not measured on a GPU.
ROWS = 4


def merged_at_once(block_dv: int, *, rows: int = 1) -> int:
    """BLOCK_S for values of that padded size and BLOCK_R: of large ones twice as many spill a register for sm_80."""
    return (32 if block_dv <= 128 else 16 if rows > 1 and block_dv <= 256 else 8) // rows


def merge_options(block_dv: int, *, rows: int, backend: Backend) -> dict[str, int]:
    """Of a launch with that BLOCK_R. Of several rows at once, the assembler spills a register of heads of 80 numbers to
    have room for a ninth program on sm_100; eight have 64 registers for a thread."""
    return {"num_warps": 4} | ({"maxnreg": 64} if backend == "cuda" and rows > 1 and block_dv <= 256 else {})


def rows_at_once(block_q: int, *, num_rows: int, num_requests: int) -> int:
    """BLOCK_R of a step: by what tells low tiles from tall ones in `ragged_attention_tiles`."""
    return 1 if num_rows <= 2 * num_requests else min(ROWS, triton.next_power_of_2(block_q))


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
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
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
    tile_end = tl.minimum(first_row + BLOCK_Q, row_end)
    begin_row = first_row + tl.program_id(2) * ROWS
    if begin_row >= tile_end:
        return
    context = tl.load(context_lens + request)
    before = context - row_end  # a row's position is so much more than its number
    begin = first_key(before + first_row, WINDOW, CHUNK) // BLOCK_N * BLOCK_N
    used = (last_key(before + tile_end, context, PREFIX) - begin + split_keys - 1) // split_keys
    if used <= 1:
        return
    dv = tl.arange(0, BLOCK_DV)
    BETWEEN: tl.constexpr = HEADS * BLOCK_Q  # rows of one place
    for start_row in range(begin_row, tl.minimum(begin_row + ROWS, tile_end), BLOCK_R):
        row = start_row + tl.arange(0, BLOCK_R)
        first = place.to(tl.int64) * BETWEEN + head * BLOCK_Q + row - first_row
        maximum = tl.full([BLOCK_R], float("-inf"), tl.float32)
        total = tl.full([BLOCK_R], 0.0, tl.float32)
        accumulator = tl.full([BLOCK_R, BLOCK_DV], 0.0, tl.float32)
        for start in range(0, used, BLOCK_S):
            split = start + tl.arange(0, BLOCK_S)
            part = first[None, :] + split[:, None] * BETWEEN
            there = (split < used)[:, None] & (row < tile_end)[None, :]
            m = tl.load(maxima + part, there, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.reduce(m, 0, tl.standard._elementwise_max))
            # A row that no split so far has a key for has the maximum -inf, and -inf - -inf is NaN.
            finite_maximum = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            correction = tl.exp2(maximum - finite_maximum)
            weight = tl.exp2(m - finite_maximum[None, :])
            t = tl.load(totals + part, there, 0.0)
            total = total * correction + tl.reduce(t * weight, 0, tl.standard._sum_combine)
            mask = there[:, :, None] & (dv < VALUE_SIZE)[None, None, :]
            a = tl.load(sums + part[:, :, None] * VALUE_SIZE + dv[None, None, :], mask, 0.0)
            added = tl.reduce(a * weight[:, :, None], 0, tl.standard._sum_combine)
            accumulator = accumulator * correction[:, None] + added
            maximum = new_maximum
        result = accumulator / tl.where(total == 0.0, 1.0, total)[:, None]
        to = output + (row.to(tl.int64) * HEADS + head)[:, None] * VALUE_SIZE + dv[None, :]
        stored = (row < tile_end)[:, None] & (dv < VALUE_SIZE)[None, :]
        tl.store(to, result.to(output.dtype.element_ty), stored)


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
    (num_rows, heads, value_size), num_divided, block_q = output.shape, divided.shape[1], rows_and_keys[0]
    block_dv, early = triton.next_power_of_2(value_size), begins_early(output.device)
    at_once = rows_at_once(block_q, num_rows=num_rows, num_requests=len(lengths[1]))
    if num_divided == 0:
        return
    # fmt: off
    on_device(_merge_kernel, output)[(num_divided, heads, triton.cdiv(block_q, ROWS))](
        output, *parts, divided, *lengths, num_divided, window, chunk, prefix, heads, value_size, *rows_and_keys,
        ROWS, at_once, merged_at_once(block_dv, rows=at_once), block_dv, early, enable_fp_fusion=True,
        **merge_options(block_dv, rows=at_once, backend=backend()), **launch_options(early),
    )
    # fmt: on
