"""The write of a step's keys alone into their pool in Triton, for CUDA and ROCm: of latents, and of a sparse indexer.

Legend
    row        a token of the step, one program each
    BLOCK_K    heads, padded to a power of two; BLOCK_D likewise the head size
    BLOCK_SIZE slots of a block
    PDL        whether it begins before the kernel in front of it has ended: `dependent_launch`

What is written is read by the launch behind it. The speed has not been measured on a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from selective_compile.kernels.dependent_launch import begins_early, launch_options
from selective_compile.kernels.fp8_triton import as_kept
from selective_compile.kernels.interpreter import on_device


@triton.jit(do_not_specialize_on_alignment=["slot_mapping", "key_scales"])
def _write_kernel(
    key,  # [T, K, D]
    key_pool,  # [num_blocks, K, BLOCK_SIZE, D]
    slot_mapping,  # [T]
    key_scales,  # [K] with a pool of e4m3, else None
    key_row_stride,
    key_head_stride,
    key_block_stride,
    key_pool_head_stride,
    key_slot_stride,
    KV_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_K)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = (head < KV_HEADS) & (d < KEY_SIZE)
    # Both at once, as in `ragged_attention_write_triton`.
    slot = tl.load(slot_mapping + row)
    k = tl.load(key + row * key_row_stride + head * key_head_stride + d, mask)
    k = as_kept(k, key_scales, head, head < KV_HEADS)
    to = key_pool + slot // BLOCK_SIZE * key_block_stride + slot % BLOCK_SIZE * key_slot_stride
    tl.store(to + head * key_pool_head_stride + d, k, mask & (head * 0 + slot >= 0))


def write_keys(key: Tensor, key_pool: Tensor, slot_mapping: Tensor, key_scales: Tensor | None = None) -> None:
    """Each row's keys [T, K, D] into its slot of the pool; a slot of -1: nowhere."""
    assert key_pool.stride(-1) == key.stride(-1) == 1
    num_rows, kv_heads, size = key.shape
    if num_rows == 0:
        return
    early = begins_early(key.device)
    # fmt: off
    on_device(_write_kernel, key)[(num_rows,)](
        key, key_pool, slot_mapping, key_scales, *key.stride()[:2], *key_pool.stride()[:3], kv_heads, size,
        key_pool.shape[2], triton.next_power_of_2(kv_heads), triton.next_power_of_2(size),
        early, num_warps=4, enable_fp_fusion=True, **launch_options(early),
    )
    # fmt: on
