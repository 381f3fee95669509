"""The attention of a step in Triton, for CUDA and ROCm: prefill, decode and mixed steps in one launch.

Legend
    tile       work of one program of the attention kernel: BLOCK_Q rows of one request, GROUP query heads of one
               key/value head, all that it has or one of PARTS equal parts
    BLOCK_Q    rows of a tile, BLOCK_M // GROUP
    BLOCK_M    rows of the query matrix: row m is row m // GROUP of the tile and head m % GROUP of the group.
               Packing the heads that share a key/value head lets a decode row feed the matrix units too
    BLOCK_N    keys of one iteration; any relation to BLOCK_SIZE, the slots of a block, is allowed
    clear      an iteration whose keys are seen by every row of the tile, all of them. Nothing is compared there
    masked     another one: where a window or a chunk begins, and at the end
    LATE       values of clear iterations are multiplied in the one behind, while its own weights are computed: Hopper's
               matrix units go on by themselves. The wait for the next scores is the wait for this product, too
    PREFIX     keys in front of it are seen by every row; what a tile sees ends there if it ends no later
    BLOCK_SIZE 0: no pool, the keys are the request's own rows of this step (varlen_attention)
    sinks, slopes, distance_bias None: the code that reads them is not compiled
    DISTANCES  numbers that a distance_bias has for each head and row, or with ONE_BIAS for each head
    PDL        whether it begins before the kernel in front of it has ended: `dependent_launch`
    AHEAD      iterations for which the second-level cache is asked before that one has ended (`ask_ahead`); 0: none
    piece, split  a program's share of a tile's keys, and how they are cut: `split_plan_triton`
    SPLIT      False: every program takes all keys, and what belongs to splits is not compiled
    sums, maxima, totals  what a split came to, for `ragged_attention_merge_triton`, which has their legend. A
               tile whose keys fit into one split needs no merge: its program writes the result

The grid is an upper bound that depends on T and N only, never on lengths, which stay on the device; programs
behind the last piece end: hundreds of them, each a microsecond, that must not stand in front of those that have work.
All heads of the longest pieces begin first, since what begins last should not be what takes longest. What tells a
piece of its keys was written before the kernel in front began, so that a program reads it before it waits
(`split_plan_triton`, `dependent_launch`). Without splits, request n gets the tiles from
cu_seqlens_q[n] // BLOCK_Q + n up to those of request n + 1. They are enough, and at most one too many, because
floor(b / q) - floor(a / q) + 1 >= ceil((b - a) / q), and a program finds its request by bisection; the last begin
first. The padding rows behind the last request are a request N of context 0, whose result is 0.

The scores are kept in base 2 (the scale times log2(e)): exp2 is what the hardware has.

Rows are stored in two branches, for less registers: with masks in place of them, decoding spilled for sm_80.

Where a tile is one bulk copy, a descriptor of the pool, made on the host for each launch, takes the place of addresses;
its coordinates are block, head, slot and element, and elements behind the head size are read as 0.

The tile sizes are bounded by registers and shared memory: `tests/kernels` compiles them for sm_80, sm_90,
sm_100 and gfx942 and fails on a spill. `docs/benchmarks.md` has what was measured of their speed.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from selective_compile.kernels.dot_triton import widened_dot
from selective_compile.kernels.fp8_triton import as_read
from selective_compile.kernels.ragged_attention_reads_triton import (
    added_by_distance,
    ask_ahead,
    blocks_of_keys,
    elements,
    late_product,
)
from selective_compile.kernels.request_rows_triton import tile_rows
from selective_compile.kernels.split_plan_triton import first_key, last_key, piece_keys, piece_of


# What changes from step to step must not change the compiled kernel: N and T are not specialised on 1 and
# on multiples of 16, nor are the metadata tensors on their alignment (they may be slices of one buffer).
@triton.jit(
    do_not_specialize=["num_rows", "num_requests", "table_stride", "num_pieces"],
    do_not_specialize_on_alignment=[
        *("cu_seqlens_q", "context_lens", "block_table", "sinks", "slopes", "key_scales", "value_scales"),
        "distance_bias",
    ],
)
def attention_kernel(
    output,  # [T, H, Dv] contiguous
    pieces,  # [7, num_pieces] int32 of `SplitPlan`; without splits None
    sums,  # [places, H, BLOCK_Q, Dv] float32; without splits None
    maxima,  # [places, H, BLOCK_Q] float32; without splits None
    totals,  # [places, H, BLOCK_Q] float32; without splits None
    query,  # [T, H, D]
    keys,  # [num_blocks, K, BLOCK_SIZE, D]; without a pool [T, K, D]
    values,  # [num_blocks, K, BLOCK_SIZE, Dv]; without a pool [T, K, Dv]
    key_tiles,  # the key pool as a descriptor of tiles [1, 1, BLOCK_N, BLOCK_D], or None
    value_tiles,  # the value pool as one of tiles [1, 1, BLOCK_N, BLOCK_DV], or None
    cu_seqlens_q,  # [N + 1]
    context_lens,  # [N]; without a pool not read
    block_table,  # [N, max_blocks]; without a pool not read
    sinks,  # [H], with ROW_SINKS [T, H], or None
    slopes,  # [H] or None
    key_scales,  # [K] with pools of e4m3, else None
    value_scales,  # [K] or None
    distance_bias,  # [T, H, DISTANCES] contiguous, [1, H, DISTANCES] or None
    num_rows,
    num_requests,
    num_pieces,
    query_row_stride,
    query_head_stride,
    key_block_stride,
    key_head_stride,
    key_slot_stride,
    value_block_stride,
    value_head_stride,
    value_slot_stride,
    table_stride,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CHUNK: tl.constexpr,
    PREFIX: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    WIDEN: tl.constexpr,
    SPLIT: tl.constexpr,
    LATE: tl.constexpr,
    PDL: tl.constexpr,
    AHEAD: tl.constexpr,
    LANES: tl.constexpr,
    DISTANCES: tl.constexpr,
    ONE_BIAS: tl.constexpr,
    ROW_SINKS: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    LOG2_E: tl.constexpr = 1.4426950408889634
    # Whether scores are multiplied behind the maximum over them, which is then one product a row.
    FOLDED: tl.constexpr = (SCALE > 0) and SOFTCAP == 0 and slopes is None and distance_bias is None
    PROGRAMS: tl.constexpr = HEADS // GROUP  # of a piece
    BULK: tl.constexpr = key_tiles is not None
    # Of the few masked iterations the bulk copies of 128 rows begin early; of fewer rows a copy of values only beside
    # that of its keys, or a processor would have shared memory for fewer programs; and what is read by addresses does
    # not, since the registers that it takes spilled in float32.
    EARLY: tl.constexpr = 1 if key_tiles is None else 2 if BLOCK_M < 128 else None
    part_of_heads = tl.program_id(0) % PROGRAMS
    kv_head = part_of_heads // PARTS

    if SPLIT:
        number = tl.program_id(0) // PROGRAMS
        request, first_row, row_end, context, split, each_has, place = piece_of(pieces, num_pieces, number)
    else:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        number = num_pieces - 1 - tl.program_id(0) // PROGRAMS
        request, row_begin, row_end, first_row = tile_rows(cu_seqlens_q, num_requests, num_rows, number, BLOCK_Q)
        if first_row >= row_end:
            return
        if BLOCK_SIZE > 0:
            context = tl.load(context_lens + request, mask=request < num_requests, other=0)
        else:
            context = tl.where(request < num_requests, row_end - row_begin, 0)

    # Keys outside [key_begin, key_end) are seen by no row of the tile. They are not read: slots behind the
    # context hold anything, and blocks in front of what the first row sees may belong to another request.
    key_end = last_key(context - row_end + tl.minimum(first_row + BLOCK_Q, row_end), context, PREFIX)
    first_position = context - row_end + first_row
    key_begin = first_key(first_position, WINDOW, CHUNK)
    if CHUNK > 0:
        last_chunk = (key_end - 1) // CHUNK * CHUNK
    begin = key_begin // BLOCK_N * BLOCK_N
    end = key_end
    if BLOCK_SIZE > 0:
        entries = block_table + request.to(tl.int64) * table_stride
    if SPLIT:
        begin, end, divided = piece_keys(split, each_has, begin, end)
        if AHEAD > 0:
            # fmt: off
            ask_ahead(
                keys, values, entries, kv_head, begin, end, first_row < row_end, key_block_stride, key_head_stride,
                value_block_stride, value_head_stride, AHEAD, LANES, KEY_SIZE, VALUE_SIZE, BLOCK_SIZE, BLOCK_N,
            )
            # fmt: on
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        if (first_row >= row_end) | ((begin >= end) & (split > 0)):
            return

    m = tl.arange(0, BLOCK_M)
    row = first_row + m // GROUP
    head = part_of_heads * GROUP + m % GROUP
    row_mask = (m < BLOCK_Q * GROUP) & (row < row_end)
    position = context - row_end + row
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    query_offset = row.to(tl.int64) * query_row_stride + head * query_head_stride
    q = tl.load(query + query_offset[:, None] + d[None, :], row_mask[:, None] & (d < KEY_SIZE)[None, :], 0.0)

    key_head_offset = kv_head.to(tl.int64) * key_head_stride
    value_head_offset = kv_head.to(tl.int64) * value_head_stride
    if sinks is None:
        maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.full([BLOCK_M], 0.0, tl.float32)
    else:
        # One more key of weight 1, which no value goes with.
        if ROW_SINKS:
            maximum = tl.load(sinks + row.to(tl.int64) * HEADS + head, row_mask, 0.0).to(tl.float32) * LOG2_E
        else:
            maximum = tl.load(sinks + head).to(tl.float32) * LOG2_E
        total = tl.full([BLOCK_M], 1.0, tl.float32)
        if SPLIT:
            maximum = tl.where(split == 0, maximum, float("-inf"))
            total = tl.where(split == 0, total, 0.0)
    scale = SCALE * LOG2_E
    if key_scales is not None:
        scale = scale * tl.load(key_scales + kv_head)
    if slopes is not None:
        slope = tl.load(slopes + head) * LOG2_E
    if distance_bias is not None:
        # Those of the tile's first row; where the others have theirs is told in 32 bits, which take fewer registers.
        tile_bias = distance_bias + (0 if ONE_BIAS else first_row.to(tl.int64) * (HEADS * DISTANCES))
        bias_offset = ((0 if ONE_BIAS else (m // GROUP) * HEADS) + head) * DISTANCES
    accumulator = tl.full([BLOCK_M, BLOCK_DV], 0.0, tl.float32)

    # Clear from where the last row's window and chunk begin up to the position of the first row, or the end of the
    # prefix, in whole iterations.
    # The masked ones in front of these and behind them are walked first, in one loop, so that their code is there once.
    clear_begin = begin
    if (WINDOW > 0) | (CHUNK > 0):
        clear_begin = key_begin
        if WINDOW > 0:
            clear_begin = tl.maximum(clear_begin, key_end - WINDOW)
        if CHUNK > 0:
            clear_begin = tl.maximum(clear_begin, last_chunk)
        clear_begin = (clear_begin + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        clear_begin = tl.minimum(tl.maximum(clear_begin, begin), end)
    clear_end = last_key(first_position + 1, context, PREFIX) // BLOCK_N * BLOCK_N
    clear_end = tl.minimum(tl.maximum(clear_end, clear_begin), end)
    steps_in_front = (clear_begin - begin + BLOCK_N - 1) // BLOCK_N
    masked_steps = steps_in_front + (end - clear_end + BLOCK_N - 1) // BLOCK_N
    for MASKED in tl.static_range(1, -1, -1):
        steps = masked_steps if MASKED else (clear_end - clear_begin) // BLOCK_N
        if LATE and not MASKED:
            # The first iteration multiplies its own values, which every row sees, by no weight: one that is infinite
            # makes NaN of what would be infinite. Weights are kept in float32: those of 16 bits would go through shared
            # memory.
            late_weight = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
            late_correction = tl.full([BLOCK_M], 1.0, tl.float32)
            late_start = clear_begin
            late_block = tl.load(entries + clear_begin // BLOCK_SIZE, steps > 0, 0).to(tl.int32)
        for step in tl.range(0, steps, num_stages=EARLY if MASKED else None):
            if MASKED:
                start = begin + step * BLOCK_N + tl.where(step < steps_in_front, 0, clear_end - clear_begin)
            else:
                start = clear_begin + step * BLOCK_N
            j = start + tl.arange(0, BLOCK_N)
            read = (j >= key_begin) & (j < key_end)
            if BLOCK_SIZE == 0:
                block = (row_begin + j).to(tl.int64)
                slot = j * 0
            else:
                block = blocks_of_keys(entries, start, read, BLOCK_SIZE, BLOCK_N, MASKED).to(tl.int64)
                slot = j % BLOCK_SIZE
            if key_tiles is None:
                key_offset = block * key_block_stride + key_head_offset + slot * key_slot_stride
                k = elements(keys + key_offset, read, KEY_SIZE, BLOCK_D, MASKED)
            else:
                k = key_tiles.load([block.to(tl.int32), kv_head, start % BLOCK_SIZE, 0]).reshape([BLOCK_N, BLOCK_D])
            score = widened_dot(q, tl.trans(as_read(k, q)), tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32), WIDEN, BULK)
            if LATE and not MASKED:
                accumulator = late_product(
                    *(accumulator, late_correction, late_weight, value_tiles, late_block, kv_head),
                    *(late_start % BLOCK_SIZE, BLOCK_N, BLOCK_DV, WIDEN),
                )
            if SOFTCAP > 0:
                # tanh(x) = 1 - 2 / (1 + exp(2x)) has the right limit where the exponential overflows to inf.
                exponential = tl.exp2(score * (scale * (2 / SOFTCAP)))
                score = (SOFTCAP * LOG2_E) * (1.0 - 2.0 / (1.0 + exponential))
            elif not FOLDED:
                score = score * scale
            if slopes is not None:
                score += slope[:, None] * (j[None, :] - position[:, None]).to(tl.float32)
            if distance_bias is not None:
                score += LOG2_E * added_by_distance(tile_bias, bias_offset, position, j, row_mask, DISTANCES)
            if MASKED:
                seen = read[None, :] & (j[None, :] <= position[:, None])
                if PREFIX > 0:
                    seen = seen | (read & (j < PREFIX))[None, :]
                if WINDOW > 0:
                    seen = seen & (j[None, :] > position[:, None] - WINDOW)
                if CHUNK >= BLOCK_Q:
                    # The tile meets one boundary at most, and key_begin deals with the rows in front of it. To compare
                    # with a begin of every row costs registers: on sm_80 they spilled.
                    seen = seen & ((j >= last_chunk)[None, :] | (position < last_chunk)[:, None])
                elif CHUNK > 0:
                    seen = seen & (j[None, :] >= (position // CHUNK * CHUNK)[:, None])
                score = tl.where(seen, score, float("-inf"))

            largest = tl.reduce(score, 1, tl.standard._elementwise_max)
            new_maximum = tl.maximum(maximum, largest * scale if FOLDED else largest)
            # A row that has seen no key yet has the maximum -inf, and -inf - -inf is NaN.
            finite_maximum = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            correction = tl.exp2(maximum - finite_maximum)
            weight = tl.exp2((score * scale if FOLDED else score) - finite_maximum[:, None])
            total = total * correction + tl.reduce(weight, 1, tl.standard._sum_combine)
            if LATE and not MASKED:
                late_weight, late_correction = weight, correction
                late_block, late_start = block.to(tl.int32), start
            else:
                if value_tiles is None:
                    value_offset = block * value_block_stride + value_head_offset + slot * value_slot_stride
                    v = as_read(elements(values + value_offset, read, VALUE_SIZE, BLOCK_DV, MASKED), q)
                else:
                    v = value_tiles.load([block.to(tl.int32), kv_head, start % BLOCK_SIZE, 0])
                    v = as_read(v.reshape([BLOCK_N, BLOCK_DV]), q)
                    if MASKED:
                        # Slots behind the context hold anything, and no weight makes a NaN 0.
                        v = tl.where(read[:, None], v, 0.0)
                accumulator = widened_dot(weight.to(v.dtype), v, accumulator * correction[:, None], WIDEN, BULK)
            maximum = new_maximum
    if LATE:
        if steps > 0:
            accumulator = late_product(
                *(accumulator, late_correction, late_weight, value_tiles, late_block, kv_head),
                *(late_start % BLOCK_SIZE, BLOCK_N, BLOCK_DV, WIDEN),
            )

    if value_scales is not None:
        accumulator *= tl.load(value_scales + kv_head)
    if SPLIT:
        if divided:
            part = (place * HEADS + head) * BLOCK_Q + row - first_row
            tl.store(maxima + part, maximum, row_mask)
            tl.store(totals + part, total, row_mask)
            sum_mask = row_mask[:, None] & (dv < VALUE_SIZE)[None, :]
            tl.store(sums + part.to(tl.int64)[:, None] * VALUE_SIZE + dv[None, :], accumulator, sum_mask)
            return
    result = accumulator / tl.where(total == 0.0, 1.0, total)[:, None]
    output_offset = (row.to(tl.int64) * HEADS + head) * VALUE_SIZE
    output_mask = row_mask[:, None] & (dv < VALUE_SIZE)[None, :]
    tl.store(output + output_offset[:, None] + dv[None, :], result.to(output.dtype.element_ty), output_mask)
