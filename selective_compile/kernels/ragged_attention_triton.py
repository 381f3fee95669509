"""Ragged attention in Triton, for CUDA and ROCm: prefill, decode and mixed steps in one launch.

Legend
    tile       work of one program of the attention kernel: BLOCK_Q rows of one request, one key/value head
    BLOCK_Q    rows of a tile, BLOCK_M // GROUP
    BLOCK_M    rows of the query matrix: row m is row m // GROUP of the tile and head m % GROUP of the group.
               Packing the heads that share a key/value head lets a decode row feed the matrix units too
    BLOCK_N    keys of one iteration; any relation to BLOCK_SIZE, the slots of a block, is allowed
    BLOCK_SIZE 0: no pool, the keys are the request's own rows of this step (varlen_attention)
    sinks, slopes None: the code that reads them is not compiled

The grid is an upper bound that depends on T and N only, never on lengths, which stay on the device: request
n gets the tiles from cu_seqlens_q[n] // BLOCK_Q + n up to those of request n + 1. They are enough, and at
most one too many, because floor(b / q) - floor(a / q) + 1 >= ceil((b - a) / q). A program finds its request
by bisection. The padding rows behind the last request are a request N of context 0, whose result is 0.

The scores are kept in base 2 (the scale times log2(e)): exp2 is what the hardware has.

The tile sizes are bounded by registers and shared memory: `tests/kernels` compiles them for sm_80, sm_90,
sm_100 and gfx942 and fails on a spill. Their speed has not been measured on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from selective_compile.kernels.interpreter import interpreted


@triton.jit
def _dot(a, b, accumulator, WIDEN: tl.constexpr):
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    # "ieee": a float32 product is not rounded to TF32. It has no effect on bfloat16 and float16.
    return tl.dot(a, b, accumulator, input_precision="ieee")


# What changes from step to step must not change the compiled kernel: N and T are not specialised on 1 and
# on multiples of 16, nor are the metadata tensors on their alignment (they may be slices of one buffer).
@triton.jit(
    do_not_specialize=["num_rows", "num_requests", "table_stride"],
    do_not_specialize_on_alignment=["cu_seqlens_q", "context_lens", "block_table", "sinks", "slopes"],
)
def _attention_kernel(
    output,  # [T, H, Dv] contiguous
    query,  # [T, H, D]
    keys,  # [num_blocks, K, BLOCK_SIZE, D]; without a pool [T, K, D]
    values,  # [num_blocks, K, BLOCK_SIZE, Dv]; without a pool [T, K, Dv]
    cu_seqlens_q,  # [N + 1]
    context_lens,  # [N]; without a pool not read
    block_table,  # [N, max_blocks]; without a pool not read
    sinks,  # [H] or None
    slopes,  # [H] or None
    num_rows,
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
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    WIDEN: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    LOG2_E: tl.constexpr = 1.4426950408889634
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)

    low = num_requests * 0
    high = num_requests
    while low < high:
        middle = (low + high + 1) // 2
        starts_later = tl.load(cu_seqlens_q + middle) // BLOCK_Q + middle > tile
        high = tl.where(starts_later, middle - 1, high)
        low = tl.where(starts_later, low, middle)
    request = low
    real = request < num_requests
    row_begin = tl.load(cu_seqlens_q + request)
    row_end = tl.load(cu_seqlens_q + request + 1, mask=real, other=num_rows)
    first_row = row_begin + (tile - row_begin // BLOCK_Q - request) * BLOCK_Q
    if first_row >= row_end:
        return
    if BLOCK_SIZE > 0:
        context = tl.load(context_lens + request, mask=real, other=0)
    else:
        context = tl.where(real, row_end - row_begin, 0)

    m = tl.arange(0, BLOCK_M)
    row = first_row + m // GROUP
    head = kv_head * GROUP + m % GROUP
    row_mask = (m < BLOCK_Q * GROUP) & (row < row_end)
    position = context - row_end + row
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    query_offset = row.to(tl.int64) * query_row_stride + head * query_head_stride
    q = tl.load(query + query_offset[:, None] + d[None, :], row_mask[:, None] & (d < KEY_SIZE)[None, :], 0.0)

    # Keys outside [key_begin, key_end) are seen by no row of the tile. They are not read: slots behind the
    # context hold anything, and blocks in front of what the first row sees may belong to another request.
    key_end = context - row_end + tl.minimum(first_row + BLOCK_Q, row_end)
    first_position = context - row_end + first_row
    key_begin = num_rows * 0
    if WINDOW > 0:
        key_begin = tl.maximum(key_begin, first_position - WINDOW + 1)
    if CHUNK > 0:
        key_begin = tl.maximum(key_begin, first_position // CHUNK * CHUNK)
        last_chunk = (key_end - 1) // CHUNK * CHUNK

    key_head_offset = kv_head.to(tl.int64) * key_head_stride
    value_head_offset = kv_head.to(tl.int64) * value_head_stride
    if sinks is None:
        maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.full([BLOCK_M], 0.0, tl.float32)
    else:
        # One more key of weight 1, which no value goes with.
        maximum = tl.load(sinks + head).to(tl.float32) * LOG2_E
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    if slopes is not None:
        slope = tl.load(slopes + head) * LOG2_E
    accumulator = tl.full([BLOCK_M, BLOCK_DV], 0.0, tl.float32)
    for start in range(key_begin // BLOCK_N * BLOCK_N, key_end, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        read = (j >= key_begin) & (j < key_end)
        if BLOCK_SIZE > 0:
            entry = block_table + request.to(tl.int64) * table_stride + j // BLOCK_SIZE
            block = tl.load(entry, mask=read, other=0).to(tl.int64)
            slot = j % BLOCK_SIZE
        else:
            block = (row_begin + j).to(tl.int64)
            slot = j * 0
        key_offset = block * key_block_stride + key_head_offset + slot * key_slot_stride
        k = tl.load(keys + key_offset[None, :] + d[:, None], read[None, :] & (d < KEY_SIZE)[:, None], 0.0)
        score = _dot(q, k, tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32), WIDEN)
        if SOFTCAP > 0:
            # tanh(x) = 1 - 2 / (1 + exp(2x)) has the right limit where the exponential overflows to inf.
            exponential = tl.exp2(score * (2 * LOG2_E * SCALE / SOFTCAP))
            score = (SOFTCAP * LOG2_E) * (1.0 - 2.0 / (1.0 + exponential))
        else:
            score = score * (SCALE * LOG2_E)
        if slopes is not None:
            score += slope[:, None] * (j[None, :] - position[:, None]).to(tl.float32)
        seen = read[None, :] & (j[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (j[None, :] > position[:, None] - WINDOW)
        if CHUNK >= BLOCK_Q:
            # The tile meets one boundary at most, and key_begin deals with the rows in front of it. To compare
            # with a begin of every row costs registers: on sm_80 they spilled.
            seen = seen & ((j >= last_chunk)[None, :] | (position < last_chunk)[:, None])
        elif CHUNK > 0:
            seen = seen & (j[None, :] >= (position // CHUNK * CHUNK)[:, None])
        score = tl.where(seen, score, float("-inf"))

        new_maximum = tl.maximum(maximum, tl.reduce(score, 1, tl.standard._elementwise_max))
        # A row that has seen no key yet has the maximum -inf, and -inf - -inf is NaN.
        finite_maximum = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        correction = tl.exp2(maximum - finite_maximum)
        weight = tl.exp2(score - finite_maximum[:, None])
        total = total * correction + tl.reduce(weight, 1, tl.standard._sum_combine)
        value_offset = block * value_block_stride + value_head_offset + slot * value_slot_stride
        value_mask = read[:, None] & (dv < VALUE_SIZE)[None, :]
        v = tl.load(values + value_offset[:, None] + dv[None, :], value_mask, 0.0)
        accumulator = _dot(weight.to(v.dtype), v, accumulator * correction[:, None], WIDEN)
        maximum = new_maximum

    result = accumulator / tl.where(total == 0.0, 1.0, total)[:, None]
    output_offset = (row.to(tl.int64) * HEADS + head) * VALUE_SIZE
    output_mask = row_mask[:, None] & (dv < VALUE_SIZE)[None, :]
    tl.store(output + output_offset[:, None] + dv[None, :], result.to(output.dtype.element_ty), output_mask)


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _write_kernel(
    key,  # [T, K, D]
    value,  # [T, K, Dv]
    key_pool,  # [num_blocks, K, BLOCK_SIZE, D]
    value_pool,  # [num_blocks, K, BLOCK_SIZE, Dv]
    slot_mapping,  # [T]
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    key_block_stride,
    key_pool_head_stride,
    key_slot_stride,
    value_block_stride,
    value_pool_head_stride,
    value_slot_stride,
    KV_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + row)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    head = tl.arange(0, BLOCK_K)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    dv = tl.arange(0, BLOCK_DV)[None, :]
    key_mask = (head < KV_HEADS) & (d < KEY_SIZE)
    k = tl.load(key + row * key_row_stride + head * key_head_stride + d, key_mask)
    key_slot = key_pool + block * key_block_stride + offset * key_slot_stride
    tl.store(key_slot + head * key_pool_head_stride + d, k, key_mask)
    value_mask = (head < KV_HEADS) & (dv < VALUE_SIZE)
    v = tl.load(value + row * value_row_stride + head * value_head_stride + dv, value_mask)
    value_slot = value_pool + block * value_block_stride + offset * value_slot_stride
    tl.store(value_slot + head * value_pool_head_stride + dv, v, value_mask)


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """Sizes of one compiled variant of the attention kernel; block_d, block_dv are the padded head sizes."""

    block_m: int
    block_n: int
    block_d: int
    block_dv: int
    num_warps: int
    num_stages: int


def tile_config(
    *, num_rows: int, num_requests: int, group: int, key_size: int, value_size: int, bytes_per_element: int
) -> TileConfig:
    """Choose the tile from what the host knows: shapes, not lengths. Any choice is correct for any step."""
    # tl.dot needs 16 in every direction.
    block_d, block_dv = (max(16, triton.next_power_of_2(size)) for size in (key_size, value_size))
    # At two rows a request or fewer on average, most tiles hold one row: a tall tile would be mostly masked. So
    # it is in every step of a batch-invariant engine, which has a request for each row: it always has one BLOCK_N.
    rows = 1 if num_rows <= 2 * num_requests else 64 // group
    block_m = max(16, triton.next_power_of_2(max(1, rows) * group))
    # The largest tiles that compile without a register spill for every target and head sizes up to 256. A
    # float32 product runs on the vector units and holds its operands in registers, hence its smaller ones.
    wide = bytes_per_element == 4
    block_n = 16 if wide else (64 if block_m == 16 else 32)
    num_warps = 8 if block_m * block_dv >= 64 * 256 or (wide and block_m > 16) else 4
    # Two stages of key and value tiles fit into the 64 KiB of gfx942, the smallest shared memory of a target.
    block_n = max(16, min(block_n, 32768 // ((block_d + block_dv) * bytes_per_element)))
    return TileConfig(
        block_m=block_m,
        block_n=block_n,
        block_d=block_d,
        block_dv=block_dv,
        num_warps=num_warps,
        num_stages=2,
    )


def ragged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    scale: float,
    window: int,
    softcap: float,
    chunk: int = 0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    selection: Tensor | None = None,
) -> Tensor:
    """`selective::ragged_attention`: one launch writes into the pools, a second attends. [T, H, Dv].

    Raises:
        ValueError: the pools are int8, which only the CPU's kernels read.
    """
    if key_pool.dtype is torch.int8:
        raise ValueError(f"the pools must be {query.dtype} for Triton's kernels, got torch.int8")
    _write(key, value, key_pool, value_pool, slot_mapping)
    if selection is not None:
        metadata = (cu_seqlens_q, context_lens, block_table)
        options = ((scale, softcap), sinks, slopes, selection)
        return _selection(window, chunk).ragged_selected_attention(query, key_pool, value_pool, metadata, *options)
    pools, strides = (key_pool, value_pool), (*key_pool.stride()[:3], *value_pool.stride()[:3])
    tensors = (cu_seqlens_q, context_lens, block_table, sinks, slopes)
    return _attend(query, pools, tensors, strides, key_pool.shape[1:3], (scale, window, softcap, chunk))


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    scale: float,
    window: int,
    softcap: float,
    chunk: int = 0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    selection: Tensor | None = None,
) -> Tensor:
    """`selective::varlen_attention`: the rows of `key` and `value` are read where they are. [T, H, Dv]."""
    if selection is not None:
        options = ((scale, softcap), sinks, slopes, selection)
        return _selection(window, chunk).varlen_selected_attention(query, key, value, cu_seqlens_q, *options)
    strides = (*key.stride()[:2], 0, *value.stride()[:2], 0)
    tensors = (cu_seqlens_q, cu_seqlens_q, cu_seqlens_q, sinks, slopes)
    return _attend(query, (key, value), tensors, strides, (key.shape[1], 0), (scale, window, softcap, chunk))


def _selection(window: int, chunk: int) -> ModuleType:
    """The kernels that read selected keys, which are among all keys in front of a row."""
    from selective_compile.kernels import selection_triton  # which reads from here

    if window or chunk:
        raise ValueError(f"window and chunk must be 0 with a selection, got {window} and {chunk}")
    return selection_triton


def _attend(
    query: Tensor,
    keys_and_values: tuple[Tensor, Tensor],
    metadata_sinks_slopes: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    strides: tuple[int, ...],
    kv_heads_and_block_size: tuple[int, ...],
    score: tuple[float, int, float, int],
) -> Tensor:
    keys, values = keys_and_values
    kv_heads, block_size = kv_heads_and_block_size
    (num_rows, heads, key_size), value_size = query.shape, values.shape[-1]
    cu_seqlens_q, _, block_table, sinks, slopes = metadata_sinks_slopes
    num_requests, group = cu_seqlens_q.shape[0] - 1, heads // kv_heads
    assert all(tensor.stride(-1) == 1 for tensor in (query, keys, values)), "rows must be contiguous"
    assert all(tensor is None or tensor.is_contiguous() for tensor in (sinks, slopes)), "heads must be contiguous"
    tile = tile_config(
        num_rows=num_rows,
        num_requests=num_requests,
        group=group,
        key_size=key_size,
        value_size=value_size,
        bytes_per_element=query.element_size(),
    )
    output = query.new_empty(num_rows, heads, value_size)
    # The interpreter would multiply the bit patterns of bfloat16.
    widen = not query.is_cuda
    grid = (num_rows // (tile.block_m // group) + num_requests + 1, kv_heads)
    # fmt: off
    _on_device(_attention_kernel, query)[grid](
        output, query, keys, values, *metadata_sinks_slopes, num_rows, num_requests, *query.stride()[:2], *strides,
        block_table.stride(0), *score, group, heads, key_size, value_size, block_size,
        tile.block_m, tile.block_n, tile.block_d, tile.block_dv, widen,
        num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=True,
    )
    # fmt: on
    return output


def _write(key: Tensor, value: Tensor, key_pool: Tensor, value_pool: Tensor, slot_mapping: Tensor) -> None:
    assert key_pool.stride(-1) == value_pool.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    num_rows, kv_heads, key_size = key.shape
    value_size = value.shape[-1]
    if num_rows == 0:
        return
    # fmt: off
    _on_device(_write_kernel, key)[(num_rows,)](
        key, value, key_pool, value_pool, slot_mapping, *key.stride()[:2], *value.stride()[:2],
        *key_pool.stride()[:3], *value_pool.stride()[:3], kv_heads, key_size, value_size, key_pool.shape[2],
        *(triton.next_power_of_2(size) for size in (kv_heads, key_size, value_size)),
        num_warps=4, enable_fp_fusion=True,
    )
    # fmt: on


def _on_device(kernel: Any, tensor: Tensor) -> Any:
    return kernel if tensor.is_cuda else interpreted(kernel)
