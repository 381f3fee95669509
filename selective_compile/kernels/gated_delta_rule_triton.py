"""The gated delta rule in Triton.

Legend
    BLOCK_D  D rounded up to a power of two
    BLOCK_V  columns of a head's state [D, Dv] that a program has: they do not touch one another
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from selective_compile.kernels.state_triton import SAME_KERNEL, empty_result, launch, request_rows, request_slot, rows


@triton.jit(**SAME_KERNEL)
def _kernel(
    output,  # [T, H, Dv] contiguous
    query,  # [T, Hk, D]
    key,  # [T, Hk, D]
    value,  # [T, H, Dv]
    decay,  # [T, H] or [T, H, D]
    beta,  # [T, H]
    state_pool,  # [num_slots, H, D, Dv] or None
    cu_seqlens_q,  # [N + 1]
    context_lens,  # [N]; without a pool not read
    state_slots,  # [N]; without a pool not read
    num_rows,
    num_requests,
    slot_stride,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    decay_stride,
    decay_head_stride,
    beta_stride,
    SCALE: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    LOG2_E: tl.constexpr = 1.4426950408889634
    PER_HEAD: tl.constexpr = (VALUE_SIZE + BLOCK_V - 1) // BLOCK_V
    begin, end, real = request_rows(cu_seqlens_q, num_rows, num_requests)
    if begin >= end:
        return
    head = tl.program_id(1) // PER_HEAD
    key_head = head // GROUP
    dv = tl.program_id(1) % PER_HEAD * BLOCK_V + tl.arange(0, BLOCK_V)
    own = dv < VALUE_SIZE
    d = tl.arange(0, BLOCK_D)
    cell = (head * KEY_SIZE + d[:, None]) * VALUE_SIZE + dv[None, :]
    state = tl.full([BLOCK_D, BLOCK_V], 0.0, tl.float32)
    if state_pool is not None:
        slot, continues = request_slot(state_pool, slot_stride, context_lens, state_slots, end - begin, real)
        state = tl.load(slot + cell, (d < KEY_SIZE * continues)[:, None] & own[None, :], 0.0)
    row = begin.to(tl.int64)
    for _ in range(begin, end):
        q = tl.load(query + row * query_stride + key_head * query_head_stride + d, d < KEY_SIZE, 0.0).to(tl.float32)
        k = tl.load(key + row * key_stride + key_head * key_head_stride + d, d < KEY_SIZE, 0.0).to(tl.float32)
        v = tl.load(value + row * value_stride + head * value_head_stride + dv, own, 0.0).to(tl.float32)
        strength = tl.load(beta + row * beta_stride + head).to(tl.float32)
        at = decay + row * decay_stride + head * decay_head_stride
        if PER_CHANNEL:
            state *= tl.exp2(tl.load(at + d, d < KEY_SIZE, 0.0).to(tl.float32) * LOG2_E)[:, None]
        else:
            state *= tl.exp2(tl.load(at).to(tl.float32) * LOG2_E)
        remembered = tl.reduce(state * k[:, None], 0, tl.standard._sum_combine)
        state += k[:, None] * (strength * (v - remembered))[None, :]
        result = SCALE * tl.reduce(state * q[:, None], 0, tl.standard._sum_combine)
        result = tl.where(real > 0, result, 0.0)
        tl.store(output + (row * HEADS + head) * VALUE_SIZE + dv, result.to(output.dtype.element_ty), own)
        row += 1
    if state_pool is not None:
        tl.store(slot + cell, state, (d < KEY_SIZE * real)[:, None] & own[None, :])


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, scale: float, *requests: Any
) -> Tensor:
    """`selective::gated_delta_rule`. Returns [T, H, Dv]."""
    query, key, value, decay, beta = (rows(tensor) for tensor in (query, key, value, decay, beta))
    (_, key_heads, key_size), (_, heads, value_size) = key.shape, value.shape
    block_d = triton.next_power_of_2(key_size)
    block_v = min(triton.next_power_of_2(value_size), max(1, 4096 // block_d))
    strides = (stride for tensor in (query, key, value, decay) for stride in tensor.stride()[:2])
    return launch(
        _kernel,
        heads * triton.cdiv(value_size, block_v),
        empty_result(value),
        (query, key, value, decay, beta),
        requests,
        (*strides, beta.stride(0)),
        (scale, decay.dim() == 3, heads, heads // key_heads, key_size, value_size, block_d, block_v),
        num_warps=4,
    )
