"""Mamba-1's selective scan in Triton.

Legend
    GROUP    channels that share a row of B and of C: I // G
    BLOCK_C  channels of a program, all of one group
    BLOCK_N  n rounded up to a power of two
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from selective_compile.kernels.state_triton import SAME_KERNEL, empty_result, launch, request_rows, request_slot, rows


@triton.jit(**SAME_KERNEL)
def _kernel(
    output,  # [T, I] contiguous
    x,  # [T, I]
    dt,  # [T, I]
    A,  # [I, n]
    B,  # [T, G, n]
    C,  # [T, G, n]
    D,  # [I] or None
    state_pool,  # [num_slots, I, n] or None
    cu_seqlens_q,  # [N + 1]
    context_lens,  # [N]; without a pool not read
    state_slots,  # [N]; without a pool not read
    num_rows,
    num_requests,
    slot_stride,
    x_stride,
    dt_stride,
    b_stride,
    b_group_stride,
    c_stride,
    c_group_stride,
    CHANNELS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    LOG2_E: tl.constexpr = 1.4426950408889634
    PER_GROUP: tl.constexpr = (GROUP + BLOCK_C - 1) // BLOCK_C
    begin, end, real = request_rows(cu_seqlens_q, num_rows, num_requests)
    if begin >= end:
        return
    group = tl.program_id(1) // PER_GROUP
    member = tl.program_id(1) % PER_GROUP * BLOCK_C + tl.arange(0, BLOCK_C)
    own = member < GROUP
    channel = group * GROUP + member
    n = tl.arange(0, BLOCK_N)
    cell = channel[:, None] * SIZE + n[None, :]
    valid = own[:, None] & (n < SIZE)[None, :]
    rate = tl.load(A + cell, valid, 0.0).to(tl.float32) * LOG2_E
    if D is not None:
        skip = tl.load(D + channel, own, 0.0).to(tl.float32)
    state = tl.full([BLOCK_C, BLOCK_N], 0.0, tl.float32)
    if state_pool is not None:
        slot, continues = request_slot(state_pool, slot_stride, context_lens, state_slots, end - begin, real)
        state = tl.load(slot + cell, own[:, None] & (n < SIZE * continues)[None, :], 0.0)
    row = begin.to(tl.int64)
    for _ in range(begin, end):
        input = tl.load(x + row * x_stride + channel, own, 0.0).to(tl.float32)
        step = tl.load(dt + row * dt_stride + channel, own, 0.0).to(tl.float32)
        b = tl.load(B + row * b_stride + group * b_group_stride + n, n < SIZE, 0.0).to(tl.float32)
        c = tl.load(C + row * c_stride + group * c_group_stride + n, n < SIZE, 0.0).to(tl.float32)
        state = tl.exp2(step[:, None] * rate) * state + (step * input)[:, None] * b[None, :]
        result = tl.reduce(state * c[None, :], 1, tl.standard._sum_combine)
        if D is not None:
            result += skip * input
        result = tl.where(real > 0, result, 0.0)
        tl.store(output + row * CHANNELS + channel, result.to(output.dtype.element_ty), own)
        row += 1
    if state_pool is not None:
        tl.store(slot + cell, state, own[:, None] & (n < SIZE * real)[None, :])


def selective_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, *requests: Any) -> Tensor:
    """`selective::selective_scan`. Returns [T, I]."""
    x, dt, B, C = (rows(tensor) for tensor in (x, dt, B, C))
    B, C = (tensor[:, None] if tensor.dim() == 2 else tensor for tensor in (B, C))
    (num_rows, channels), size, groups = x.shape, A.shape[1], max(B.shape[1], C.shape[1])
    B, C = (tensor.expand(num_rows, groups, size) for tensor in (B, C))
    block_n = triton.next_power_of_2(size)
    block_c = min(triton.next_power_of_2(channels // groups), max(1, 1024 // block_n))
    return launch(
        _kernel,
        groups * triton.cdiv(channels // groups, block_c),
        empty_result(x),
        (x, dt, A.contiguous(), B, C, None if D is None else D.contiguous()),
        requests,
        (x.stride(0), dt.stride(0), *B.stride()[:2], *C.stride()[:2]),
        (channels, channels // groups, size, block_c, block_n),
        num_warps=2,
    )
