"""A matrix product of two blocks, as Triton's kernels here have it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widened_dot(a, b, accumulator, WIDEN: tl.constexpr):
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    # "ieee": a float32 product is not rounded to TF32. It has no effect on bfloat16 and float16.
    return tl.dot(a, b, accumulator, input_precision="ieee")
