"""How the attention kernel in Triton reads keys and values, and multiplies values that are late;
`ragged_attention_attend_triton` has the legend."""

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
