"""Mamba-2's recurrence in Triton.

Legend
    BLOCK_P  rows of a head's state [P, n] that a program has
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
    output,  # [T, H, P] contiguous
    x,  # [T, H, P]
    dt,  # [T, H]
    A,  # [H]
    B,  # [T, G, n]
    C,  # [T, G, n]
    D,  # [H] or None
    state_pool,  # [num_slots, H, P, n] or None
    cu_seqlens_q,  # [N + 1]
    context_lens,  # [N]; without a pool not read
    state_slots,  # [N]; without a pool not read
    num_rows,
    num_requests,
    slot_stride,
    x_stride,
    x_head_stride,
    dt_stride,
    b_stride,
    b_group_stride,
    c_stride,
    c_group_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    LOG2_E: tl.constexpr = 1.4426950408889634
    PER_HEAD: tl.constexpr = (HEAD_SIZE + BLOCK_P - 1) // BLOCK_P
    begin, end, real = request_rows(cu_seqlens_q, num_rows, num_requests)
    if begin >= end:
        return
    head = tl.program_id(1) // PER_HEAD
    group = head // GROUP
    p = tl.program_id(1) % PER_HEAD * BLOCK_P + tl.arange(0, BLOCK_P)
    own = p < HEAD_SIZE
    n = tl.arange(0, BLOCK_N)
    cell = (head * HEAD_SIZE + p[:, None]) * SIZE + n[None, :]
    rate = tl.load(A + head).to(tl.float32) * LOG2_E
    if D is not None:
        skip = tl.load(D + head).to(tl.float32)
    state = tl.full([BLOCK_P, BLOCK_N], 0.0, tl.float32)
    if state_pool is not None:
        slot, continues = request_slot(state_pool, slot_stride, context_lens, state_slots, end - begin, real)
        state = tl.load(slot + cell, own[:, None] & (n < SIZE * continues)[None, :], 0.0)
    row = begin.to(tl.int64)
    for _ in range(begin, end):
        input = tl.load(x + row * x_stride + head * x_head_stride + p, own, 0.0).to(tl.float32)
        step = tl.load(dt + row * dt_stride + head).to(tl.float32)
        b = tl.load(B + row * b_stride + group * b_group_stride + n, n < SIZE, 0.0).to(tl.float32)
        c = tl.load(C + row * c_stride + group * c_group_stride + n, n < SIZE, 0.0).to(tl.float32)
        state = tl.exp2(step * rate) * state + (step * input)[:, None] * b[None, :]
        result = tl.reduce(state * c[None, :], 1, tl.standard._sum_combine)
        if D is not None:
            result += skip * input
        result = tl.where(real > 0, result, 0.0)
        tl.store(output + (row * HEADS + head) * HEAD_SIZE + p, result.to(output.dtype.element_ty), own)
        row += 1
    if state_pool is not None:
        tl.store(slot + cell, state, own[:, None] & (n < SIZE * real)[None, :])


def ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, *requests: Any) -> Tensor:
    """`selective::ssd`. Returns [T, H, P]."""
    x, dt, B, C = (rows(tensor) for tensor in (x, dt, B, C))
    (_, heads, head_size), (_, groups, size) = x.shape, B.shape
    block_n = triton.next_power_of_2(size)
    block_p = min(triton.next_power_of_2(head_size), max(1, 4096 // block_n))
    return launch(
        _kernel,
        heads * triton.cdiv(head_size, block_p),
        empty_result(x),
        (x, dt, A.contiguous(), B, C, None if D is None else D.contiguous()),
        requests,
        (*x.stride()[:2], dt.stride(0), *B.stride()[:2], *C.stride()[:2]),
        (heads, heads // groups, head_size, size, block_p, block_n),
        num_warps=4,
    )
