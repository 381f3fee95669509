"""xLSTM's matrix memory in Triton.

Legend
    BLOCK_D  D rounded up to a power of two
    BLOCK_V  columns of a head's state [D, Dv] that a program has
    normaliser  the last column of a slot, and m in its corner. Every program of a head reads them and computes them for
                itself, so that none may write them: a second kernel does, when the first has ended
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
    query,  # [T, H, D]
    key,  # [T, H, D]
    value,  # [T, H, Dv]
    input_gate,  # [T, H]
    decay,  # [T, H]
    state_pool,  # [num_slots, H, D + 1, Dv + 1] or None
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
    gate_stride,
    decay_stride,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NORMALISER: tl.constexpr,
):
    LOG2_E: tl.constexpr = 1.4426950408889634
    WIDTH: tl.constexpr = VALUE_SIZE + 1
    PER_HEAD: tl.constexpr = 1 if NORMALISER else (VALUE_SIZE + BLOCK_V - 1) // BLOCK_V
    begin, end, real = request_rows(cu_seqlens_q, num_rows, num_requests)
    if begin >= end:
        return
    head = tl.program_id(1) // PER_HEAD
    dv = tl.program_id(1) % PER_HEAD * BLOCK_V + tl.arange(0, BLOCK_V)
    own = dv < VALUE_SIZE
    d = tl.arange(0, BLOCK_D)
    first = head * (KEY_SIZE + 1) * WIDTH
    corner = first + KEY_SIZE * WIDTH + VALUE_SIZE
    cell = first + d[:, None] * WIDTH + dv[None, :]
    last = first + d * WIDTH + VALUE_SIZE
    largest = 0.0
    normaliser = tl.full([BLOCK_D], 0.0, tl.float32)
    state = tl.full([BLOCK_D, BLOCK_V], 0.0, tl.float32)
    if state_pool is not None:
        slot, continues = request_slot(state_pool, slot_stride, context_lens, state_slots, end - begin, real)
        largest = tl.load(slot + corner, mask=continues > 0, other=0.0)
        normaliser = tl.load(slot + last, d < KEY_SIZE * continues, 0.0)
        if not NORMALISER:
            state = tl.load(slot + cell, (d < KEY_SIZE * continues)[:, None] & own[None, :], 0.0)
    row = begin.to(tl.int64)
    for _ in range(begin, end):
        k = tl.load(key + row * key_stride + head * key_head_stride + d, d < KEY_SIZE, 0.0).to(tl.float32)
        gate = tl.load(input_gate + row * gate_stride + head).to(tl.float32)
        faded = largest + tl.load(decay + row * decay_stride + head).to(tl.float32)
        largest = tl.maximum(faded, gate)
        kept = tl.exp2((faded - largest) * LOG2_E)
        added = tl.exp2((gate - largest) * LOG2_E)
        normaliser = kept * normaliser + added * k
        if not NORMALISER:
            q = tl.load(query + row * query_stride + head * query_head_stride + d, d < KEY_SIZE, 0.0).to(tl.float32)
            v = tl.load(value + row * value_stride + head * value_head_stride + dv, own, 0.0).to(tl.float32)
            state = kept * state + k[:, None] * (added * v)[None, :]
            answer = SCALE * tl.reduce(state * q[:, None], 0, tl.standard._sum_combine)
            weight = tl.abs(SCALE * tl.reduce(normaliser * q, 0, tl.standard._sum_combine))
            weight = tl.maximum(weight, tl.exp2(-largest * LOG2_E)) + EPS
            result = tl.where(real > 0, answer / weight, 0.0)
            tl.store(output + (row * HEADS + head) * VALUE_SIZE + dv, result.to(output.dtype.element_ty), own)
        row += 1
    if state_pool is not None:
        if NORMALISER:
            tl.debug_barrier()  # every warp has read the corner, which one of them writes now
            tl.store(slot + last, normaliser, d < KEY_SIZE * real)
            tl.store(slot + corner, largest, mask=real > 0)
            for start in range(0, VALUE_SIZE, BLOCK_V):
                blank = start + tl.arange(0, BLOCK_V)
                tl.store(slot + first + KEY_SIZE * WIDTH + blank, blank * 0.0, blank < VALUE_SIZE * real)
        else:
            tl.store(slot + cell, state, (d < KEY_SIZE * real)[:, None] & own[None, :])


def mlstm(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    input_gate: Tensor,
    decay: Tensor,
    scale: float,
    eps: float,
    *requests: Any,
) -> Tensor:
    """`selective::mlstm`. Returns [T, H, Dv]."""
    query, key, value, input_gate, decay = (rows(tensor) for tensor in (query, key, value, input_gate, decay))
    (_, heads, key_size), value_size = key.shape, value.shape[2]
    block_d = triton.next_power_of_2(key_size)
    block_v = min(triton.next_power_of_2(value_size), max(1, 4096 // block_d))
    strides = [stride for tensor in (query, key, value) for stride in tensor.stride()[:2]]
    output = empty_result(value)
    for normaliser in (False, True):
        if normaliser and requests[0] is None:
            break
        launch(
            _kernel,
            heads * (1 if normaliser else triton.cdiv(value_size, block_v)),
            output,
            (query, key, value, input_gate, decay),
            requests,
            (*strides, input_gate.stride(0), decay.stride(0)),
            (scale, eps, heads, key_size, value_size, block_d, block_v, normaliser),
            num_warps=4,
        )
    return output
