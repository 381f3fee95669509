"""Attention to latents in Triton, for CUDA and ROCm: the rows of a pool are keys, and in their first columns values.

Legend
    row        of the pool: the latent, VALUE_SIZE numbers, and behind it REST_SIZE numbers more that only keys have
    tile       work of one program: BLOCK_Q rows of one request, BLOCK_H heads
    BLOCK_M    rows of the query matrix, BLOCK_Q * BLOCK_H: row m is row m // BLOCK_H of the tile, head m % BLOCK_H
    BLOCK_N    keys of one iteration, BLOCK_SIZE slots of a block; any relation between them is allowed
    BLOCK_R, BLOCK_E  the latent and the rest, padded to powers of two
    split, sums, maxima, totals, SPLIT, PDL, and the grid: as in `ragged_attention_kernel_triton`

A latent is loaded once for both products, and the rest of the row is a product of its own: as one vector, 576 numbers
would be padded to 1024. Which steps have which tile is said in `latent_attention_tiles`.

Where a tile is a bulk copy, the copies are of the clear iterations alone: slots behind the context hold anything, and
to put zeros into what has been copied takes registers. A bulk copy's numbers behind the latent are the rest of a row,
of which the query has zeros and which are not stored.

With a selection of keys, a tile is one row, and its keys are those selected for it; they are not split.

With ALiBi, softcap, chunks or a prefix, which no model with latents has so far, the kernels for ordinary keys and
values attend, the heads of each tile to a copy of the one key/value head that takes no memory; keys are split there,
too.

None of it has been timed on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from selective_compile.kernels import selection_triton
from selective_compile.kernels.dependent_launch import begins_early, launch_options
from selective_compile.kernels.dot_triton import widened_dot
from selective_compile.kernels.fp8_triton import as_read
from selective_compile.kernels.interpreter import on_device
from selective_compile.kernels.key_write_triton import write_keys
from selective_compile.kernels.latent_attention_tiles import LEAST, LatentTile, latent_tile
from selective_compile.kernels.ragged_attention_attend_triton import aligned, attend, described
from selective_compile.kernels.ragged_attention_cut_triton import Cut
from selective_compile.kernels.ragged_attention_reads_triton import blocks_of_keys, elements
from selective_compile.kernels.ragged_attention_tiles import (
    WHOLE,
    bulk_copies,
    most_keys,
    processors,
    shared_memory,
    split_config,
)
from selective_compile.kernels.registers import backend
from selective_compile.kernels.request_rows_triton import tile_rows
from selective_compile.kernels.split_plan_triton import first_key, piece_keys, piece_of


@triton.jit(
    do_not_specialize=["num_rows", "num_requests", "table_stride", "num_pieces"],
    do_not_specialize_on_alignment=[
        *("cu_seqlens_q", "context_lens", "block_table", "sinks", "selection", "key_scales")
    ],
)
def _latent_kernel(
    output,  # [T, H, VALUE_SIZE] contiguous
    pieces,  # [7, num_pieces] int32 of `SplitPlan`; without splits None
    sums,  # [places, H, BLOCK_Q, VALUE_SIZE] float32; without splits None
    maxima,  # [places, H, BLOCK_Q] float32; without splits None
    totals,  # [places, H, BLOCK_Q] float32; without splits None
    query,  # [T, H, VALUE_SIZE + REST_SIZE]
    rows,  # [num_blocks, 1, BLOCK_SIZE, VALUE_SIZE + REST_SIZE]
    latent_tiles,  # the pool as a descriptor of tiles [1, 1, BLOCK_N, BLOCK_R], or None
    rest_tiles,  # the pool as one of tiles [1, 1, BLOCK_N, BLOCK_E], or None
    cu_seqlens_q,  # [N + 1]
    context_lens,  # [N]
    block_table,  # [N, max_blocks]
    sinks,  # [H] or None
    selection,  # [T, COUNT] or None; BLOCK_Q is 1 then
    key_scales,  # [1] with a pool of e4m3, else None
    num_rows,
    num_requests,
    num_pieces,
    query_row_stride,
    query_head_stride,
    block_stride,
    slot_stride,
    table_stride,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    COUNT: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    REST_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    WIDEN: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    BLOCK_M: tl.constexpr = BLOCK_Q * BLOCK_H
    LOG2_E: tl.constexpr = 1.4426950408889634
    # Whether scores are multiplied behind the maximum over them, which is then one product a row.
    FOLDED: tl.constexpr = SCALE > 0
    # Whether clear iterations are walked by themselves. Of keys that are selected none is clear; in float32 products
    # take so long that comparing adds little, and on gfx942 a second loop spills.
    APART: tl.constexpr = (selection is None) and query.dtype.element_ty.primitive_bitwidth < 32
    PROGRAMS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H  # of a piece
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    number = tl.program_id(0) // PROGRAMS
    if SPLIT:
        request, first_row, row_end, context, split, each_has, place = piece_of(pieces, num_pieces, number)
    else:
        number = num_pieces - 1 - number
        request, _, row_end, first_row = tile_rows(cu_seqlens_q, num_requests, num_rows, number, BLOCK_Q)
        context = tl.load(context_lens + request, mask=request < num_requests, other=0)
    if first_row >= row_end:
        return

    m = tl.arange(0, BLOCK_M)
    row = first_row + m // BLOCK_H
    head = tl.program_id(0) % PROGRAMS * BLOCK_H + m % BLOCK_H
    row_mask = (row < row_end) & (head < HEADS)
    position = context - row_end + row
    r = tl.arange(0, BLOCK_R)
    query_offset = row.to(tl.int64) * query_row_stride + head * query_head_stride
    q = tl.load(query + query_offset[:, None] + r[None, :], row_mask[:, None] & (r < VALUE_SIZE)[None, :], 0.0)
    if REST_SIZE > 0:
        e = tl.arange(0, BLOCK_E)
        rest_mask = row_mask[:, None] & (e < REST_SIZE)[None, :]
        q_rest = tl.load(query + query_offset[:, None] + VALUE_SIZE + e[None, :], rest_mask, 0.0)

    # Keys outside [key_begin, key_end) are seen by no row of the tile, and are not read.
    key_end = context - row_end + tl.minimum(first_row + BLOCK_Q, row_end)
    key_begin = first_key(context - row_end + first_row, WINDOW, 0)
    begin = key_begin // BLOCK_N * BLOCK_N
    end = key_end
    if selection is not None:
        # The selected positions come first: no row has more of them than it has keys.
        end = tl.minimum(key_end, COUNT)
    if SPLIT:
        begin, end, divided = piece_keys(split, each_has, begin, end)
        if (begin >= end) & (split > 0):
            return

    if sinks is None:
        maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.full([BLOCK_M], 0.0, tl.float32)
    else:
        # One more key of weight 1, which no value goes with.
        maximum = tl.load(sinks + head, head < HEADS, 0.0).to(tl.float32) * LOG2_E
        total = tl.full([BLOCK_M], 1.0, tl.float32)
        if SPLIT:
            maximum = tl.where(split == 0, maximum, float("-inf"))
            total = tl.where(split == 0, total, 0.0)
    scale = SCALE * LOG2_E
    if key_scales is not None:
        scale = scale * tl.load(key_scales)
    accumulator = tl.full([BLOCK_M, BLOCK_R], 0.0, tl.float32)

    # Clear from where the last row's window begins up to the position of the first row, in whole iterations. The masked
    # ones in front of these and behind them are walked first, in one loop.
    clear_begin = begin
    if (WINDOW > 0) and APART:
        clear_begin = (tl.maximum(key_begin, key_end - WINDOW) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        clear_begin = tl.minimum(tl.maximum(clear_begin, begin), end)
    clear_end = clear_begin
    if APART:
        clear_end = (context - row_end + first_row + 1) // BLOCK_N * BLOCK_N
        clear_end = tl.minimum(tl.maximum(clear_end, clear_begin), end)
    steps_in_front = (clear_begin - begin + BLOCK_N - 1) // BLOCK_N
    masked_steps = steps_in_front + (end - clear_end + BLOCK_N - 1) // BLOCK_N
    for MASKED in tl.static_range(1, -1 if APART else 0, -1):
        steps = masked_steps if MASKED else (clear_end - clear_begin) // BLOCK_N
        # Of the few masked iterations no load is begun early, as in `ragged_attention_kernel_triton`.
        for step in tl.range(0, steps, num_stages=1 if MASKED and APART else None):
            if MASKED:
                start = begin + step * BLOCK_N + tl.where(step < steps_in_front, 0, clear_end - clear_begin)
            else:
                start = clear_begin + step * BLOCK_N
            j = start + tl.arange(0, BLOCK_N)
            if selection is not None:
                j = tl.load(selection + first_row.to(tl.int64) * COUNT + j, j < COUNT, -1)
            read = (j >= key_begin) & (j < key_end)
            entries = block_table + request.to(tl.int64) * table_stride
            if selection is None:
                block = blocks_of_keys(entries, start, read, BLOCK_SIZE, BLOCK_N, MASKED).to(tl.int64)
            else:
                block = tl.load(entries + j // BLOCK_SIZE, mask=read, other=0).to(tl.int64)
            offset = block * block_stride + j % BLOCK_SIZE * slot_stride
            # Slots behind the context hold anything, and no weight makes a NaN 0.
            if MASKED or latent_tiles is None:
                latent = as_read(elements(rows + offset, read, VALUE_SIZE, BLOCK_R, MASKED), q)
            else:
                latent = latent_tiles.load([block.to(tl.int32), 0, start % BLOCK_SIZE, 0]).reshape([BLOCK_N, BLOCK_R])
                latent = as_read(latent, q)
            BULK: tl.constexpr = latent_tiles is not None and not MASKED
            score = widened_dot(q, tl.trans(latent), tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32), WIDEN, BULK)
            if REST_SIZE > 0:
                if MASKED or rest_tiles is None:
                    rest = elements(rows + offset + VALUE_SIZE, read, REST_SIZE, BLOCK_E, MASKED)
                else:
                    at = [block.to(tl.int32), 0, start % BLOCK_SIZE, VALUE_SIZE]
                    rest = rest_tiles.load(at).reshape([BLOCK_N, BLOCK_E])
                score = widened_dot(q_rest, tl.trans(as_read(rest, q)), score, WIDEN, BULK)
            if not FOLDED:
                score = score * scale
            if MASKED:
                seen = read[None, :] & (j[None, :] <= position[:, None])
                if WINDOW > 0:
                    seen = seen & (j[None, :] > position[:, None] - WINDOW)
                score = tl.where(seen, score, float("-inf"))

            largest = tl.reduce(score, 1, tl.standard._elementwise_max)
            new_maximum = tl.maximum(maximum, largest * scale if FOLDED else largest)
            # A row that has seen no key yet has the maximum -inf, and -inf - -inf is NaN.
            finite_maximum = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            correction = tl.exp2(maximum - finite_maximum)
            weight = tl.exp2((score * scale if FOLDED else score) - finite_maximum[:, None])
            total = total * correction + tl.reduce(weight, 1, tl.standard._sum_combine)
            accumulator = widened_dot(weight.to(latent.dtype), latent, accumulator * correction[:, None], WIDEN, BULK)
            maximum = new_maximum

    if key_scales is not None:
        accumulator *= tl.load(key_scales)
    value_mask = row_mask[:, None] & (r < VALUE_SIZE)[None, :]
    if SPLIT:
        if divided:
            part = (place * HEADS + head) * BLOCK_Q + row - first_row
            tl.store(maxima + part, maximum, row_mask)
            tl.store(totals + part, total, row_mask)
            tl.store(sums + part.to(tl.int64)[:, None] * VALUE_SIZE + r[None, :], accumulator, value_mask)
            return
    result = accumulator / tl.where(total == 0.0, 1.0, total)[:, None]
    output_offset = (row.to(tl.int64) * HEADS + head) * VALUE_SIZE
    tl.store(output + output_offset[:, None] + r[None, :], result.to(output.dtype.element_ty), value_mask)


def latent_attention(
    query: Tensor,
    key: Tensor,
    key_pool: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    value_size: int,
    scale: float,
    window: int,
    softcap: float,
    chunk: int = 0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    selection: Tensor | None = None,
    key_scales: Tensor | None = None,
    prefix: int = 0,
) -> Tensor:
    """`selective::latent_attention`: one launch writes into the pool, others attend. Returns [T, H, value_size].

    Raises:
        ValueError: the pool is int8, which only the CPU's kernel reads.
    """
    if key_pool.dtype is torch.int8:
        raise ValueError(f"the pool must be {query.dtype} for Triton's kernels, got torch.int8")
    if selection is not None and (window or chunk):
        raise ValueError(f"window and chunk must be 0 with a selection, got {window} and {chunk}")
    if selection is not None and prefix:
        raise ValueError(f"prefix must be 0 with a selection, got {prefix}")

    def written() -> Tensor:
        write_keys(key, key_pool, slot_mapping, key_scales)
        return query

    metadata = (cu_seqlens_q, context_lens, block_table)
    if not softcap and not chunk and not prefix and slopes is None:
        written()
        return _attend(query, key_pool, metadata, (sinks, selection, key_scales), value_size, scale, window)
    copies = query.shape[1] // _group(query.shape[1])
    keys, values = (pool.expand(-1, copies, -1, -1) for pool in (key_pool, key_pool[..., :value_size]))
    scales = None if key_scales is None else key_scales.repeat(copies)
    per_head = (sinks, slopes, scales, scales)
    if selection is not None:
        options = ((scale, softcap), per_head, selection)
        return selection_triton.ragged_selected_attention(written(), keys, values, metadata, *options)
    strides, sizes = (*keys.stride()[:3], *values.stride()[:3]), (copies, key_pool.shape[2])
    score = (scale, window, softcap, chunk, prefix)
    return attend(query, (keys, values), metadata, per_head, strides, sizes, score, written=written)


def _group(heads: int) -> int:
    """As many heads as a tile of the ordinary kernel has rows at least, or fewer that they can be divided into."""
    return max(count for count in range(1, LEAST + 1) if heads % count == 0)


def _attend(
    query: Tensor,
    pool: Tensor,
    metadata: tuple[Tensor, Tensor, Tensor],
    given: tuple[Tensor | None, Tensor | None, Tensor | None],
    value_size: int,
    scale: float,
    window: int,
) -> Tensor:
    (num_rows, heads, size), block_size = query.shape, pool.shape[2]
    sinks, selection, key_scales = given
    block_table, num_requests = metadata[2], metadata[1].shape[0]
    assert query.stride(-1) == pool.stride(-1) == 1, "rows must be contiguous"
    assert sinks is None or sinks.is_contiguous(), "heads must be contiguous"
    block_r, block_e = (max(LEAST, triton.next_power_of_2(each)) for each in (value_size, size - value_size))
    tile = latent_tile(
        num_rows=num_rows,
        num_requests=num_requests,
        heads=heads,
        width=block_r + block_e,
        bytes_per_element=query.element_size(),
        block_size=block_size,
        window=window,
        narrow=pool.element_size() < query.element_size(),
        selected=selection is not None,
        shared_memory=shared_memory(query.device),
        bulk=bulk_copies(query.device) and aligned(pool) and value_size * pool.itemsize % 16 == 0,
        backend=backend(),
    )
    block_q, block_h, block_n = tile.block_q, tile.block_h, tile.block_n
    selection = None if selection is None else selection.contiguous()
    blocks_of_heads = triton.cdiv(heads, block_h)
    keys = most_keys(rows=block_q, window=window, chunk=0, block_n=block_n)
    splits = split_config(parts=blocks_of_heads, keys=keys, large=tile.large, processors=processors(query.device))
    splits, sizes = splits if selection is None else WHOLE, (block_q, block_n)
    cut = Cut.of(query, metadata[:2], splits, value_size=value_size, rows_and_keys=sizes, window=window)
    output = query.new_empty(num_rows, heads, value_size)
    early = begins_early(query.device)
    # fmt: off
    on_device(_latent_kernel, query)[(cut.num_pieces * blocks_of_heads,)](
        output, *cut.given, query, pool,
        *_tiles(pool, tile, block_r, block_e, rest=size > value_size), *metadata, sinks, selection, key_scales,
        num_rows, num_requests, cut.num_pieces, *query.stride()[:2],
        pool.stride(0), pool.stride(2), block_table.stride(0), scale, window,
        0 if selection is None else selection.shape[1], heads, value_size, size - value_size, block_size,
        block_q, block_h, block_n, block_r, block_e,
        # The interpreter would multiply the bit patterns of bfloat16.
        not query.is_cuda, cut.split is not None, early, enable_fp_fusion=True,
        **tile.options(backend()), **launch_options(early),
    )
    # fmt: on
    cut.merge(output, num_requests=num_requests)
    return output


def _tiles(
    pool: Tensor, tile: LatentTile, block_r: int, block_e: int, *, rest: bool
) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """Of bulk copies: of latents, and of what is behind them where there is something."""
    if not tile.bulk:
        return None, None
    latents, others = (described(pool, [1, 1, tile.block_n, width]) for width in (block_r, block_e))
    return latents, others if rest else None
