"""Causal convolutions in Triton.

Legend
    BLOCK_T  rows of an iteration: no row waits for another, for every one reads its W inputs from memory
    BLOCK_C  channels of a program
    BLOCK_W  W - 1 rounded up to a power of two: the columns of a slot
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from selective_compile.kernels.state_triton import SAME_KERNEL, empty_result, launch, request_rows, request_slot, rows


@triton.jit(**SAME_KERNEL)
def _kernel(
    output,  # [T, C] contiguous
    x,  # [T, C]
    weight,  # [C, W]
    bias,  # [C] or None
    state_pool,  # [num_slots, C, W - 1] or None
    cu_seqlens_q,  # [N + 1]
    context_lens,  # [N]; without a pool not read
    state_slots,  # [N]; without a pool not read
    num_rows,
    num_requests,
    slot_stride,
    x_stride,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    LOG2_E: tl.constexpr = 1.4426950408889634
    begin, end, real = request_rows(cu_seqlens_q, num_rows, num_requests)
    if begin >= end:
        return
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    own = c < CHANNELS
    if state_pool is not None:
        slot, continues = request_slot(state_pool, slot_stride, context_lens, state_slots, end - begin, real)
        # Rows before this one are read from the slot: those of a fresh request all lie behind it.
        kept_end = begin - WIDTH * (1 - continues)
    for start in range(begin, end, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        total = tl.full([BLOCK_T, BLOCK_C], 0.0, tl.float32)
        if bias is not None:
            total += tl.load(bias + c, own, 0.0).to(tl.float32)[None, :]
        for w in tl.static_range(WIDTH):
            row = t - (WIDTH - 1) + w
            inside = (row >= begin) & (row < end)
            at = x + row.to(tl.int64)[:, None] * x_stride + c[None, :]
            value = tl.load(at, inside[:, None] & own[None, :], 0.0).to(tl.float32)
            if state_pool is not None:
                past = slot + c[None, :] * (WIDTH - 1) + (row - begin + WIDTH - 1)[:, None]
                before = row < kept_end
                value += tl.load(past, before[:, None] & own[None, :], 0.0).to(tl.float32)
            total += tl.load(weight + c * WIDTH + w, own, 0.0).to(tl.float32)[None, :] * value
        if SILU:
            total = total / (1.0 + tl.exp2(-LOG2_E * total))
        total = tl.where(real > 0, total, 0.0)
        mask = (t < end)[:, None] & own[None, :]
        tl.store(output + t.to(tl.int64)[:, None] * CHANNELS + c[None, :], total.to(output.dtype.element_ty), mask)
    if state_pool is not None:
        if WIDTH > 1:
            w = tl.arange(0, BLOCK_W)
            row = end - (WIDTH - 1) + w
            kept = own[:, None] & (w < WIDTH - 1)[None, :]
            at = x + row.to(tl.int64)[None, :] * x_stride + c[:, None]
            value = tl.load(at, kept & (row >= begin)[None, :], 0.0)
            past = slot + c[:, None] * (WIDTH - 1) + (row - begin + WIDTH - 1)[None, :]
            value += tl.load(past, kept & (row < kept_end)[None, :], 0.0)
            # Threads read what others are about to write.
            tl.debug_barrier()
            tl.store(slot + c[:, None] * (WIDTH - 1) + w[None, :], value, kept & (w < (WIDTH - 1) * real)[None, :])


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state_pool: Tensor | None,
    cu_seqlens_q: Tensor,
    context_lens: Tensor | None,
    state_slots: Tensor | None,
    silu: bool,
) -> Tensor:
    """`selective::causal_conv1d`. Returns [T, C]."""
    x, weight = rows(x), weight.contiguous()
    (num_rows, channels), width = x.shape, weight.shape[1]
    # At two rows a request or fewer on average, a tall tile would be mostly masked.
    decode = num_rows <= 2 * (cu_seqlens_q.shape[0] - 1)
    block_c = 128 if decode else 64
    return launch(
        _kernel,
        triton.cdiv(channels, block_c),
        empty_result(x),
        (x, weight, None if bias is None else bias.contiguous()),
        (state_pool, cu_seqlens_q, context_lens, state_slots),
        (x.stride(0),),
        (channels, width, silu, 1 if decode else 16, block_c, triton.next_power_of_2(max(1, width - 1))),
        num_warps=4,
    )
