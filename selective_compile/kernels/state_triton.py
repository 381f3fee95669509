"""What the Triton kernels of the ops with a state share: a program's request and slot, and the launch.

Legend
    grid        (N + 1, blocks): one program for each request and block of it; a block is a head or some channels or
                columns of one, whose state does not touch that of another. It depends on sizes and N only, never on
                lengths, which stay on the device. The padding rows are a request N, whose result is 0
    state_pool  None: every request is fresh and nothing is kept; the code that reads and writes slots is not compiled

A program takes the rows of its request one after another with the state in registers, in float32. Block sizes are
bounded by registers: `tests/kernels` compiles every kernel for sm_80, sm_90, sm_100 and gfx942 and fails on a spill.
Their speed has not been measured on a GPU.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from selective_compile.kernels.interpreter import on_device

# What changes from step to step must not change the compiled kernel: N and T are not specialised on 1 and on multiples
# of 16, nor are the metadata tensors on their alignment (they may be slices of one buffer).
SAME_KERNEL = {
    "do_not_specialize": ["num_rows", "num_requests"],
    "do_not_specialize_on_alignment": ["cu_seqlens_q", "context_lens", "state_slots"],
}


@triton.jit
def request_rows(cu_seqlens_q, num_rows, num_requests):
    """The request's first row, the row behind its last, and 1 if it is a request, 0 if it is the padding."""
    # Numbers, for Triton's interpreter makes no mask of a truth value and a block of them.
    request = tl.program_id(0)
    real = request < num_requests
    begin = tl.load(cu_seqlens_q + request)
    end = tl.load(cu_seqlens_q + request + 1, mask=real, other=num_rows)
    return begin, end, real.to(tl.int32)


@triton.jit
def request_slot(state_pool, slot_stride, context_lens, state_slots, rows, real):
    """The request's slot, and 1 if it continues from what is there, else 0."""
    request = tl.program_id(0)
    context = tl.load(context_lens + request, mask=real > 0, other=0)
    slot = tl.load(state_slots + request, mask=real > 0, other=0)
    return state_pool + slot * slot_stride, real * (context > rows).to(tl.int32)


def launch(
    kernel: Any,
    blocks: int,
    output: Tensor,
    tensors: tuple[Tensor | None, ...],
    requests: tuple[Tensor | None, ...],
    strides: tuple[int, ...],
    constants: tuple[Any, ...],
    *,
    num_warps: int,
) -> Tensor:
    """Run a kernel whose parameters are output, tensors, pool and requests, sizes, strides and constants."""
    pool, cu_seqlens_q, context_lens, state_slots = requests
    assert cu_seqlens_q is not None and cu_seqlens_q.is_contiguous()
    num_rows, num_requests, slot_stride = output.shape[0], cu_seqlens_q.shape[0] - 1, 0
    if pool is not None:
        assert context_lens is not None and state_slots is not None, "a pool comes with its requests"
        assert context_lens.is_contiguous() and state_slots.is_contiguous()
        assert pool.is_contiguous() or pool[:1].is_contiguous(), "a slot must be contiguous"
        slot_stride = pool.stride(0)
    # Without a pool these are not read, but a kernel's parameter must be something.
    lengths, slots = (cu_seqlens_q, cu_seqlens_q) if pool is None else (context_lens, state_slots)
    # fmt: off
    on_device(kernel, output)[(num_requests + 1, blocks)](
        output, *tensors, pool, cu_seqlens_q, lengths, slots, num_rows, num_requests, slot_stride, *strides,
        *constants, num_warps=num_warps, enable_fp_fusion=True,
    )
    # fmt: on
    return output


def rows(tensor: Tensor) -> Tensor:
    """The tensor with contiguous vectors: itself where they are."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def empty_result(like: Tensor) -> Tensor:
    """A contiguous tensor for the result, of the shape and dtype of `like`."""
    return like.new_empty(like.shape)
