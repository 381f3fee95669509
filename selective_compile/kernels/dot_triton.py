"""A matrix product of two blocks, as Triton's kernels here have it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch.torch_version import TorchVersion
from triton.language.target_info import cuda_capability_geq

# Triton before 3.7.1 leaves out the fence which PTX asks for between what threads copy to shared memory and a product
# that reads it there by itself, as Hopper's and Blackwell's do: its issue 10537.
UNFENCED = tl.constexpr(TorchVersion(triton.__version__) < TorchVersion("3.7.1"))


@triton.constexpr_function
def unfenced_in_a_loop() -> bool:
    """Whether a loop with such a product must not be divided in stages: of Blackwell's, Triton cannot, with a fence."""
    return UNFENCED.value and cuda_capability_geq(10, 0)


@triton.jit
def fence():
    """What threads have written to shared memory, products see."""
    if UNFENCED and cuda_capability_geq(9, 0):
        tl.inline_asm_elementwise(
            "fence.proxy.async.shared::cta; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def widened_dot(a, b, accumulator, WIDEN: tl.constexpr, BULK: tl.constexpr = False):
    """BULK: what is multiplied has come by bulk copies, or from registers."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    elif not BULK and a.dtype.primitive_bitwidth == 16 and a.shape[0] >= 64:
        fence()  # of float32, and of fewer rows, threads multiply
    # "ieee": a float32 product is not rounded to TF32. It has no effect on bfloat16 and float16.
    return tl.dot(a, b, accumulator, input_precision="ieee")
