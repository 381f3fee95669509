"""How the attention kernel in Triton asks for keys and values, reads them, and multiplies values that are late;
`ragged_attention_kernel_triton` has the legend."""

from __future__ import annotations

import triton
import triton.language as tl

from selective_compile.kernels.dot_triton import widened_dot


@triton.jit
def blocks_of_keys(entries, start, read, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr):
    """The blocks of the keys from start on, by a request's entries of the block table: one, or one for each key."""
    if BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(entries + start // BLOCK_SIZE)
    elif MASKED:
        block = tl.load(entries + (start + tl.arange(0, BLOCK_N)) // BLOCK_SIZE, read, 0)
    else:
        block = tl.load(entries + (start + tl.arange(0, BLOCK_N)) // BLOCK_SIZE)
    return block


@triton.jit
def elements(pointers, wanted, SIZE: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """The keys or values of an iteration [BLOCK_N, PADDED], from where each begins; those not wanted are 0."""
    d = tl.arange(0, PADDED)
    at = pointers[:, None] + d[None, :]
    if MASKED:
        rows = tl.load(at, wanted[:, None] & (d < SIZE)[None, :], 0.0)
    elif SIZE < PADDED:
        rows = tl.load(at, (d < SIZE)[None, :], 0.0)
    else:
        rows = tl.load(at)
    return rows


@triton.jit
def added_by_distance(biases, offset, position, j, wanted, DISTANCES: tl.constexpr):
    """What is added to the scores of rows at ``position`` with keys j, of biases from ``offset`` on for each row; a key
    as far back as the last of them, or farther, has that one."""
    distance = tl.minimum(tl.maximum(position[:, None] - j[None, :], 0), DISTANCES - 1)
    return tl.load(biases + (offset[:, None] + distance), wanted[:, None], 0.0).to(tl.float32)


@triton.jit
def ask_ahead(
    keys,
    values,
    entries,
    kv_head,
    begin,
    end,
    there,
    key_block_stride,
    key_head_stride,
    value_block_stride,
    value_head_stride,
    AHEAD: tl.constexpr,
    LANES: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Have the second-level cache read the keys and values of AHEAD iterations of [begin, end): of the last one, which
    is walked first, and of those from ``begin`` on.  Nothing waits for it, and what is written to them meanwhile is
    written in that cache (PTX ISA, "cp.async.bulk.prefetch"). Slots of a block lie one behind another.

    there: whether this program has any; LANES: its threads, each of which asks for the keys or values of one
    iteration, or for nothing.
    """
    lane = tl.arange(0, LANES)
    iteration = lane % AHEAD
    last = (end - 1) // BLOCK_N * BLOCK_N
    start = tl.where(iteration == 0, last, begin + (iteration - 1) * BLOCK_N)
    asks = there & (lane < 2 * AHEAD) & (begin < end) & ((iteration == 0) | (start < last))
    block = tl.load(entries + start // BLOCK_SIZE, asks, 0, cache_modifier=".cg").to(tl.int64)
    slot, kv_head = start % BLOCK_SIZE, kv_head.to(tl.int64)
    of_keys = keys + block * key_block_stride + kv_head * key_head_stride + slot * KEY_SIZE
    of_values = values + block * value_block_stride + kv_head * value_head_stride + slot * VALUE_SIZE
    BYTES: tl.constexpr = BLOCK_N * keys.dtype.element_ty.primitive_bitwidth // 8
    tl.inline_asm_elementwise(
        "{ .reg .pred %p; setp.ne.b32 %p, $3, 0; @%p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r,r",
        [
            tl.where(lane < AHEAD, of_keys.to(tl.uint64), of_values.to(tl.uint64)),
            tl.where(lane < AHEAD, BYTES * KEY_SIZE, BYTES * VALUE_SIZE),
            asks.to(tl.int32),
        ],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def late_product(
    accumulator,
    correction,
    weight,
    values,
    block,
    kv_head,
    slot,
    BLOCK_N: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """The accumulator with the values that an iteration has left to the one behind it."""
    v = values.load([block, kv_head, slot, 0]).reshape([BLOCK_N, BLOCK_DV])
    return widened_dot(weight.to(v.dtype), v, accumulator * correction[:, None], WIDEN, True)
