"""Diagonal recurrences in Triton. BLOCK_C: channels of a program."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from selective_compile.kernels.state_triton import SAME_KERNEL, empty_result, launch, request_rows, request_slot, rows


@triton.jit(**SAME_KERNEL)
def _kernel(
    output,  # [T, C] contiguous
    decay,  # [T, C]
    update,  # [T, C]
    state_pool,  # [num_slots, C] or None
    cu_seqlens_q,  # [N + 1]
    context_lens,  # [N]; without a pool not read
    state_slots,  # [N]; without a pool not read
    num_rows,
    num_requests,
    slot_stride,
    decay_stride,
    update_stride,
    CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    begin, end, real = request_rows(cu_seqlens_q, num_rows, num_requests)
    if begin >= end:
        return
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    own = c < CHANNELS
    state = tl.full([BLOCK_C], 0.0, tl.float32)
    if state_pool is not None:
        slot, continues = request_slot(state_pool, slot_stride, context_lens, state_slots, end - begin, real)
        state = tl.load(slot + c, c < CHANNELS * continues, 0.0)
    row = begin.to(tl.int64)
    for _ in range(begin, end):
        factor = tl.load(decay + row * decay_stride + c, own, 0.0).to(tl.float32)
        added = tl.load(update + row * update_stride + c, own, 0.0).to(tl.float32)
        state = factor * state + added
        result = tl.where(real > 0, state, 0.0)
        tl.store(output + row * CHANNELS + c, result.to(output.dtype.element_ty), own)
        row += 1
    if state_pool is not None:
        tl.store(slot + c, state, c < CHANNELS * real)


def linear_recurrence(decay: Tensor, update: Tensor, *requests: Any) -> Tensor:
    """`selective::linear_recurrence`. Returns [T, C]."""
    decay, update = rows(decay), rows(update)
    channels, block_c = update.shape[1], 128
    return launch(
        _kernel,
        triton.cdiv(channels, block_c),
        empty_result(update),
        (decay, update),
        requests,
        (decay.stride(0), update.stride(0)),
        (channels, block_c),
        num_warps=4,
    )
