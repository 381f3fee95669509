"""RWKV-4's recurrence in Triton. BLOCK_C: channels of a program."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from selective_compile.kernels.state_triton import SAME_KERNEL, empty_result, launch, request_rows, request_slot, rows


@triton.jit(**SAME_KERNEL)
def _kernel(
    output,  # [T, C] contiguous
    time_decay,  # [C]
    time_first,  # [C]
    key,  # [T, C]
    value,  # [T, C]
    state_pool,  # [num_slots, C, 3] or None
    cu_seqlens_q,  # [N + 1]
    context_lens,  # [N]; without a pool not read
    state_slots,  # [N]; without a pool not read
    num_rows,
    num_requests,
    slot_stride,
    key_stride,
    value_stride,
    CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    LOG2_E: tl.constexpr = 1.4426950408889634
    begin, end, real = request_rows(cu_seqlens_q, num_rows, num_requests)
    if begin >= end:
        return
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    own = c < CHANNELS
    fade = tl.load(time_decay + c, own, 0.0).to(tl.float32)
    bonus = tl.load(time_first + c, own, 0.0).to(tl.float32)
    numerator = tl.full([BLOCK_C], 0.0, tl.float32)
    denominator = tl.full([BLOCK_C], 0.0, tl.float32)
    largest = tl.full([BLOCK_C], -1e38, tl.float32)
    if state_pool is not None:
        slot, continues = request_slot(state_pool, slot_stride, context_lens, state_slots, end - begin, real)
        numerator = tl.load(slot + c * 3, c < CHANNELS * continues, 0.0)
        denominator = tl.load(slot + c * 3 + 1, c < CHANNELS * continues, 0.0)
        largest = tl.load(slot + c * 3 + 2, c < CHANNELS * continues, -1e38)
    row = begin.to(tl.int64)
    for _ in range(begin, end):
        k = tl.load(key + row * key_stride + c, own, 0.0).to(tl.float32)
        v = tl.load(value + row * value_stride + c, own, 0.0).to(tl.float32)
        now = tl.maximum(largest, bonus + k)
        past = tl.exp2((largest - now) * LOG2_E)
        present = tl.exp2((bonus + k - now) * LOG2_E)
        result = (past * numerator + present * v) / (past * denominator + present)
        result = tl.where(real > 0, result, 0.0)
        tl.store(output + row * CHANNELS + c, result.to(output.dtype.element_ty), own)
        new = tl.maximum(largest + fade, k)
        past = tl.exp2((largest + fade - new) * LOG2_E)
        present = tl.exp2((k - new) * LOG2_E)
        numerator = past * numerator + present * v
        denominator = past * denominator + present
        largest = new
        row += 1
    if state_pool is not None:
        tl.store(slot + c * 3, numerator, c < CHANNELS * real)
        tl.store(slot + c * 3 + 1, denominator, c < CHANNELS * real)
        tl.store(slot + c * 3 + 2, largest, c < CHANNELS * real)


def wkv(time_decay: Tensor, time_first: Tensor, key: Tensor, value: Tensor, *requests: Any) -> Tensor:
    """`selective::wkv`. Returns [T, C]."""
    key, value = rows(key), rows(value)
    channels, block_c = value.shape[1], 128
    return launch(
        _kernel,
        triton.cdiv(channels, block_c),
        empty_result(value),
        (time_decay.contiguous(), time_first.contiguous(), key, value),
        requests,
        (key.stride(0), value.stride(0)),
        (channels, block_c),
        num_warps=4,
    )
