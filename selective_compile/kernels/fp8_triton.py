"""Numbers as e4m3, as Triton's kernels here write them: the bytes of `selective_compile.fp8_rows`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch.torch_version import TorchVersion
from triton.language.target_info import cuda_capability_geq

# Triton 3.6 brings e4m3 to bfloat16 by way of float16, and that by an instruction that GPUs have from sm_90 on.
BY_WAY_OF_HALVES = tl.constexpr(TorchVersion(triton.__version__) < TorchVersion("3.8"))


@triton.constexpr_function
def through_float32(given, wanted):
    """Whether e4m3 has to become float32 first."""
    missing = BY_WAY_OF_HALVES.value and cuda_capability_geq(8, 9) and not cuda_capability_geq(9, 0)
    return missing and given.is_fp8() and wanted.is_bf16()


@triton.jit
def as_fp8(x, scale):
    """x / scale, rounded to nearest with ties to even, at most 448 in magnitude; NaN stays NaN.

    In whole numbers, so that Triton's interpreter has the same bytes: its own conversion drops the carry of one bit
    into the next.
    """
    y = tl.div_rn(x.to(tl.float32), scale)
    magnitude = tl.minimum(tl.abs(y), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    # The exponent and 3 bits behind the first one; that of e4m3 is 120 less.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 multiples of 2**-9, which are the last bits of a sum with 1.5 * 2**14.
    small = (magnitude + 24576.0).to(tl.int32, bitcast=True) & 15
    sign = (y.to(tl.int32, bitcast=True) >> 24) & 0x80
    byte = tl.where(y == y, tl.where(magnitude < 0.015625, small, normal) | sign, 0x7F)
    return byte.to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def as_kept(x, scales, head, head_mask):
    """x as a pool keeps it: with scales [K] of the heads that it is of, as e4m3; without, as it is."""
    if scales is not None:
        x = as_fp8(x, tl.load(scales + head, head_mask, 1.0))
    return x


@triton.jit
def as_read(x, like):
    """x of a pool in the dtype of ``like``, which has every number of e4m3; without its scale."""
    if through_float32(x.dtype, like.dtype):
        x = x.to(tl.float32)
    return x.to(like.dtype)
