"""Selections of keys in Triton, for CUDA and ROCm: score the index keys, select the best, attend to the selected ones.

Legend
    row        a token of the step; a program finds its request by bisection of cu_seqlens_q
    BLOCK_H    heads, padded to a power of two of at least 16, as tl.dot needs; heads of one key head together
    BLOCK_N    keys of one iteration
    BLOCK_SIZE 0: no pool, the keys are the request's own rows of this step
    ranks      [T, width] int64: of each visible key its score, as an integer of the same order, over the complement of
               its position, so that of equal scores those of smaller positions are higher; of other keys less than all
    width      keys that a row may have: what the block table has room for, or all rows of the step

The ranks are sorted by torch (`topk`), whose choice among them is certain, because no two of them are equal. They take
8 bytes for each row and key: of a long prompt far from its start that would be gigabytes, so that rows take turns in
`RANK_BYTES`. Their speed has not been measured on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from selective_compile.kernels.dot_triton import widened_dot
from selective_compile.kernels.fp8_triton import as_read
from selective_compile.kernels.interpreter import on_device
from selective_compile.kernels.key_write_triton import write_keys
from selective_compile.kernels.registers import backend, warps
from selective_compile.kernels.request_rows_triton import request_of

_NOTHING = -(2**63)
# A decode step of 256 requests with contexts of 32k in one turn. Sorting takes a few times as much.
RANK_BYTES = 64 * 2**20
# Sinks and slopes [H], and of pools of e4m3 the scales of keys and of values [K].
PerHead = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


@triton.jit(
    do_not_specialize=["num_requests", "table_stride", "width", "first_row"],
    do_not_specialize_on_alignment=["cu_seqlens_q", "context_lens", "block_table"],
)
def _rank_kernel(
    ranks,  # [rows from first_row on, width] int64, filled with the least number
    query,  # [T, H, D]
    weights,  # [T, H] float32
    keys,  # [num_blocks, K, BLOCK_SIZE, D]; without a pool [T, K, D]
    cu_seqlens_q,  # [N + 1]
    context_lens,  # [N]; without a pool not read
    block_table,  # [N, max_blocks]; without a pool not read
    num_requests,
    query_row_stride,
    query_head_stride,
    key_block_stride,
    key_head_stride,
    key_slot_stride,
    table_stride,
    width,
    first_row,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDEN: tl.constexpr,
):
    row = first_row + tl.program_id(0)
    start = tl.program_id(1) * BLOCK_N
    request = request_of(cu_seqlens_q, num_requests, row, 0)
    if request >= num_requests:
        return
    row_begin = tl.load(cu_seqlens_q + request)
    row_end = tl.load(cu_seqlens_q + request + 1)
    if BLOCK_SIZE > 0:
        position = tl.load(context_lens + request) - row_end + row
    else:
        position = row - row_begin
    if start > position:
        return
    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    j = start + tl.arange(0, BLOCK_N)
    seen = j <= position
    if BLOCK_SIZE > 0:
        entry = block_table + request.to(tl.int64) * table_stride + j // BLOCK_SIZE
        block = tl.load(entry, mask=seen, other=0).to(tl.int64)
        slot = j % BLOCK_SIZE
    else:
        block = (row_begin + j).to(tl.int64)
        slot = j * 0
    key_offset = block * key_block_stride + slot * key_slot_stride
    total = tl.full([BLOCK_N], 0.0, tl.float32)
    for kv_head in range(KV_HEADS):
        head = kv_head * GROUP + h
        query_offset = row.to(tl.int64) * query_row_stride + head * query_head_stride
        q = tl.load(query + query_offset[:, None] + d[None, :], (h < GROUP)[:, None] & (d < KEY_SIZE)[None, :], 0.0)
        w = tl.load(weights + row.to(tl.int64) * (GROUP * KV_HEADS) + head, h < GROUP, 0.0)
        where = key_offset[None, :] + kv_head * key_head_stride + d[:, None]
        k = tl.load(keys + where, seen[None, :] & (d < KEY_SIZE)[:, None], 0.0)
        overlap = widened_dot(q, k, tl.full([BLOCK_H, BLOCK_N], 0.0, tl.float32), WIDEN) * SCALE
        rectified = tl.where(overlap < 0.0, 0.0, overlap)  # a NaN stays one
        total += tl.reduce(rectified * w[:, None], 0, tl.standard._sum_combine)
    total = tl.where(total == 0.0, 0.0, total)  # both zeros are one
    bits = total.to(tl.int32, bitcast=True)
    # Of negative numbers, the larger bits are those of the smaller number.
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = tl.where(total != total, 0x7FFFFFFF, ordered)
    rank = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - j).to(tl.int64)
    tl.store(ranks + tl.program_id(0).to(tl.int64) * width + j, rank, seen)


@triton.jit(
    do_not_specialize=["num_requests", "table_stride"],
    do_not_specialize_on_alignment=[
        *("cu_seqlens_q", "context_lens", "block_table", "selection", "sinks", "slopes", "key_scales", "value_scales")
    ],
)
def _selected_kernel(
    output,  # [T, H, Dv] contiguous, zeros
    query,  # [T, H, D]
    keys,  # [num_blocks, K, BLOCK_SIZE, D]; without a pool [T, K, D]
    values,  # [num_blocks, K, BLOCK_SIZE, Dv]; without a pool [T, K, Dv]
    selection,  # [T, COUNT]
    cu_seqlens_q,  # [N + 1]
    context_lens,  # [N]; without a pool not read
    block_table,  # [N, max_blocks]; without a pool not read
    sinks,  # [H] or None
    slopes,  # [H] or None
    key_scales,  # [K] with pools of e4m3, else None
    value_scales,  # [K] or None
    num_requests,
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
    SOFTCAP: tl.constexpr,
    COUNT: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    WIDEN: tl.constexpr,
):
    LOG2_E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    request = request_of(cu_seqlens_q, num_requests, row, 0)
    if request >= num_requests:
        return
    row_begin = tl.load(cu_seqlens_q + request)
    row_end = tl.load(cu_seqlens_q + request + 1)
    if BLOCK_SIZE > 0:
        position = tl.load(context_lens + request) - row_end + row
    else:
        position = row - row_begin
    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    head = kv_head * GROUP + h
    query_offset = row.to(tl.int64) * query_row_stride + head * query_head_stride
    q = tl.load(query + query_offset[:, None] + d[None, :], (h < GROUP)[:, None] & (d < KEY_SIZE)[None, :], 0.0)
    if sinks is None:
        maximum = tl.full([BLOCK_H], float("-inf"), tl.float32)
        total = tl.full([BLOCK_H], 0.0, tl.float32)
    else:
        # One more key of weight 1, which no value goes with.
        maximum = tl.load(sinks + head, h < GROUP, 0.0).to(tl.float32) * LOG2_E
        total = tl.full([BLOCK_H], 1.0, tl.float32)
    if slopes is not None:
        slope = tl.load(slopes + head, h < GROUP, 0.0) * LOG2_E
    scale = SCALE * LOG2_E
    if key_scales is not None:
        scale = scale * tl.load(key_scales + kv_head)
    accumulator = tl.full([BLOCK_H, BLOCK_DV], 0.0, tl.float32)
    # The selected positions come first: no row has more of them than it has keys.
    for start in range(0, tl.minimum(position + 1, COUNT), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        j = tl.load(selection + row.to(tl.int64) * COUNT + n, n < COUNT, -1)
        seen = (j >= 0) & (j <= position)
        if BLOCK_SIZE > 0:
            entry = block_table + request.to(tl.int64) * table_stride + j // BLOCK_SIZE
            block = tl.load(entry, mask=seen, other=0).to(tl.int64)
            slot = j % BLOCK_SIZE
        else:
            block = (row_begin + j).to(tl.int64)
            slot = j * 0
        key_offset = block * key_block_stride + kv_head.to(tl.int64) * key_head_stride + slot * key_slot_stride
        k = tl.load(keys + key_offset[None, :] + d[:, None], seen[None, :] & (d < KEY_SIZE)[:, None], 0.0)
        score = widened_dot(q, as_read(k, q), tl.full([BLOCK_H, BLOCK_N], 0.0, tl.float32), WIDEN)
        if SOFTCAP > 0:
            # tanh(x) = 1 - 2 / (1 + exp(2x)) has the right limit where the exponential overflows to inf.
            exponential = tl.exp2(score * (scale * (2 / SOFTCAP)))
            score = (SOFTCAP * LOG2_E) * (1.0 - 2.0 / (1.0 + exponential))
        else:
            score = score * scale
        if slopes is not None:
            score += slope[:, None] * (j - position)[None, :].to(tl.float32)
        score = tl.where(seen[None, :], score, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.reduce(score, 1, tl.standard._elementwise_max))
        # A row that has seen no key yet has the maximum -inf, and -inf - -inf is NaN.
        finite_maximum = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        correction = tl.exp2(maximum - finite_maximum)
        weight = tl.exp2(score - finite_maximum[:, None])
        total = total * correction + tl.reduce(weight, 1, tl.standard._sum_combine)
        value_offset = block * value_block_stride + kv_head.to(tl.int64) * value_head_stride + slot * value_slot_stride
        value_mask = seen[:, None] & (dv < VALUE_SIZE)[None, :]
        v = as_read(tl.load(values + value_offset[:, None] + dv[None, :], value_mask, 0.0), q)
        accumulator = widened_dot(weight.to(v.dtype), v, accumulator * correction[:, None], WIDEN)
        maximum = new_maximum
    if value_scales is not None:
        accumulator *= tl.load(value_scales + kv_head)
    result = accumulator / tl.where(total == 0.0, 1.0, total)[:, None]
    output_offset = (row.to(tl.int64) * HEADS + head) * VALUE_SIZE
    output_mask = (h < GROUP)[:, None] & (dv < VALUE_SIZE)[None, :]
    tl.store(output + output_offset[:, None] + dv[None, :], result.to(output.dtype.element_ty), output_mask)


def ragged_top_keys(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    key_pool: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    scale: float,
    count: int,
) -> Tensor:
    """`selective::ragged_top_keys`: write into the pool, score, then sort. Returns [T, count] int32."""
    write_keys(key, key_pool, slot_mapping)
    metadata = (cu_seqlens_q, context_lens, block_table)
    width = block_table.shape[1] * key_pool.shape[2]
    return _select(query, weights, key_pool, metadata, key_pool.stride()[:3], key_pool.shape[1:3], width, scale, count)


def varlen_top_keys(
    query: Tensor, key: Tensor, weights: Tensor, cu_seqlens_q: Tensor, scale: float, count: int
) -> Tensor:
    """`selective::varlen_top_keys`: the rows of `key` are read where they are. Returns [T, count] int32."""
    metadata, strides = (cu_seqlens_q, cu_seqlens_q, cu_seqlens_q), (*key.stride()[:2], 0)
    return _select(query, weights, key, metadata, strides, (key.shape[1], 0), key.shape[0], scale, count)


def _select(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    metadata: tuple[Tensor, Tensor, Tensor],
    strides: tuple[int, ...],
    kv_heads_and_block_size: tuple[int, ...],
    width: int,
    scale: float,
    count: int,
) -> Tensor:
    (num_rows, heads, size), (kv_heads, block_size) = query.shape, kv_heads_and_block_size
    assert query.stride(-1) == keys.stride(-1) == 1, "rows must be contiguous"
    selection = torch.full((num_rows, count), -1, dtype=torch.int32, device=query.device)
    if num_rows == 0 or width == 0:
        return selection
    weights = weights.to(torch.float32).contiguous()
    turn = min(num_rows, max(1, RANK_BYTES // (8 * width)))
    ranks = torch.empty((turn, width), dtype=torch.int64, device=query.device)
    group = heads // kv_heads
    block_h, block_n, block_d, num_warps = block_sizes(group, size, query.element_size())
    for first in range(0, num_rows, turn):
        rows = min(turn, num_rows - first)
        ranks.fill_(_NOTHING)
        # fmt: off
        on_device(_rank_kernel, query)[(rows, triton.cdiv(width, block_n))](
            ranks, query, weights, keys, *metadata, metadata[0].shape[0] - 1, *query.stride()[:2], *strides,
            metadata[2].stride(0), width, first, scale, group, kv_heads, size, block_size, block_h, block_n, block_d,
            not query.is_cuda, **warps(num_warps, backend()), enable_fp_fusion=True,
        )
        # fmt: on
        best = ranks[:rows].topk(min(count, width), dim=-1).values
        positions = torch.where(best == _NOTHING, width, 0x7FFFFFFF - (best & 0xFFFFFFFF)).sort(dim=-1).values
        selection[first : first + rows, : positions.shape[1]] = torch.where(positions == width, -1, positions)
    return selection


def ragged_selected_attention(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    metadata: tuple[Tensor, Tensor, Tensor],
    score: tuple[float, float],
    per_head: PerHead,
    selection: Tensor,
) -> Tensor:
    """`selective::ragged_attention` with a selection, once the pools are written. Returns [T, H, Dv]."""
    strides = (*key_pool.stride()[:3], *value_pool.stride()[:3])
    sizes = (key_pool.shape[1], key_pool.shape[2])
    return _attend(query, (key_pool, value_pool), metadata, strides, sizes, score, per_head, selection)


def varlen_selected_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    score: tuple[float, float],
    sinks: Tensor | None,
    slopes: Tensor | None,
    selection: Tensor,
) -> Tensor:
    """`selective::varlen_attention` with a selection. Returns [T, H, Dv]."""
    strides, metadata = (*key.stride()[:2], 0, *value.stride()[:2], 0), (cu_seqlens_q,) * 3
    per_head = (sinks, slopes, None, None)
    return _attend(query, (key, value), metadata, strides, (key.shape[1], 0), score, per_head, selection)


def _attend(
    query: Tensor,
    keys_and_values: tuple[Tensor, Tensor],
    metadata: tuple[Tensor, Tensor, Tensor],
    strides: tuple[int, ...],
    kv_heads_and_block_size: tuple[int, int],
    score: tuple[float, float],
    per_head: PerHead,
    selection: Tensor,
) -> Tensor:
    keys, values = keys_and_values
    (num_rows, heads, size), value_size = query.shape, values.shape[-1]
    kv_heads, block_size = kv_heads_and_block_size
    assert all(tensor.stride(-1) == 1 for tensor in (query, keys, values)), "rows must be contiguous"
    assert all(tensor is None or tensor.is_contiguous() for tensor in per_head), "heads must be contiguous"
    output = query.new_zeros(num_rows, heads, value_size)
    if num_rows == 0:
        return output
    group = heads // kv_heads
    block_h, block_n, block_d, num_warps = block_sizes(group, max(size, value_size), query.element_size())
    block_dv = max(16, triton.next_power_of_2(value_size))
    # fmt: off
    on_device(_selected_kernel, query)[(num_rows, kv_heads)](
        output, query, keys, values, selection.contiguous(), *metadata, *per_head, metadata[0].shape[0] - 1,
        *query.stride()[:2], *strides, metadata[2].stride(0), *score, selection.shape[1], group, heads, size,
        value_size, block_size, block_h, block_n, block_d, block_dv, not query.is_cuda,
        **warps(num_warps, backend()), enable_fp_fusion=True,
    )
    # fmt: on
    return output


def block_sizes(group: int, size: int, bytes_per_element: int) -> tuple[int, int, int, int]:
    """BLOCK_H, BLOCK_N, BLOCK_D and warps: tl.dot needs 16 in every direction.

    A float32 product holds its operands in registers: more warps have more of them.
    """
    block_h, block_d = max(16, triton.next_power_of_2(group)), max(16, triton.next_power_of_2(size))
    wide = bytes_per_element == 4
    return block_h, 16 if wide or block_d > 128 else 32, block_d, 8 if wide else 4
