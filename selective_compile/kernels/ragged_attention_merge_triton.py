"""The merge of what the splits of a request's keys came to in Triton, for CUDA and ROCm.

Legend
    tile, split, divided, place  of `split_plan_triton`. Tiles whose keys fit into one split have their result already
    item       up to ROWS rows of a divided tile, for one head. A program merges one item after another, of all that
               there can be those that are as many apart as there are programs; behind the last divided tile it ends
    used       splits that the tile's keys reach into
    sums       of each place, head and row of the tile: weights times values, not divided by the total
    maxima     of each place, head and row: the largest score in base 2, which the weights are relative to, or -inf
    totals     of each place, head and row: the sum of the weights
    BLOCK_Q    rows of a tile
    BLOCK_R    rows of an item that are merged at once, BLOCK_S splits of each: `MergeConfig`
    PDL        whether it begins before the kernel in front of it has ended: `dependent_launch`

Only what was written is read: splits behind the last one that a tile uses hold anything. The order in which splits
are merged depends on nothing but their number and the `MergeConfig`, which the rows of a step tell; steps of a
batch-invariant engine have none. The grid depends on T and N alone, as that of attention; but
of programs without an item there are as few as run at once: a program for each item that there could be, 16,896 of
them, took an H200 22 microseconds behind a prompt that nothing was divided of.

A warp has a row by itself, and with values of 65 to 128 numbers its threads sum all its splits, so that no warp waits
for another: of one row at a time a program has one warp. With four of them for each row of decoding, a layer of 32
requests of 1,024 tokens took an H200 47 us, and 43 with one, of 16 programs a processor. Only where a step has one or
two rows, of which each may have splits of a whole device, four share them: one request of 32,768 takes 40 us so, and 43
with one warp. Where between two and eight rows that turns, and values of 512 numbers, were not measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from selective_compile.kernels.dependent_launch import begins_early, launch_options
from selective_compile.kernels.interpreter import on_device
from selective_compile.kernels.ragged_attention_tiles import processors
from selective_compile.kernels.registers import Backend, backend, warps
from selective_compile.kernels.split_plan_triton import SplitPlan, divided_tile

# Rows of an item: one for each of a program's four warps where several are merged at once. The 32 of a tall tile, one
# after another in one program, would be 32 times a load, a sum over all warps and a store.
ROWS = 4
# Rows of a step whose splits four warps share.
FEWEST = 2


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    """How a step's items are merged.

    rows, splits: BLOCK_R and BLOCK_S; places: programs for each processor, which all have room at once.
    """

    rows: int
    splits: int
    warps: int
    places: int

    def options(self, block_dv: int, backend: Backend) -> dict[str, int]:
        """Of a launch. Of several rows at once, the assembler spills a register of heads of 80 numbers to have room for
        a ninth program on sm_100; with 80 registers for a thread there is room for all places."""
        several = backend == "cuda" and self.rows > 1 and block_dv <= 256
        return warps(self.warps, backend) | ({"maxnreg": 80} if several else {})


def merge_config(block_q: int, block_dv: int, *, num_rows: int, num_requests: int) -> MergeConfig:
    """By what tells low tiles from tall ones in `ragged_attention_tiles`. Of large values, twice as many splits spill a
    register for sm_80; those of one warp are 64 numbers for a thread."""
    many = 32 if block_dv <= 128 else 8
    if num_rows > 2 * num_requests:
        rows = min(ROWS, triton.next_power_of_2(block_q))
        return MergeConfig(rows=rows, splits=many // rows, warps=4, places=6)
    if num_rows <= FEWEST:
        return MergeConfig(rows=1, splits=many, warps=4, places=5)
    return MergeConfig(rows=1, splits=max(1, min(16, 2048 // block_dv)), warps=1, places=8)


@triton.jit(do_not_specialize=["num_divided", "num_items"])
def _merge_kernel(
    output,  # [T, H, Dv] contiguous
    sums,  # [places, H, BLOCK_Q, Dv] float32
    maxima,  # [places, H, BLOCK_Q] float32
    totals,  # [places, H, BLOCK_Q] float32
    divided,  # [4, num_divided] int32 of `SplitPlan`
    num_divided,
    num_items,
    HEADS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PDL: tl.constexpr,
):
    OF_A_TILE: tl.constexpr = (BLOCK_Q + ROWS - 1) // ROWS * HEADS  # items
    BETWEEN: tl.constexpr = HEADS * BLOCK_Q  # rows of one place
    dv = tl.arange(0, BLOCK_DV)
    item = tl.program_id(0)
    first_row, tile_end, used, place = divided_tile(divided, num_divided, item // OF_A_TILE, True)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    while tile_end >= 0:
        head = item % HEADS
        begin_row = first_row + item % OF_A_TILE // HEADS * ROWS
        end_row = tl.where(used > 1, tl.minimum(begin_row + ROWS, tile_end), begin_row)
        for start_row in range(begin_row, end_row, BLOCK_R):
            row = start_row + tl.arange(0, BLOCK_R)
            first = place.to(tl.int64) * BETWEEN + head * BLOCK_Q + row - first_row
            maximum = tl.full([BLOCK_R], float("-inf"), tl.float32)
            total = tl.full([BLOCK_R], 0.0, tl.float32)
            accumulator = tl.full([BLOCK_R, BLOCK_DV], 0.0, tl.float32)
            for start in range(0, used, BLOCK_S):
                split = start + tl.arange(0, BLOCK_S)
                part = first[None, :] + split[:, None] * BETWEEN
                there = (split < used)[:, None] & (row < end_row)[None, :]
                mask = there[:, :, None] & (dv < VALUE_SIZE)[None, None, :]
                m = tl.load(maxima + part, there, float("-inf"))
                if BLOCK_R == 1:  # all at once: warps wait for one another in each sum, and memory would, too
                    t = tl.load(totals + part, there, 0.0)
                    a = tl.load(sums + part[:, :, None] * VALUE_SIZE + dv[None, None, :], mask, 0.0)
                new_maximum = tl.maximum(maximum, tl.reduce(m, 0, tl.standard._elementwise_max))
                # A row that no split so far has a key for has the maximum -inf, and -inf - -inf is NaN.
                finite_maximum = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
                correction = tl.exp2(maximum - finite_maximum)
                weight = tl.exp2(m - finite_maximum[None, :])
                if BLOCK_R > 1:  # fewer registers
                    t = tl.load(totals + part, there, 0.0)
                total = total * correction + tl.reduce(t * weight, 0, tl.standard._sum_combine)
                if BLOCK_R > 1:
                    a = tl.load(sums + part[:, :, None] * VALUE_SIZE + dv[None, None, :], mask, 0.0)
                added = tl.reduce(a * weight[:, :, None], 0, tl.standard._sum_combine)
                accumulator = accumulator * correction[:, None] + added
                maximum = new_maximum
            result = accumulator / tl.where(total == 0.0, 1.0, total)[:, None]
            to = output + (row.to(tl.int64) * HEADS + head)[:, None] * VALUE_SIZE + dv[None, :]
            stored = (row < end_row)[:, None] & (dv < VALUE_SIZE)[None, :]
            tl.store(to, result.to(output.dtype.element_ty), stored)
        item += tl.num_programs(0)
        first_row, tile_end, used, place = divided_tile(divided, num_divided, item // OF_A_TILE, item < num_items)


def new_parts(query: Tensor, value_size: int, *, places: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for sums [places, H, rows, Dv], maxima and totals [places, H, rows], all float32. rows: of a tile."""
    sizes = (places, query.shape[1], rows)
    sums = query.new_empty(*sizes, value_size, dtype=torch.float32)
    return sums, query.new_empty(sizes, dtype=torch.float32), query.new_empty(sizes, dtype=torch.float32)


def merge(output: Tensor, parts: tuple[Tensor, Tensor, Tensor], split: SplitPlan, *, num_requests: int) -> None:
    """Write the rows [T, H, Dv] of the tiles that more than one split was used for."""
    (num_rows, heads, value_size), num_divided, block_q = output.shape, split.divided.shape[1], parts[0].shape[2]
    block_dv, early = triton.next_power_of_2(value_size), begins_early(output.device)
    how = merge_config(block_q, block_dv, num_rows=num_rows, num_requests=num_requests)
    items = num_divided * heads * triton.cdiv(block_q, ROWS)
    if items == 0:
        return
    # fmt: off
    on_device(_merge_kernel, output)[(min(items, how.places * processors(output.device)),)](
        output, *parts, split.divided, num_divided, items, heads, value_size, block_q, ROWS, how.rows, how.splits,
        block_dv, early, enable_fp_fusion=True, **how.options(block_dv, backend()), **launch_options(early),
    )
    # fmt: on
